"""Encoders and their pretraining heads, one file a family."""
