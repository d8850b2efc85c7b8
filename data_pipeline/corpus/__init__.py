"""Read the text of a corpus, and select the documents to train on."""
