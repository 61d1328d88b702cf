"""Complaints against a reference: names, shapes and types that the wanted architecture has not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ckptool.checkpoint import Checkpoint
from ckptool.errors import AmbiguousName, NotFound, UsageError
from ckptool.inspection.aligning import Alignment, Entry, align
from ckptool.inspection.doctor.buffers import is_floating
from ckptool.inspection.doctor.complaint import (
    Choice,
    Complaint,
    Found,
    Need,
    names_of,
    quoted_names,
)
from ckptool.inspection.doctor.level import AVERAGED
from ckptool.inspection.doctor.patient import Patient
from ckptool.model import TensorRef
from ckptool.paths import counted, listed
from ckptool.statedict import Section, model_state_dict
from ckptool.transforms.selection import state_dict_alone

__all__ = ["fit", "reference_model"]

_MOST_GLOBS = 50
_MOST_TRIED = 20
"""Names of which every beginning is tried as a prefix."""
_DEEPEST = 16
"""Parts of a name that are looked at."""
_HALF_LOADED = (
    "load_state_dict raises only at its end: what fits has been copied by then, so the model is "
    "half loaded"
)


def reference_model(reference: Checkpoint) -> Section:
    """The state dict of the reference, which must have one alone.

    Raises:
        UsageError: it has none, or several.
    """
    try:
        return model_state_dict(reference)
    except (NotFound, AmbiguousName) as error:
        raise UsageError(
            f"the reference is to hold one state dict: {error.message}",
            file=reference.path or None,
            hint=f"ckptool extract {reference.path} --key NAME -o reference.pth",
        ) from error


def fit(patient: Patient) -> Iterator[Found]:
    """What of the state dict the reference's architecture does not take, or lacks."""
    if patient.reference is None or patient.model is None:
        return
    mine = state_dict_alone(patient.checkpoint, patient.model)
    wanted = state_dict_alone(patient.reference, reference_model(patient.reference))
    comparison = _compared(align(mine, wanted))
    prefix = _prefix(comparison)
    if prefix is not None:
        yield _prefixed(comparison, prefix)
        comparison = _renamed(comparison, prefix)
    yield from _names(comparison)
    yield from _shapes(comparison)
    yield from _types(comparison)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """The tensors of both, by the names that they have without wrappers."""

    pairs: tuple[tuple[str, TensorRef, TensorRef], ...]
    kept: tuple[str, ...]
    """The names in the file of those that both have."""
    unexpected: dict[str, tuple[str, TensorRef]]
    """By name without wrappers: the name in the file, and the tensor."""
    missing: dict[str, TensorRef]


def _compared(found: Alignment) -> _Comparison:
    pairs = [pair for pair in found.pairs if _is_tensor(pair.a) and _is_tensor(pair.b)]
    return _Comparison(
        tuple((pair.name, pair.a.leaf, pair.b.leaf) for pair in pairs),
        tuple(str(pair.a.path[-1]) for pair in pairs),
        {
            entry.name: (str(entry.path[-1]), entry.leaf)
            for entry in found.only_a
            if _is_tensor(entry) and entry.name != AVERAGED
        },
        {entry.name: entry.leaf for entry in found.only_b if _is_tensor(entry)},
    )


def _is_tensor(entry: Entry) -> bool:
    return isinstance(entry.leaf, TensorRef) and len(entry.path) == 1


def _prefix(comparison: _Comparison) -> tuple[str, str] | None:
    """What to put in place of what before the names, so that none is missing; None for nothing."""
    unexpected, missing = comparison.unexpected, comparison.missing
    if not unexpected or not missing:
        return None
    for name in list(unexpected)[:_MOST_TRIED]:
        parts = name.split(".", _DEEPEST)
        for depth in range(1, len(parts)):
            before = ".".join(parts[:depth]) + "."
            found = {one.removeprefix(before) for one in unexpected if one.startswith(before)}
            if missing.keys() <= found and not _any_begins(comparison, before):
                return before, ""
    first = next(iter(unexpected))
    longer = next((name for name in missing if name.endswith(f".{first}")), None)
    if longer is not None and not comparison.pairs:
        after = longer.removesuffix(first)
        if missing.keys() <= {after + name for name in unexpected}:
            return "", after
    return None


def _any_begins(comparison: _Comparison, before: str) -> bool:
    return any(name.startswith(before) for name, _, _ in comparison.pairs)


def _new_name(name: str, prefix: tuple[str, str]) -> str:
    before, after = prefix
    return after + name[len(before) :] if name.startswith(before) else name


def _renamed(comparison: _Comparison, prefix: tuple[str, str]) -> _Comparison:
    """The comparison after the prefix is changed: what was missing is there."""
    pairs, kept, unexpected = list(comparison.pairs), list(comparison.kept), {}
    for name, (own, tensor) in comparison.unexpected.items():
        new = _new_name(name, prefix)
        if new in comparison.missing:
            pairs.append((new, tensor, comparison.missing[new]))
            kept.append(own)
        else:
            unexpected[new] = own, tensor
    return _Comparison(tuple(pairs), tuple(kept), unexpected, {})


def _prefixed(comparison: _Comparison, prefix: tuple[str, str]) -> Found:
    before, after = prefix
    names = [n for n in comparison.unexpected if _new_name(n, prefix) in comparison.missing]
    text = f"begin with {before}, and" if before else f"lack {after} in front, which"
    complaint = Complaint(
        "prefix",
        "fails",
        f"names {text} those of the reference {'do not' if before else 'have'}",
        names_of(names),
        f"load_state_dict says: Missing key(s) in state_dict: {quoted_names(comparison.missing)} "
        f"Unexpected key(s) in state_dict: {quoted_names(names)}; with strict=False they are left "
        "out, without an error",
    )
    return Found(complaint, (Need("prefix", f"{before}={after}"),))


def _names(comparison: _Comparison) -> Iterator[Found]:
    missing, unexpected = list(comparison.missing), list(comparison.unexpected)
    if missing:
        total = len(comparison.pairs) + len(missing)
        yield Found(
            Complaint(
                "missing",
                "fails",
                f"{counted(len(missing), 'tensor')} of the reference's {total:,} are not in it",
                names_of(missing),
                f"load_state_dict says: Missing key(s) in state_dict: {quoted_names(missing)}; "
                f"with strict=False they stay as they were initialised. {_HALF_LOADED}",
                remedy="a name that is spelled otherwise: ckptool rename --map 'REGEX=>REPL'",
            )
        )
    if unexpected:
        names = [name for name, _, _ in comparison.pairs]
        complaint = Complaint(
            "unexpected",
            "fails",
            f"{counted(len(unexpected), 'tensor')} in it are not in the reference",
            names_of(unexpected),
            "load_state_dict says: Unexpected key(s) in state_dict: "
            f"{quoted_names(unexpected)}; with strict=False they are left out. {_HALF_LOADED}",
        )
        if missing:  # they may be the missing ones under other names: the user's to say
            yield Found(complaint, choices=_without(_globs(unexpected, names)))
        else:  # before names change: globs for those in the file
            own = [name for name, _ in comparison.unexpected.values()]
            globs = _globs(own, comparison.kept)
            remedy = "" if globs else "load_state_dict(..., strict=False) leaves them out"
            needs = tuple(Need("exclude", glob) for glob in globs)
            yield Found(replace(complaint, remedy=remedy), needs)


def _without(globs: Sequence[str]) -> tuple[Choice, ...]:
    words = [word for glob in globs for word in ("--exclude", glob)]
    return (Choice(("extract", *words), "fitting"),) if globs else ()


def _globs(names: Iterable[str], kept: Iterable[str]) -> list[str]:
    """Globs that match these names and none that is kept: of whole modules where that is so.

    None where it would take more of them than a command should have.
    """
    occupied = {head for name in kept for head in _heads(name)}
    globs: dict[str, None] = {}
    for name in names:
        head = next((head for head in _heads(name) if head not in occupied), None)
        globs[f"{_escaped(head)}*" if head else _escaped(name)] = None
    return list(globs) if len(globs) <= _MOST_GLOBS else []


def _heads(name: str) -> Iterator[str]:
    """The modules that a name lies in, outermost first, each with its dot."""
    at = -1
    for _ in range(_DEEPEST):
        at = name.find(".", at + 1)
        if at < 0:
            return
        yield name[: at + 1]


def _escaped(text: str) -> str:
    return "".join(f"[{char}]" if char in "*?[" else char for char in text)


def _shapes(comparison: _Comparison) -> Iterator[Found]:
    wrong = [(name, a, b) for name, a, b in comparison.pairs if a.shape != b.shape]
    if not wrong:
        return
    name, a, b = wrong[0]
    right = [one for one, mine, wanted in comparison.pairs if mine.shape == wanted.shape]
    yield Found(
        Complaint(
            "size-mismatch",
            "fails",
            f"{counted(len(wrong), 'tensor')} of another shape than in the reference: "
            f"{listed((f'{n} {_size(a)} for {_size(b)}' for n, a, b in wrong), most=3)}",
            names_of(name for name, _, _ in wrong),
            f"load_state_dict says: size mismatch for {name}: copying a param with shape "
            f"torch.Size({_size(a)}) from checkpoint, the shape in current model is "
            f"torch.Size({_size(b)}); strict=False does not skip it. {_HALF_LOADED}",
            remedy="without these, load_state_dict(..., strict=False) takes the rest",
        ),
        choices=_without(_globs([name for name, _, _ in wrong], right)),
    )


def _size(tensor: TensorRef) -> str:
    return str(list(tensor.shape))


def _types(comparison: _Comparison) -> Iterator[Found]:
    changed = [(n, a.dtype, b.dtype) for n, a, b in comparison.pairs if a.dtype != b.dtype]
    truncated = [c for c in changed if is_floating(c[1]) and not is_floating(c[2])]
    rounded = [c for c in changed if c not in truncated]
    if truncated:
        yield Found(
            Complaint(
                "cast-to-integer",
                "misleads",
                f"{counted(len(truncated), 'tensor')} with fractions go into integer or boolean "
                f"buffers: {_kinds(truncated)}",
                names_of(name for name, _, _ in truncated),
                "load_state_dict copies them without a word: 2.87 becomes 2, inf the smallest "
                "integer, anything but 0 True",
                remedy="in code: state[name] = state[name].long(), where the values are whole",
            )
        )
    if rounded:
        yield Found(
            Complaint(
                "dtype",
                "note",
                f"{counted(len(rounded), 'tensor')} of another type than in the reference: "
                f"{_kinds(rounded)}",
                names_of(name for name, _, _ in rounded),
                "load_state_dict casts into the model's type without a word; what is too large for "
                "it becomes inf (65,520 and more in float16)",
                remedy="ckptool cast counts what overflows, underflows and loses precision",
            )
        )


def _kinds(changed: Sequence[tuple[str, str, str]]) -> str:
    return listed(dict.fromkeys(f"{old} for {new}" for _, old, new in changed), most=4)
