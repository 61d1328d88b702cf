"""A match that can be asked for once more, with more rules, to see what they would do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ckptool.matching.report import MatchReport
from ckptool.matching.slots import Slot

__all__ = ["Again"]


class Again(NamedTuple):
    """The report by names alone: with more rules after the user's; without any, as it was."""

    report: Callable[[Sequence[str]], MatchReport]
    have: Mapping[str, Slot]
    """All that the file has."""
    want: Mapping[str, Slot]
    renumbering: Callable[[], Sequence[str]] = tuple
    """Rules that give lists of layers the numbers of the model's, in their order."""
    maker: str = ""
    """What loads the file as those do who wrote it, in words; empty: nothing that is known."""

    def __call__(self, rules: Sequence[str]) -> MatchReport:
        """The report with these rules."""
        return self.report(rules)

    def unmet(self, report: MatchReport) -> tuple[dict[str, Slot], dict[str, Slot]]:
        """What a report has left over of the file's, and of the model's."""
        return (
            {own: self.have[own] for own in report.unexpected_keys if own in self.have},
            {name: self.want[name] for name in report.missing_keys if name in self.want},
        )
