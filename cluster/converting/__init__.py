"""Checkpoints of other formats: what they are made of, and how Hugging Face names it."""
