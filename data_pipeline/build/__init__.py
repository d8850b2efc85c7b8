"""documents -> token store: sentences, ids, and the order of all that, in parallel."""
