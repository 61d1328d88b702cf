"""Checkpoints as torch objects: whole trees, state dicts, and those made to fit a model."""

from ckptool.loading.load import load
from ckptool.loading.match import match
from ckptool.loading.state_dict import load_state_dict

__all__ = ["load", "load_state_dict", "match"]
