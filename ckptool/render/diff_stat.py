"""`ckptool diff --stat` as text: how much changed in each module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from ckptool.inspection.diff_result import Diff
from ckptool.render.diff import note_lines, summary_lines
from ckptool.render.diff_rows import folded
from ckptool.render.table import apart, table
from ckptool.render.terminal import Look
from ckptool.render.text import clean, count

__all__ = ["stat_lines"]

_MARKS = {"~": "MT", "-": "D", "+": "A", ">": "R"}
"""What stands in a bar for entries of which status."""
_WIDEST_BAR = 32


def stat_lines(diff: Diff, look: Look, *, fold: bool = True) -> Iterator[str]:
    """A line for each module in which something differs and the totals; `fold` repeated ones."""
    tables = [_modules(diff, look, fold and not look.fmt)] if look.fmt or not diff.identical else []
    return apart(
        tables if look.fmt else [*tables, note_lines(diff, look), summary_lines(diff, look)]
    )


def _modules(diff: Diff, look: Look, fold: bool) -> Iterator[str]:
    modules = _by_module(diff)
    totals = []
    names = list(modules)
    alike = ((name, tuple(sorted(modules[name].items()))) for name in names)
    for family in folded(alike, fold=fold):
        times = len(family.names)
        one = modules[family.names[0]]
        totals.append((family.label, times, {mark: one[mark] * times for mark in _MARKS}))
    most = max((sum(found.values()) for _, _, found in totals), default=0)
    rows = [
        [
            clean(label) or "(top level)",
            f"x{times}" if times > 1 else "",
            count(sum(found.values())),
            _bar(found, most),
        ]
        for label, times, found in totals
    ]
    headers = ["module", "repeated" if look.fmt else "", "differing", "bar" if look.fmt else ""]
    return table(headers, rows, look, right={2})


def _by_module(diff: Diff) -> dict[str, Counter[str]]:
    """How many entries of each mark, by the name without its last part."""
    found: list[tuple[str, str]] = [
        (change.name, change.status) for change in (*diff.changed, *diff.values) if change.counts
    ]
    found += [(side.name, "D") for side in diff.only_in_a]
    found += [(side.name, "A") for side in diff.only_in_b]
    found += [(row.b.name, "R") for row in diff.renamed]
    marks = {status: mark for mark, statuses in _MARKS.items() for status in statuses}
    modules: dict[str, Counter[str]] = {}
    for name, status in found:
        module = name[: max(name.rfind("."), name.rfind("/"), 0)]
        modules.setdefault(module, Counter())[marks[status]] += 1
    return modules


def _bar(found: Mapping[str, int], most: int) -> str:
    """`~~~-+`: as long as the numbers, or to scale where they are large; none of them vanishes."""
    scale = min(1.0, _WIDEST_BAR / most)
    return "".join(mark * max(round(found[mark] * scale), found[mark] > 0) for mark in _MARKS)
