"""Which entry of a state dict goes where in a model, and what that is told by."""
