"""Batches -> BertForPreTraining -> a Hugging Face checkpoint."""

import os

# Read when torch is loaded: turns that a thread waits for another before it sleeps. GNU's 300,000
# make two threads twenty times as slow as one when another process needs a core; none halve the
# speed of a small model on an idle machine.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
# Products of each new shape are made ready once and kept, 1,024 of them in up to a gigabyte.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
