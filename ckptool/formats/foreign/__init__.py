"""Checkpoints of other frameworks."""
