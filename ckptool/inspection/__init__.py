"""Facts about a checkpoint from its header, as dataclasses that print nothing."""
