"""Checkpoints as torch objects: whole trees, state dicts, models filled from them and saved."""
