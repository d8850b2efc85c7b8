"""Raw text -> vocabulary -> token store -> sentence pairs -> masks -> batches."""
