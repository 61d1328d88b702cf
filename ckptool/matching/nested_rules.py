r"""Rules for modules by what is in them: `^norm\.=>ln_f.`, or one deeper: `^head\.=>head.fc.`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from ckptool.matching.change_rules import escaped
from ckptool.matching.numbering import ANY_NUMBER
from ckptool.matching.slots import Slot

__all__ = ["nested_rules", "twin_rules"]

_MOST = 3
"""More modules that are so are a list's, or nobody's."""


def nested_rules(unused: Mapping[str, Slot], missing: Mapping[str, Slot]) -> tuple[str, ...]:
    """For modules of the file that have what one of the model's lacks, right above or below it.

    Each has the same names and shapes, and is the only one that does. Wrappers and a front may come
    before: a rule changes the end of the file's own path.
    """
    ours, theirs = (_by_contents(side) for side in (unused, missing))
    rules = []
    for contents, wanted in theirs.items():
        own = ours.get(contents, [])
        ends = [(path, end) for path in own for one in wanted if (end := _moved(path, one))]
        if len(ends) == 1:
            rules.append(_rule(*ends[0]))
    return tuple(rules) if len(rules) <= _MOST else ()


def twin_rules(unused: Mapping[str, Slot], missing: Mapping[str, Slot]) -> tuple[str, ...]:
    """For modules of the file that have what one of the model's lacks, whatever both are called.

    Only where no other module on either side has the same names and shapes, and none gets another
    number.
    """
    ours, theirs = (_by_contents(side) for side in (unused, missing))
    rules = [
        _rule(ours[contents][0], wanted[0])
        for contents, wanted in theirs.items()
        if len(wanted) == len(ours.get(contents, ())) == 1
        and ANY_NUMBER.findall(ours[contents][0]) == ANY_NUMBER.findall(wanted[0])
    ]
    return tuple(rules) if len(rules) <= _MOST else ()


def _rule(path: str, new: str) -> str:
    new = new.replace("\\", r"\\")
    return rf"^{escaped(path)}\.=>{new}."


def _by_contents(side: Mapping[str, Slot]) -> dict[Hashable, list[str]]:
    """The paths of modules, by the names and shapes of their own tensors."""
    modules: dict[str, set[tuple[str, Hashable]]] = {}
    for name, slot in side.items():
        path, _, leaf = name.rpartition(".")
        if path:
            modules.setdefault(path, set()).add((leaf, slot.shape))
    found: dict[Hashable, list[str]] = {}
    for path, contents in modules.items():
        found.setdefault(frozenset(contents), []).append(path)
    return found


def _moved(path: str, wanted: str) -> str:
    """A path of the file one component deeper, or less deep, as the model's is; else nothing."""
    above, _, last = wanted.rpartition(".")
    if above and _end_alike(path, above):
        return f"{path}.{last}"
    above = path.rpartition(".")[0]
    return above if above and _end_alike(above, wanted) else ""


def _end_alike(one: str, other: str) -> bool:
    """Whether either ends with the other, as with whole components."""
    return f".{one}".endswith(f".{other}") or f".{other}".endswith(f".{one}")
