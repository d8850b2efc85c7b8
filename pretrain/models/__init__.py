"""The encoder of all families with its pretraining heads; ELECTRA has a file of its own."""
