"""The tensors of a file beside those of a reference, by the names that mended ones would have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckptool.inspection.doctor.patient import Patient, metadata_of, tensors_of
from ckptool.matching import Renaming, Slot, matched
from ckptool.matching.known_renames import uncounted, weight_norms
from ckptool.model import TensorRef
from ckptool.wrappers import N_AVERAGED, WRAPPERS

__all__ = ["Comparison", "Paired", "Prefix", "compared"]

_MOST_TRIED = 20
"""Names of which every beginning is tried as a prefix, and prefixes that are changed."""
_DEEPEST = 16
"""Parts of a name that are looked at."""

Prefix = tuple[str, str]
"""What names begin with, and what is to stand there instead."""


class Paired(NamedTuple):
    """A tensor of both."""

    name: str
    own: str
    """Its name in the file."""
    mine: TensorRef
    wanted: TensorRef


@dataclass(frozen=True, slots=True)
class Comparison:
    """What both have, and what only one has."""

    pairs: tuple[Paired, ...]
    unexpected: dict[str, tuple[str, TensorRef]]
    """By name as mended: the name in the file, and the tensor."""
    missing: dict[str, TensorRef]
    prefixes: tuple[Prefix, ...] = ()
    """Changed on the way, in this order."""
    normed: tuple[str, ...] = ()
    """Those of `weight_norm` as a parametrization, which the reference has in the old form."""
    rules: tuple[Renaming, ...] = ()
    """Rules that would match more of the names that are left, as `matching` proposes them."""


def compared(patient: Patient) -> Comparison | None:
    """The state dict that is meant beside the reference's; None where there are not both."""
    if patient.model is None or patient.wanted is None:
        return None
    wanted, names = tensors_of(patient.wanted), patient.wrapping.names
    mine = {names.get(own, own): (own, tensor) for own, tensor in tensors_of(patient.model).items()}
    found = Comparison(
        tuple(Paired(n, *mine[n], tensor) for n, tensor in wanted.items() if n in mine),
        {name: held for name, held in mine.items() if name not in wanted and name != N_AVERAGED},
        {name: tensor for name, tensor in wanted.items() if name not in mine},
    )
    found = _with_weight_norm(found)
    versions = metadata_of(patient.model) or {}
    for _ in range(_MOST_TRIED):
        prefix = _prefix(found, _uncounted(found, versions))
        if prefix is None:
            break
        names = {name: _new_name(name, prefix) for name in found.unexpected}
        found = _with_weight_norm(_renamed(found, names))
        found = replace(found, prefixes=(*found.prefixes, prefix))
    found = _with_rules(found)
    accepted = _uncounted(found, versions)
    missing = {name: held for name, held in found.missing.items() if name not in accepted}
    return replace(found, missing=missing)


def _renamed(found: Comparison, names: dict[str, str]) -> Comparison:
    """The same after some of the unexpected have other names: what was missing may be there."""
    pairs, unexpected, missing = list(found.pairs), {}, dict(found.missing)
    for old, (own, tensor) in found.unexpected.items():
        new = names.get(old, old)
        if new in missing:
            pairs.append(Paired(new, own, tensor, missing.pop(new)))
        else:
            unexpected[new] = own, tensor
    return replace(found, pairs=tuple(pairs), unexpected=unexpected, missing=missing)


def _with_weight_norm(found: Comparison) -> Comparison:
    """The same with both forms of weight norm for one; torch takes the old one for the new."""
    older = {old: new for old, new in weight_norms(found.unexpected) if new in found.missing}
    found = _renamed(found, older)
    newer = {new: old for old, new in weight_norms(found.missing) if new in found.unexpected}
    return replace(_renamed(found, newer), normed=(*found.normed, *newer))


def _with_rules(found: Comparison) -> Comparison:
    """The same after the rules that matching proposes for what is left."""
    if not found.unexpected or not found.missing:
        return found
    have = {pair.name: _slot(pair.mine) for pair in found.pairs}
    want = {pair.name: _slot(pair.wanted) for pair in found.pairs}
    have.update((name, _slot(tensor)) for name, (_, tensor) in found.unexpected.items())
    want.update((name, _slot(tensor)) for name, tensor in found.missing.items())
    report = matched(have, want).report
    rules = () if report.ambiguous else report.proposed
    names = {own: wanted for rule in rules for own, wanted in rule.names}
    return replace(_renamed(found, names), rules=rules)


def _slot(tensor: TensorRef) -> Slot:
    return Slot(tensor.shape, tensor.dtype)


def _uncounted(found: Comparison, versions: dict[str, object]) -> set[str]:
    """Missing counters for which BatchNorm does not ask in a state of these versions."""
    return uncounted(found.missing, {pair.name: pair.own for pair in found.pairs}, versions)


def _prefix(found: Comparison, accepted: set[str]) -> Prefix | None:
    """What to put in place of what before the names, so that none is missing; None for nothing.

    Of a wrapper around a part it is enough that all names below it are in their place then.
    """
    needed = found.missing.keys() - accepted
    for prefix in dict.fromkeys(_candidates(found)):
        before, after = prefix
        if any(pair.name.startswith(before) for pair in found.pairs):
            continue
        moved = {_new_name(n, prefix) for n in found.unexpected if n.startswith(before)}
        wrapper = _are_wrappers(max(prefix, key=len)[len(min(prefix, key=len)) :])
        if needed <= moved or (wrapper and moved <= found.missing.keys()):
            return before, after
    return None


def _candidates(found: Comparison) -> Iterator[Prefix]:
    """Prefixes that make a name of one side a name of the other."""
    for name in list(found.unexpected)[:_MOST_TRIED]:
        for longer, shorter, new in _shortened(name):
            if new in found.missing:
                yield longer, shorter
    for name in list(found.missing)[:_MOST_TRIED]:
        for longer, shorter, old in _shortened(name):
            if old in found.unexpected:
                yield shorter, longer


def _shortened(name: str) -> Iterator[tuple[str, str, str]]:
    """What a name begins with, that with parts left out, and the name then.

    The first parts, whatever they are, or wrappers inside.
    """
    parts = name.split(".", _DEEPEST)
    for start in range(len(parts) - 1):
        for end in range(start + 1, len(parts)):
            if start and parts[end - 1] not in WRAPPERS:
                break
            longer, shorter = ("".join(f"{part}." for part in parts[:at]) for at in (end, start))
            yield longer, shorter, shorter + ".".join(parts[end:])


def _are_wrappers(text: str) -> bool:
    return all(part in WRAPPERS for part in text.rstrip(".").split("."))


def _new_name(name: str, prefix: Prefix) -> str:
    before, after = prefix
    return after + name[len(before) :] if name.startswith(before) else name
