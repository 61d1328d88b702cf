"""The model of a checkpoint: its tree, leaves, keys and sections."""
