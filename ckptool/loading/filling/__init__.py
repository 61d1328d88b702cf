"""A model filled from a state dict, all of it or none."""
