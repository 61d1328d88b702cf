"""`match`: a state dict under the names that a model wants."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ckptool._lazy import uncollected
from ckptool.checkpoint import Checkpoint
from ckptool.loading.arguments import check_lists
from ckptool.loading.fitting.likes import target_like
from ckptool.loading.fitting.plans import planned
from ckptool.loading.fitting.states import stated
from ckptool.loading.fitting.versions import metadata_for
from ckptool.matching import MatchReport
from ckptool.tensors import require_torch
from ckptool.transforms.name_rules import Rule

if TYPE_CHECKING:
    import torch

__all__ = ["match"]


@uncollected()
def match(
    state_dict: Mapping[Any, Any] | str | os.PathLike[str] | Checkpoint,
    like: torch.nn.Module | Mapping[str, Any] | Iterable[str] | os.PathLike[str] | Checkpoint,
    *,
    rules: Iterable[Rule | str] = (),
    prefixes: Iterable[str] = (),
    key: Any = None,
    like_key: Any = None,
) -> tuple[OrderedDict[str, Any], MatchReport]:
    r"""What of a state dict fits a model, under the model's names; and a report of all of it.

    Wrapper components (`module.`, `_orig_mod.`, ...) come and go on either side, then prefixes,
    then the renames of torch's own history, then what the two sets of names suggest; what fits
    several ways is reported and left out. Neither argument is touched: the dict is a new one with
    the same tensors, in the model's order and ready for its `load_state_dict`, `_metadata` under
    the model's paths. Names that the model ties all have the tensor that one of them has. What a
    module's own loading makes something else of is there as that module knows it.

    `report.fits` says whether all fits; to refuse what does not, and to load, see `load_into`.

    Args:
        state_dict: A state dict or a dict that holds one, or a file or an open checkpoint, whose
            tensors are read onto the CPU.
        like: A model, on any device, or what stands for one: a state dict, a dict of name to
            shape, names, or the path of a reference file or an open one.
        rules: `REGEX=>REPL`, for the names of `state_dict`, before all else.
        prefixes: `OLD=NEW`, after the rules: whole components at the front of a name.
        key: The state dict that is meant, where there are several (an address, such as `"ema"`).
        like_key: The same of `like`.

    Raises:
        TorchMissing: torch is not installed.
        UnreadableFile: a file cannot be opened as a checkpoint; see `ckptool.open`.
        AmbiguousName, NotFound: several state dicts and no `key`, or none; the message lists them.
        NameCollision: the rules make two names one.
        UsageError: what is no list of rules, a text that is no rule, or an argument that is none of
            the above.
        UnsupportedFormat: what fits is a DTensor or ShardedTensor of which the file has a part.
    """
    require_torch()
    check_lists(rules=rules, prefixes=prefixes)
    target = target_like(like, key=like_key)
    with stated(state_dict, key=key, wanted=target.slots) as state:
        found = planned(state, target, rules=rules, prefixes=prefixes)
        every = {**found.pairs, **found.beyond}
        fitting = OrderedDict((name, state.value(own)) for name, own in every.items())
        metadata = metadata_for(state, target, found)
        if metadata is not None:
            vars(fitting)["_metadata"] = metadata
        return fitting, found.report
