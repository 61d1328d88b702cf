"""Checkpoints that many processes wrote together: each file has a part."""
