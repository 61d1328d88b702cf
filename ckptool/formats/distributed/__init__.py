"""Checkpoints written by many processes, each with a part."""
