"""Checkpoint to Checkpoint: names, devices, selection; each over the same storages."""

from ckptool.transforms.devices import remap, visible_devices
from ckptool.transforms.memory import add_module_dict, remap_dict, strip_module_dict
from ckptool.transforms.names import add_module, strip_module
from ckptool.transforms.selection import single_state_dict
from ckptool.transforms.ties import untie

__all__ = [
    "add_module",
    "add_module_dict",
    "remap",
    "remap_dict",
    "single_state_dict",
    "strip_module",
    "strip_module_dict",
    "untie",
    "visible_devices",
]
