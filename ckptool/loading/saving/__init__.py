"""Live models and optimizers, and values beside them, as the tree of a file."""
