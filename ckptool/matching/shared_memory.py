"""What is said of names that share memory in the model, where the file has too much for it."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ckptool.matching.advice import allowing, allowing_all
from ckptool.matching.change_rules import escaped
from ckptool.matching.folding import folded
from ckptool.matching.report import MatchReport
from ckptool.remedies import Remedy

__all__ = ["of_shared_memory"]

_APART = Remedy(note="no argument helps: the model has to give each of them memory of its own")


def of_shared_memory(
    report: MatchReport, known: Collection[str], wanted: Collection[str]
) -> Iterator[tuple[str, str, Remedy]]:
    """The kind, text and remedy of each such problem; `known` to the file, `wanted` by the model.

    What lets one name of each group have its way is told with the first of the groups.
    """
    remedy = _one_of_each(report, known, wanted)
    for names in report.untied:
        text = f"{folded(names)} are one tensor in the model, and differ in the file"
        yield "untied", text, remedy
        remedy = Remedy()
    for overlap in report.overlapping:
        text = f"{folded(overlap.names)} share memory in the model, and differ there in the file"
        yield "overlapping", text, remedy
        remedy = Remedy()


def _one_of_each(report: MatchReport, known: Collection[str], wanted: Collection[str]) -> Remedy:
    """What passes over all names of a group but the one that has all of its memory.

    Of tensors that are not one, those passed over count as missing. Where none has all, no
    argument loads the group.
    """
    if any(not overlap.whole for overlap in report.overlapping):
        return _APART
    parts = [
        name for overlap in report.overlapping for name in overlap.names if name != overlap.whole
    ]
    own = {new: own for one in report.renamed for own, new in one.names}
    ties = (name for names in report.untied for name in names[1:])
    extra = [own.get(name, name) for name in dict.fromkeys((*ties, *parts))]
    if not extra:
        return Remedy()
    rules = tuple(f"^{escaped(name)}$=>{_beside(name, n)}" for n, name in enumerate(extra))
    remedies = [Remedy((("rules", rules),)), allowing("allow_unexpected", extra, known)]
    if parts:
        remedies.append(allowing("allow_missing", parts, wanted))
    return allowing_all(remedies)


def _beside(name: str, number: int) -> str:
    """A name that no model has, in the same module: what all names begin with stays so."""
    path, dot, _ = name.rpartition(".")
    return f"{path}{dot}unused.{number}".replace("\\", r"\\")
