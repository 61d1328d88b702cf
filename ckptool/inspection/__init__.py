"""Questions about a checkpoint, answered from its header: dataclasses that print nothing."""
