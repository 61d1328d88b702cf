"""What matching the state of an optimizer comes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptool.matching.report import Cast
from ckptool.remedies import Remedy

__all__ = ["OptimizerReport"]


@dataclass(frozen=True, slots=True)
class OptimizerReport:
    """How the state of an optimizer was matched, or why it was not."""

    by: str
    """`names`, `shapes` or `position`."""
    matched: int
    """Parameters whose state is loaded."""
    parameters: int
    """Parameters that the optimizer has."""
    problems: tuple[str, ...] = ()
    """What does not fit, a sentence each; none: it does."""
    cast: tuple[Cast, ...] = ()
    notes: tuple[str, ...] = ()
    remedy: Remedy | str = ""
    """What helps against the first of `problems`: arguments of `load_into`, or what to do."""

    def to_dict(self) -> dict[str, Any]:
        """The object as `ckptool.match/1` has it."""
        return {
            "by": self.by,
            "matched": self.matched,
            "parameters": self.parameters,
            "problems": list(self.problems),
            "cast": [cast.to_dict() for cast in self.cast],
            "notes": list(self.notes),
            "remedy": str(self.remedy),
        }
