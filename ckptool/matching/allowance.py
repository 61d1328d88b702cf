"""What of a report is accepted: the policy of `load_into`, `match` and `convert --like`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptool.errors import MatchError
from ckptool.matching.report import MatchReport

__all__ = ["Allowance", "Allowed", "Problem"]

Allowed = bool | str | Sequence[str] | None
"""Yes or no for all names, or globs of the names that are allowed; None: as `strict` says."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason to refuse, and what would help."""

    kind: str
    """`missing`, `unexpected`, `mismatched`, `untied`, `ambiguous`, `lossy-cast`, `coverage`,
    `optimizer`."""
    text: str
    """One line, names folded."""
    remedy: str = ""
    """The argument of `load_into`, or the option of `ckptool match`, that helps."""


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

    def problems(self, report: MatchReport) -> tuple[Problem, ...]:
        """Every reason to refuse, the most telling first; none: it is accepted."""
        raise NotImplementedError

    def refusal(self, report: MatchReport) -> MatchError | None:
        """The error to raise; None: it is accepted.

        Its text is the three most useful lines, its hint the argument or command that helps most.
        """
        raise NotImplementedError
