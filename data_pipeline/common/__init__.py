"""Shared by all stages: errors, random streams, atomic folders, the operating system."""
