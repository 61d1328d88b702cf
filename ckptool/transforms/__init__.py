"""Transforms from checkpoint to checkpoint, over the same storages: keys, devices, selection.

Each change that a user can ask for is a `Step`. The names below are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptool._lazy import make_importer

if TYPE_CHECKING:
    from ckptool.transforms.averaging import average as average
    from ckptool.transforms.casting import (
        Cast as Cast,
        parse_floating_dtype as parse_floating_dtype,
    )
    from ckptool.transforms.compacting import Compact as Compact, Untie as Untie
    from ckptool.transforms.devices import Remap as Remap, make_remap as make_remap
    from ckptool.transforms.ema import Masters as Masters
    from ckptool.transforms.extraction import (
        Salvage as Salvage,
        extract_state_dict as extract_state_dict,
    )
    from ckptool.transforms.lora import merge_lora as merge_lora
    from ckptool.transforms.name_rules import (
        Rule as Rule,
        prefix_rule as prefix_rule,
        read_map_file as read_map_file,
        regex_rule as regex_rule,
        table_rule as table_rule,
    )
    from ckptool.transforms.names import Rename as Rename, Strip as Strip, Wrap as Wrap
    from ckptool.transforms.nesting import Flatten as Flatten, Nest as Nest
    from ckptool.transforms.overlay import Overlay as Overlay
    from ckptool.transforms.plain import Plain as Plain
    from ckptool.transforms.step import Step as Step, run_steps as run_steps
    from ckptool.transforms.take import Take as Take
    from ckptool.transforms.tree_edits import Drop as Drop, Move as Move, Set as Set

_HOMES = {
    "averaging": ("average",),
    "casting": ("Cast", "parse_floating_dtype"),
    "compacting": ("Compact", "Untie"),
    "devices": ("Remap", "make_remap"),
    "ema": ("Masters",),
    "extraction": ("Salvage", "extract_state_dict"),
    "lora": ("merge_lora",),
    "name_rules": ("Rule", "prefix_rule", "read_map_file", "regex_rule", "table_rule"),
    "names": ("Rename", "Strip", "Wrap"),
    "nesting": ("Flatten", "Nest"),
    "plain": ("Plain",),
    "step": ("Step", "run_steps"),
    "take": ("Take",),
    "overlay": ("Overlay",),
    "tree_edits": ("Drop", "Move", "Set"),
}

__getattr__ = make_importer(__name__, globals(), _HOMES)
