"""Models and tensors that are there: what they are made of, and how torch loads them."""
