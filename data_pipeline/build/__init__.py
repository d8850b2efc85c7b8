"""Build the token store from the documents of a corpus, in parallel."""
