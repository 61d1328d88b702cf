"""A model, its optimizer and values beside them as a file: `save`."""
