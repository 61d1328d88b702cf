"""Checkpoints as torch objects: whole trees, state dicts, and models filled from them."""

from ckptool.loading.load import load
from ckptool.loading.load_into import load_into
from ckptool.loading.match import match
from ckptool.loading.state_dict import load_state_dict

__all__ = ["load", "load_into", "load_state_dict", "match"]
