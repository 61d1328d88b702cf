"""The `_metadata` of a state dict for the modules of the model that it goes into."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ckptool.loading.fitting.models import Target
from ckptool.loading.fitting.states import State
from ckptool.loading.live.spreading import without_hidden
from ckptool.matching import Match
from ckptool.transforms.names import moved_metadata

__all__ = ["metadata_for"]


def metadata_for(state: State, target: Target, match: Match) -> OrderedDict[str, Any] | None:
    """The file's `_metadata` under the paths of the model's modules; None where it has none.

    A version follows the names below its module. A module of the model without names of its own
    has the version that the model gives it, but where its own loading asks for the file's.
    """
    if state.metadata is None:
        return None
    own = {**match.renamed, **{old: new for new, old in reversed(match.pairs.items())}}
    entries = {path: held for path, held in state.metadata.items() if isinstance(held, dict)}
    followed = moved_metadata(entries, own, lambda path: path)
    if target.metadata is None:
        return OrderedDict(followed)
    made: OrderedDict[str, Any] = OrderedDict()
    asking = target.loading.closed if target.loading is not None else frozenset()
    holders = {name.rpartition(".")[0] for name in target.slots}
    for path, default in target.metadata.items():
        clean = without_hidden(path)
        held = followed.get(path, followed.get(clean))
        if held is not None:
            made[path] = held
        elif clean not in holders and clean not in asking:
            made[path] = default
    return made
