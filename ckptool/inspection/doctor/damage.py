"""Complaints that take reading the file: bytes that are not those that were written, NaN."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from ckptool.formats.problems import Problem
from ckptool.inspection.doctor.complaint import Complaint, Found, names_of
from ckptool.inspection.verifying import verify
from ckptool.limits import Limits
from ckptool.paths import counted

__all__ = ["damage"]

Progress = Callable[[int, int], None]

_VALUES = ("nan", "inf")
"""Kinds of problem that are about the numbers in a tensor."""
_TOLD_ELSEWHERE = frozenset({"compressed", "dead", "trailing", "foreign"})
"""Kinds of problem that do not change what loads, or that `layout` and `memory` tell of."""
_MASK = re.compile(r"mask", re.IGNORECASE)


def damage(path: str, limits: Limits, progress: Progress | None) -> Iterator[Found]:
    """What is wrong with the bytes, all of which are read."""
    verdict = verify(path, values=True, progress=progress, limits=limits)
    wrong = [one for one in verdict.problems if one.kind not in (*_VALUES, *_TOLD_ELSEWHERE)]
    if wrong:
        yield _damaged(wrong)
    nan = [one for one in verdict.problems if one.kind == "nan"]
    infinite = [
        one for one in verdict.problems if one.kind == "inf" and not _MASK.search(one.place)
    ]
    if nan:
        yield _values("nan", "NaN", nan)
    if infinite:
        yield _values("infinite", "infinite values", infinite)


def _damaged(wrong: Sequence[Problem]) -> Found:
    return Found(
        Complaint(
            "damaged",
            "fails",
            f"it is damaged: {wrong[0].text}"
            + (f", and {counted(len(wrong) - 1, 'problem')} more" if len(wrong) > 1 else ""),
            names_of(dict.fromkeys(one.place or "the file" for one in wrong)),
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
            names_of(one.place for one in problems),
            "it loads without a word, and whatever is computed with these weights becomes NaN",
            remedy="no command brings the numbers back: take an earlier checkpoint",
        )
    )
