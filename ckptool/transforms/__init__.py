"""Checkpoint to Checkpoint: names, devices, selection; each over the same storages.

The names below are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptool._lazy import importer

if TYPE_CHECKING:
    from ckptool.transforms.averaging import average as average
    from ckptool.transforms.casting import (
        cast as cast,
        floating_type as floating_type,
        kept as kept,
    )
    from ckptool.transforms.compacting import (
        compact as compact,
        untie as untie,
        without_unseen as without_unseen,
    )
    from ckptool.transforms.devices import remap as remap, visible_devices as visible_devices
    from ckptool.transforms.ema import with_averages as with_averages, with_masters as with_masters
    from ckptool.transforms.extraction import (
        extract as extract,
        salvaged as salvaged,
        single_state_dict as single_state_dict,
    )
    from ckptool.transforms.lora import merge_lora as merge_lora
    from ckptool.transforms.memory import changed_dict as changed_dict, remap_dict as remap_dict
    from ckptool.transforms.name_rules import (
        Rule as Rule,
        prefix_rule as prefix_rule,
        read_map_file as read_map_file,
        regex_rule as regex_rule,
        table_rule as table_rule,
    )
    from ckptool.transforms.names import (
        add_module as add_module,
        rename as rename,
        strip_module as strip_module,
    )
    from ckptool.transforms.nesting import flattened as flattened, nested as nested
    from ckptool.transforms.plain import drop_objects as drop_objects, to_plain as to_plain
    from ckptool.transforms.resizing import concatenated as concatenated, resized as resized

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
