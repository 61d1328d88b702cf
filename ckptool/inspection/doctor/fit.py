"""Complaints against a reference: names, shapes and types that the wanted architecture has not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ckptool.checkpoint import Checkpoint
from ckptool.errors import AmbiguousName, NotFound, UsageError
from ckptool.inspection.doctor.buffers import is_floating
from ckptool.inspection.doctor.comparison import Comparison, compared
from ckptool.inspection.doctor.complaint import (
    Choice,
    Complaint,
    Found,
    Need,
    names_of,
    quoted_names,
)
from ckptool.inspection.doctor.patient import Patient
from ckptool.matching.refusal import escaped_glob
from ckptool.matching.slots import Slot, fits
from ckptool.model import TensorRef
from ckptool.paths import counted, listed, printable
from ckptool.statedict import Section, model_state_dict

__all__ = ["fit", "reference_model"]

_MOST_GLOBS = 50
_TO_OLD_NORM = (
    r"(^|\.)parametrizations\.([^.]+)\.original0$=>\1\2_g",
    r"(^|\.)parametrizations\.([^.]+)\.original1$=>\1\2_v",
)
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
    comparison = compared(patient)
    if comparison is None:
        return
    yield from _prefixed(comparison)
    yield from _normed(comparison)
    yield from _ruled(comparison)
    yield from _names(comparison)
    yield from _shapes(comparison)
    yield from _types(comparison)


def _prefixed(comparison: Comparison) -> Iterator[Found]:
    for before, after in comparison.prefixes:
        new = [pair for pair in comparison.pairs if pair.name.startswith(after)]
        names = [before + pair.name[len(after) :] for pair in new]
        own = [old for old, pair in zip(names, new, strict=True) if old != pair.name]
        complaint = Complaint(
            "prefix",
            "fails",
            f"names {_of_both(before, after)}",
            names_of(own),
            "load_state_dict says: Missing key(s) in state_dict: "
            f"{quoted_names(pair.name for pair in new)} Unexpected key(s) in state_dict: "
            f"{quoted_names(own)}; with strict=False they are left out, without an error",
        )
        yield Found(complaint, (Need("prefix", f"{before}={after}"),))


def _of_both(before: str, after: str) -> str:
    if before and after:
        return f"begin with {printable(before)}, and those of the reference with {printable(after)}"
    if before:
        return f"begin with {printable(before)}, and those of the reference do not"
    return f"lack {printable(after)} in front, which those of the reference have"


def _normed(comparison: Comparison) -> Iterator[Found]:
    """Weight norm, whose new form loads what the old one saved, and not the other way round."""
    if comparison.normed:
        complaint = Complaint(
            "weight-norm",
            "fails",
            "weight_norm was saved as a parametrization, and the reference has its older form",
            names_of(comparison.normed),
            "load_state_dict says: Missing key(s) in state_dict: weight_g, weight_v ... Unexpected "
            f"key(s) in state_dict: {quoted_names(comparison.normed)}; with strict=False they are "
            "left out, without an error",
            remedy="or build the model with torch.nn.utils.parametrizations.weight_norm",
        )
        yield Found(complaint, tuple(Need("map", rule) for rule in _TO_OLD_NORM))


def _ruled(comparison: Comparison) -> Iterator[Found]:
    """Names that are spelled otherwise, by a rule about which they leave no doubt."""
    for rule in comparison.rules:
        complaint = Complaint(
            "renamed",
            "fails",
            f"names are spelled otherwise than in the reference: {printable(rule.text)}",
            names_of(own for own, _ in rule.names),
            "load_state_dict says: Missing key(s) in state_dict: "
            f"{quoted_names(new for _, new in rule.names)} Unexpected key(s) in state_dict: "
            f"{quoted_names(own for own, _ in rule.names)}; with strict=False they are left out, "
            "without an error",
        )
        yield Found(complaint, (Need("map", rule.rule),))


def _names(comparison: Comparison) -> Iterator[Found]:
    missing, unexpected = list(comparison.missing), list(comparison.unexpected)
    if missing:
        total = len(comparison.pairs) + len(missing)
        yield Found(
            Complaint(
                "missing",
                "fails",
                f"{counted(len(missing), 'tensor')} of the reference's {total:,} "
                f"{_are(len(missing))} not in it",
                names_of(missing),
                f"load_state_dict says: Missing key(s) in state_dict: {quoted_names(missing)}; "
                f"with strict=False they stay as they were initialised. {_HALF_LOADED}",
                remedy="a name that is spelled otherwise: ckptool rename --map 'REGEX=>REPL'",
            )
        )
    if unexpected:
        names = [pair.name for pair in comparison.pairs]
        complaint = Complaint(
            "unexpected",
            "fails",
            f"{counted(len(unexpected), 'tensor')} in it {_are(len(unexpected))} not in the "
            "reference",
            names_of(unexpected),
            "load_state_dict says: Unexpected key(s) in state_dict: "
            f"{quoted_names(unexpected)}; with strict=False they are left out. {_HALF_LOADED}",
        )
        if missing:  # they may be the missing ones under other names: the user's to say
            yield Found(complaint, choices=_without(unexpected, names))
        else:  # before names change: globs for those in the file
            own = [name for name, _ in comparison.unexpected.values()]
            globs = _globs(own, [pair.own for pair in comparison.pairs])
            remedy = "" if globs else "load_state_dict(..., strict=False) leaves them out"
            needs = tuple(Need("exclude", glob) for glob in globs)
            yield Found(replace(complaint, remedy=remedy), needs)


def _without(names: Iterable[str], kept: Sequence[str]) -> tuple[Choice, ...]:
    """The rest of the file, where there is one and it can be told in some globs."""
    words = [word for glob in _globs(names, kept) for word in ("--exclude", glob)]
    return (Choice(("extract", *words), "fitting"),) if words and kept else ()


def _globs(names: Iterable[str], kept: Iterable[str]) -> list[str]:
    """Globs that match these names and none that is kept: of whole modules where that is so.

    None where it would take more of them than a command should have.
    """
    occupied = {head for name in kept for head in _fronts(name)}
    globs: dict[str, None] = {}
    for name in names:
        head = next((head for head in _fronts(name) if head not in occupied), None)
        globs[f"{escaped_glob(head)}*" if head else escaped_glob(name)] = None
    return list(globs) if len(globs) <= _MOST_GLOBS else []


def _fronts(name: str) -> Iterator[str]:
    """The modules that a name lies in, outermost first, each with its dot."""
    parts = name.split(".", 24)
    return (f"{'.'.join(parts[:end])}." for end in range(1, len(parts)))


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _shapes(comparison: Comparison) -> Iterator[Found]:
    wrong = [pair for pair in comparison.pairs if not _takes(pair.wanted, pair.mine)]
    if not wrong:
        return
    name, _, mine, wanted = wrong[0]
    right = [pair.name for pair in comparison.pairs if _takes(pair.wanted, pair.mine)]
    shown = (f"{pair.name} {_size(pair.mine)} for {_size(pair.wanted)}" for pair in wrong)
    yield Found(
        Complaint(
            "size-mismatch",
            "fails",
            f"{counted(len(wrong), 'tensor')} of another shape than in the reference: "
            f"{listed(shown, most=3)}",
            names_of(pair.name for pair in wrong),
            f"load_state_dict says: size mismatch for {name}: copying a param with shape "
            f"torch.Size({_size(mine)}) from checkpoint, the shape in current model is "
            f"torch.Size({_size(wanted)}); strict=False does not skip it. {_HALF_LOADED}",
            remedy="without these, load_state_dict(..., strict=False) takes the rest",
        ),
        choices=_without([pair.name for pair in wrong], right),
    )


def _takes(wanted: TensorRef, mine: TensorRef) -> bool:
    """Whether torch copies the one into the other."""
    return fits(Slot(mine.shape), Slot(wanted.shape))


def _size(tensor: TensorRef) -> str:
    return str(list(tensor.shape))


def _types(comparison: Comparison) -> Iterator[Found]:
    both = ((pair.name, pair.mine.dtype, pair.wanted.dtype) for pair in comparison.pairs)
    changed = [one for one in both if one[1] != one[2]]
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
