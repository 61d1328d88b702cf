"""Entries of a file that a model cannot be given: objects, lazy parameters, quantised tensors."""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

from ckptool.errors import UnsupportedFormat
from ckptool.loading.fitting.inert import inert
from ckptool.loading.fitting.models import Target
from ckptool.loading.fitting.states import State
from ckptool.loading.live.own_loading import OwnLoading
from ckptool.matching import Match, MatchReport
from ckptool.model import Global, Opaque, TensorRef
from ckptool.tensors import torch_dtype
from ckptool.words import listed, printable

if TYPE_CHECKING:
    import torch

__all__ = ["why_unmade", "without_unmade"]

_NEVER_RAN = "saved by a lazy module that never ran, without elements"
_NOT_MADE = ", which is not made from a file"
_NOT_COPIED = ", which torch does not copy into "


def without_unmade(
    match: Match,
    state: State,
    target: Target,
    *,
    loading: OwnLoading | None = None,
    assign: bool = False,
) -> Match:
    """A match without the pairs whose entry is nothing that the model could be given.

    Objects of a pickle are not made, and an extra state with one inside would reach the model as
    something else; quantised tensors are copied into no others. They are missing, and `left_out`
    says why. What is lazy on both sides is kept. A `loading` of the model's own may do what
    torch does not; with `assign` nothing is cast. What is loaded is not counted anew.
    """
    slots, report, root, mine = target.slots, match.report, state.root, state.slots
    found = {} if assign else _not_copied(report, target, loading)
    kept: dict[str, str] = {}
    for name, own in match.pairs.items():
        node = root[own]
        if type(node) is TensorRef and mine[own].shape is not None and slots[name].kind != "extra":
            continue  # as of most of many names
        is_lazy = _is_lazy(node, state, own)
        if is_lazy and slots[name].shape is None and slots[name].kind != "extra":
            if isinstance(node, Opaque):  # torch itself takes what is in memory
                kept[name] = "the file's has no elements either"
        elif is_lazy:
            found[name] = _NEVER_RAN
        elif slots[name].kind == "extra" and (what := inert(node)):
            found[name] = f"holds {what}{_NOT_MADE}"
    lazy = [own for own in report.unexpected_keys if _is_lazy(state.root[own], state, own)]
    if not (found or kept or lazy):
        return match
    pairs = {name: own for name, own in match.pairs.items() if name not in {**found, **kept}}
    missing = {*report.missing_keys, *found}
    report = report.with_changes(
        unexpected_keys=[own for own in report.unexpected_keys if own not in set(lazy)],
        missing_keys=[name for name in slots if name in missing],
        kept=(*report.kept, *kept.items()),
        cast=tuple(cast for cast in report.cast if cast.name not in found),
        left_out=(
            *report.left_out,
            *((match.pairs[name], reason) for name, reason in found.items()),
            *((own, _NEVER_RAN) for own in lazy),
        ),
    )
    return match._replace(pairs=pairs, report=report)


def _not_copied(report: MatchReport, target: Target, loading: OwnLoading | None) -> dict[str, str]:
    """The names whose type torch does not turn into the model's, with the reason."""
    return {
        cast.name: f"{cast.before}{_NOT_COPIED}{cast.after}"
        for cast in report.cast
        if cast.name in target.entries
        and not _is_copied(cast.before, cast.after)
        and (loading is None or loading.holder(cast.name) is None)
    }


@cache
def _is_copied(before: str, after: str) -> bool:
    """Whether torch copies elements of the one type into the other: it is asked to."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of types that torch will have no longer
            _one_of(after).copy_(_one_of(before))
    except UnsupportedFormat:  # torch has no such type: that is told where it is made
        return True
    except (RuntimeError, TypeError):
        return False
    return True


def _one_of(dtype: str) -> torch.Tensor:
    import torch

    kind = torch_dtype(dtype)
    if dtype.startswith("q"):
        return torch._empty_affine_quantized((1,), scale=1.0, zero_point=0, dtype=kind)
    return torch.empty((1,), dtype=kind)


def _is_lazy(node: Any, state: State, own: str) -> bool:
    """Whether it is a parameter or buffer that has no shape yet."""
    if isinstance(node, Opaque):
        return isinstance(node.func, Global) and node.func.qualified in _LAZY
    if state.slots[own].shape is not None or state.tree.format != "memory":
        return False
    from torch.nn.parameter import is_lazy

    return is_lazy(state.value(own))


_LAZY = ("torch.nn.parameter.UninitializedParameter", "torch.nn.parameter.UninitializedBuffer")


def why_unmade(report: MatchReport) -> str:
    """A line that says which of the file's entries cannot be made, and why; empty: all can."""
    names: dict[str, list[str]] = {}
    for own, reason in report.left_out:
        if reason == _NEVER_RAN or reason.endswith(_NOT_MADE) or _NOT_COPIED in reason:
            names.setdefault(reason, []).append(printable(own))
    return "; ".join(f"{listed(some, most=2)}: {reason}" for reason, some in names.items())
