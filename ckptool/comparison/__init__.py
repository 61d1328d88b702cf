"""The differences between two checkpoints, and the data of the page that shows them."""
