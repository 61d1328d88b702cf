"""What two checkpoints have in common and what differs, and the page that shows it."""
