"""Batches -> BertForPreTraining -> a Hugging Face checkpoint."""

import os

# Read when torch is loaded: how often a waiting OpenMP thread spins before it sleeps. GNU's default
# of 300,000 makes two threads twenty times as slow as one when another process needs a core; 0
# halves the speed of a small model on an idle machine.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
# Compiled matrix products that oneDNN keeps; its default of 1,024 takes up to a gigabyte.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
