"""Read the text of a corpus, and select what of it to train on."""
