"""What a diagnosis is made of: complaints, and what each would need to be mended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ckptool.patterns import families
from ckptool.words import printable

__all__ = [
    "Choice",
    "Complaint",
    "Found",
    "Need",
    "Severity",
    "names_of",
    "quoted_names",
]

Severity = Literal["fails", "misleads", "note"]

_MOST_PLACES = 8
_MOST_QUOTED = 3


@dataclass(frozen=True, slots=True)
class Complaint:
    """One reason why a plain `torch.load` and `load_state_dict` fail or mislead.

    `severity` is `fails` (an exception somewhere on the way), `misleads` (it seems to work), or
    `note` (works, and worth knowing).
    """

    kind: str
    """One word for programs: `wrappers`, `adapter`, ..."""
    severity: Severity
    what: str
    """What the file is or has, one sentence without a full stop."""
    where: tuple[str, ...]
    """Addresses, repeated layers folded, at most some; `and 12 more` where there are more."""
    why: str
    """What happens, with the text of torch's own error."""
    commands: tuple[str, ...] = ()
    """Those commands of the plan that mend it; they come after the others of the plan before."""
    alternatives: tuple[str, ...] = ()
    """Commands apart from the plan, of which one may be chosen."""
    remedy: str = ""
    """What helps where no command does, or beside it."""

    def to_dict(self) -> dict[str, Any]:
        """As `ckptool.doctor/1` has it."""
        return {
            "kind": self.kind,
            "severity": self.severity,
            "what": self.what,
            "where": list(self.where),
            "why": self.why,
            "commands": list(self.commands),
            "alternatives": list(self.alternatives),
            "remedy": self.remedy,
        }


class Need(NamedTuple):
    """What a plan must do for a complaint to be gone; `argument` where that says more."""

    kind: Literal[
        "rewrite",
        "torch",
        "select",
        "weights",
        "exclude",
        "strip",
        "strip-at",
        "prefix",
        "map",
        "add",
        "plain",
        "cpu",
        "compact",
    ]
    argument: str = ""


class Choice(NamedTuple):
    """A command apart from the plan: a verb with its options, and what its target is called.

    `word` goes before the ending of the file; without one the target is a safetensors file.
    """

    words: tuple[str, ...]
    word: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """A complaint before there is a plan, and all that mends it together."""

    complaint: Complaint
    needs: tuple[Need, ...] = ()
    choices: tuple[Choice, ...] = ()


def names_of(names: Iterable[str], most: int = _MOST_PLACES) -> tuple[str, ...]:
    """Names as a complaint shows them: repeated layers folded, of many the first."""
    labels = [family.label for family in families((name, None) for name in names)]
    more = (f"and {len(labels) - most:,} more",) if len(labels) > most else ()
    return (*map(printable, labels[:most]), *more)


def quoted_names(names: Iterable[str]) -> str:
    """Names as torch quotes them in its errors, the first few."""
    given = list(names)
    shown = ", ".join(f'"{printable(name)}"' for name in given[:_MOST_QUOTED])
    return shown + (", ..." if len(given) > _MOST_QUOTED else "")
