"""The tree of a file as Python and torch objects."""
