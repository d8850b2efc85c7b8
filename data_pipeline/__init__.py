"""Turn raw text into training batches: vocabulary, token store, sentence pairs, masks, batches."""
