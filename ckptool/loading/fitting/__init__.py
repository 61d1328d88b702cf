"""Which entry of a state dict goes where in a model: `match`, and what it looks at."""
