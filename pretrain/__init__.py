"""Batches -> BertForPreTraining -> a Hugging Face checkpoint."""
