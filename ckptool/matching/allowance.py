"""What of a report is accepted: the policy of `load_into`, `match` and `convert --like`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ckptool.errors import MatchError, UsageError
from ckptool.matching.report import Ambiguity, Cast, MatchReport, Mismatch

if TYPE_CHECKING:
    from ckptool.matching.refusal import Judgement, Problem

__all__ = ["Allowance", "Allowed"]

Allowed = bool | str | Sequence[str] | None
"""Yes or no for all names, or globs of the names that are allowed; None: as `strict` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What may differ between a state dict and a model.

    `strict=False` allows missing and unexpected names, as torch does. Where nothing at all fits,
    that is refused whatever is allowed, unless `min_coverage` is 0.
    """

    strict: bool = True
    missing: Allowed = None
    unexpected: Allowed = None
    mismatched: Allowed = False
    lossy_cast: Allowed = False
    min_coverage: float | None = None

    def __post_init__(self) -> None:
        """Take nothing that would be understood as something else.

        Raises:
            UsageError: a value is of no use.
        """
        if not isinstance(self.strict, bool):
            raise UsageError(f"strict is True or False, and not {self.strict!r}")
        for what in ("missing", "unexpected", "mismatched", "lossy_cast"):
            value = getattr(self, what)
            if not (value is None or isinstance(value, bool) or _are_globs(value)):
                raise UsageError(
                    f"allow_{what} is True, False, or globs of names, and not {value!r}",
                    hint=f"allow_{what}=['head.*']",
                )
        least = self.min_coverage
        if least is not None and not _is_share(least):
            raise UsageError(f"min_coverage is a share from 0 to 1, and not {least!r}")

    def takes_cast(self, *names: str) -> bool:
        """Whether numbers of what is called so may change with their type."""
        takes = _taker(self.lossy_cast or False)
        return any(map(takes, names))

    def problems(self, report: MatchReport) -> tuple[Problem, ...]:
        """Return every reason to refuse, the most telling first; none: it is accepted."""
        return self.judged(report).problems

    def judged(self, report: MatchReport, *, untried: str = "") -> Judgement:
        """Return the same with what helps.

        `untried` is the class whose own loading may take more than could be found out.
        """
        from ckptool.matching.refusal import judged  # nothing has to be said of what fits

        return judged(self, report, untried)

    def refusal(self, report: MatchReport, *, untried: str = "") -> MatchError | None:
        """Return the error to raise; None: it is accepted.

        Its text has the three most useful lines, its remedy the arguments that help most.
        """
        if report.fits and not self.is_nothing(report) and not self.is_short(report):
            return None
        from ckptool.matching.refusal import refusal

        return refusal(report, self.judged(report, untried=untried))

    def refused(
        self, report: MatchReport
    ) -> tuple[list[str], list[str], list[Mismatch], list[Ambiguity]]:
        """The names that are not allowed, shapes that are not, and the questions about those."""
        missing = _refused(report.missing_keys, self.missing, otherwise=not self.strict)
        unexpected = _refused(report.unexpected_keys, self.unexpected, otherwise=not self.strict)
        mismatched = [one for one in report.mismatched if _counts(one, self.mismatched)]
        refused = {*missing, *unexpected}
        unclear = [one for one in report.ambiguous if refused & {*one.names, *one.candidates}]
        return missing, unexpected, mismatched, unclear

    def refused_casts(self, report: MatchReport) -> list[Cast]:
        """The casts that lose something and are not allowed to."""
        lossy = (one for one in report.cast if one.lossy)
        return [one for one in lossy if not self.takes_cast(one.name, one.own)]

    def is_nothing(self, report: MatchReport) -> bool:
        """Whether there is nothing to load, and something has to be."""
        return self.min_coverage != 0 and _fits_nowhere(report)

    def is_short(self, report: MatchReport) -> bool:
        """Whether there is something to load, and more of it has to be."""
        least = self.min_coverage
        return least is not None and report.coverage < least and not _fits_nowhere(report)


def _refused(names: Iterable[str], allowed: Allowed, *, otherwise: bool = False) -> list[str]:
    """The names that are not allowed."""
    takes = _taker(otherwise if allowed is None else allowed)
    return [name for name in names if not takes(name)]


def _counts(one: Mismatch, allowed: Allowed) -> bool:
    """Whether a tensor is not allowed by either of its names."""
    takes = _taker(allowed or False)
    return not (takes(one.name) or takes(one.own))


def _taker(allowed: bool | str | Sequence[str]) -> Callable[[str], Any]:
    if isinstance(allowed, bool):
        return lambda name: allowed
    globs = (allowed,) if isinstance(allowed, str) else tuple(allowed)
    return _matching(globs)


@lru_cache(maxsize=16)
def _matching(globs: tuple[str, ...]) -> Callable[[str], Any]:
    return re.compile("|".join(map(translate, globs)) or "(?!)").match


def _are_globs(value: object) -> bool:
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Collection):
        return False
    return all(isinstance(glob, str) for glob in value)


def _is_share(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 <= value <= 1  # type: ignore[operator]


def _fits_nowhere(report: MatchReport) -> bool:
    """Whether nothing is met, or none of what the model has to be loaded for."""
    if report.names and not report.fitting:
        return True
    return report.parameters > 0 and not report.loaded
