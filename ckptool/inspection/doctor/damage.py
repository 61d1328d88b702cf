"""Complaints that take reading the file: bytes that are not those that were written, NaN."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence

from ckptool.formats.problems import Problem
from ckptool.inspection.doctor.complaint import Complaint, Found, Need, names_of
from ckptool.inspection.doctor.patient import Patient
from ckptool.inspection.verifying import verify
from ckptool.limits import Limits
from ckptool.paths import name_of
from ckptool.tensors.nonfinite import is_infinity_or_zero
from ckptool.words import counted

__all__ = ["damage"]

Progress = Callable[[int, int], None]

_DAMAGE = frozenset({"checksum", "corrupt", "truncated", "missing", "limit"})
"""Kinds of problem after which nothing that loads can be trusted."""
_CONTRADICTIONS = frozenset({"header", "end"})
_REMAINS = frozenset({"trailing", "padding", "total-size"})
_MASK = re.compile(r"mask[^./]*$", re.IGNORECASE)
"""A name whose last part says so; a mask of -inf is one that is added to attention scores."""
_NEVER_INFINITE = frozenset({"weight", "bias", "running_mean", "running_var"})


def damage(patient: Patient, limits: Limits, progress: Progress | None) -> Iterator[Found]:
    """What is wrong with the bytes, all of which are read."""
    path = patient.checkpoint.path
    problems = verify(path, values=True, progress=progress, limits=limits).problems
    wrong = [one for one in problems if one.kind in _DAMAGE]
    if wrong:
        yield _damaged(wrong)
    nan = [one for one in problems if one.kind == "nan" and _counts(patient, one.place)]
    if nan:
        yield _values("nan", "NaN", nan)
    yield from _infinite(patient, problems)
    yield from _container(problems)


def _infinite(patient: Patient, problems: Sequence[Problem]) -> Iterator[Found]:
    """Infinities: in weights, and where they may be meant."""
    found = [one for one in problems if one.kind == "inf" and _counts(patient, one.place)]
    found = [one for one in found if not _MASK.search(one.place)]
    meant = _meant(patient, [one.place for one in found]) if found else set()
    wrong = [one for one in found if one.place not in meant]
    if wrong:
        yield _values("infinite", "infinite values", wrong)
    if meant:
        complaint = Complaint(
            "infinite",
            "note",
            f"{counted(len(meant), 'buffer')} of infinities and zeros alone",
            names_of(one.place for one in found if one.place in meant),
            "so is a mask that is added to scores, and the range of an observer that has seen no "
            "data yet; elsewhere what is computed with it becomes NaN",
        )
        yield Found(complaint)


def _meant(patient: Patient, places: Collection[str]) -> set[str]:
    """Those that are buffers of a model, and have nothing but infinities and zeros."""
    tensors = {
        name_of(path): tensor
        for part in patient.models
        for path, tensor in part.tensors()
        if str(path[-1]).rpartition(".")[2] not in _NEVER_INFINITE
    }
    return {one for one in places if one in tensors and is_infinity_or_zero(tensors[one])}


def _counts(patient: Patient, name: str) -> bool:
    """Whether a tensor is one of a model or an optimizer: a best score so far may be infinite."""
    parts = [part.name for part in (*patient.models, *patient.optimizers)]
    return not parts or any(not part or name.startswith(f"{part}/") for part in parts)


def _damaged(wrong: Sequence[Problem]) -> Found:
    return Found(
        Complaint(
            "damaged",
            "fails",
            f"it is damaged: {_first(wrong)}",
            _places(wrong),
            "torch.load checks no checksum: it loads other numbers than were saved, without an "
            "error, or says: PytorchStreamReader failed reading file: invalid header or archive is "
            "corrupted",
            remedy="nothing brings the bytes back: download or copy it again (ckptool verify lists "
            "all of it)",
        )
    )


def _values(kind: str, word: str, problems: Sequence[Problem]) -> Found:
    return Found(
        Complaint(
            kind,
            "misleads",
            f"{counted(len(problems), 'tensor')} with {word}: {problems[0].text}",
            _places(problems),
            "it loads without a word, and what is computed with these weights becomes NaN",
            remedy="no command brings the numbers back: take an earlier checkpoint",
        )
    )


def _container(problems: Sequence[Problem]) -> Iterator[Found]:
    """What is wrong around the tensors, and leaves them right: a rewrite has none of it."""
    offsets = [one for one in problems if one.kind == "offsets"]
    if offsets:
        why = (
            "torch.load(map_location='meta') and FakeTensorMode take other bytes, without an error"
        )
        yield _rewritten(Complaint("offsets", "misleads", _first(offsets), _places(offsets), why))
    apart = [one for one in problems if one.kind in _CONTRADICTIONS]
    if apart:
        why = "torch.load reads over it; another program may refuse the file, or read other bytes"
        yield _rewritten(Complaint("container", "misleads", _first(apart), _places(apart), why))
    rest = [one for one in problems if one.kind in _REMAINS]
    if rest:
        why = "torch.load does not look at it, and a rewrite does not carry it over"
        yield _rewritten(Complaint("remains", "note", _first(rest), _places(rest), why))


def _rewritten(complaint: Complaint) -> Found:
    return Found(complaint, (Need("rewrite"),))


def _first(problems: Sequence[Problem]) -> str:
    more = f", and {counted(len(problems) - 1, 'problem')} more" if len(problems) > 1 else ""
    return f"{problems[0].text}{more}"


def _places(problems: Sequence[Problem]) -> tuple[str, ...]:
    return names_of(dict.fromkeys(one.place for one in problems if one.place))
