"""A checkpoint as the rest of the package sees it: its tree, its leaves, its keys, its parts."""
