"""Checkpoint to Checkpoint: names, devices, selection; each over the same storages.

The names below are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptool._lazy import importer

if TYPE_CHECKING:
    from ckptool.transforms.averaging import average
    from ckptool.transforms.casting import cast, floating_type, kept
    from ckptool.transforms.compacting import compact, untie, without_unseen
    from ckptool.transforms.devices import remap, visible_devices
    from ckptool.transforms.ema import with_averages, with_masters
    from ckptool.transforms.extraction import extract, salvaged, single_state_dict
    from ckptool.transforms.lora import merge_lora
    from ckptool.transforms.memory import changed_dict, remap_dict
    from ckptool.transforms.name_rules import (
        Rule,
        prefix_rule,
        read_map_file,
        regex_rule,
        table_rule,
    )
    from ckptool.transforms.names import add_module, rename, strip_module
    from ckptool.transforms.nesting import flattened, nested
    from ckptool.transforms.plain import drop_objects, to_plain
    from ckptool.transforms.resizing import concatenated, resized

__all__ = [
    "Rule",
    "add_module",
    "average",
    "cast",
    "changed_dict",
    "compact",
    "concatenated",
    "drop_objects",
    "extract",
    "flattened",
    "floating_type",
    "kept",
    "merge_lora",
    "nested",
    "prefix_rule",
    "read_map_file",
    "regex_rule",
    "remap",
    "remap_dict",
    "rename",
    "resized",
    "salvaged",
    "single_state_dict",
    "strip_module",
    "table_rule",
    "to_plain",
    "untie",
    "visible_devices",
    "with_averages",
    "with_masters",
    "without_unseen",
]

_HOMES = {
    "averaging": ("average",),
    "casting": ("cast", "floating_type", "kept"),
    "compacting": ("compact", "untie", "without_unseen"),
    "devices": ("remap", "visible_devices"),
    "ema": ("with_averages", "with_masters"),
    "extraction": ("extract", "salvaged", "single_state_dict"),
    "lora": ("merge_lora",),
    "memory": ("changed_dict", "remap_dict"),
    "name_rules": ("Rule", "prefix_rule", "read_map_file", "regex_rule", "table_rule"),
    "names": ("add_module", "rename", "strip_module"),
    "nesting": ("flattened", "nested"),
    "plain": ("drop_objects", "to_plain"),
    "resizing": ("concatenated", "resized"),
}

__getattr__ = importer(__name__, globals(), _HOMES)
