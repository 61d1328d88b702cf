"""Checkpoints as torch objects: whole trees, state dicts, models filled from them and saved."""

from ckptool.loading.load import load
from ckptool.loading.load_into import load_into
from ckptool.loading.match import match
from ckptool.loading.save import save
from ckptool.loading.state_dict import load_state_dict

__all__ = ["load", "load_into", "load_state_dict", "match", "save"]
