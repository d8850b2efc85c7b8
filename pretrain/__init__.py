"""Batches -> BertForPreTraining -> a Hugging Face checkpoint."""

import os

# Read when torch is loaded. Threads that wait for each other in loops are ten times as slow as one
# thread when another process needs a core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
