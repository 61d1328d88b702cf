"""The state of an optimizer given to the parameters that it is of."""
