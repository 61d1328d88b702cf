"""Checkpoints as torch objects: `load` for the whole tree, `load_state_dict` for a model's."""

from ckptool.loading.load import load
from ckptool.loading.state_dict import load_state_dict

__all__ = ["load", "load_state_dict"]
