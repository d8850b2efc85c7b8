"""Draw the training data of a run from a token store: sentence pairs, masks, batches."""
