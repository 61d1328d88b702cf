"""What the user's own rules make of the names of a file, before anything else looks at them."""

from __future__ import annotations

from collections.abc import Iterable

from ckptool.errors import UsageError
from ckptool.transforms.name_rules import Rule
from ckptool.words import printable
from ckptool.wrappers import check_collisions

__all__ = ["ruled_names"]

_HINT = "make the rules narrower, or rename one of the two to something else first"


def ruled_names(
    names: Iterable[str], rules: list[Rule], file: str
) -> tuple[dict[str, str], tuple[str, ...]]:
    """What the user's rules make of the names, and which of them match nothing, in words.

    Without rules nothing, not even what stays.
    """
    if not rules:
        return {}, ()
    idle = dict.fromkeys(range(len(rules)))
    ruled = {}
    for name in names:
        ruled[name] = name
        for number, rule in enumerate(rules):
            new = rule.apply(ruled[name])
            if new is not None:
                ruled[name] = new
                idle.pop(number, None)
        if not ruled[name]:
            raise UsageError(
                f"nothing would be left of the name {printable(name)!r}",
                file=file or None,
                hint="every tensor needs a name: let the rules keep a part of it",
            )
    check_collisions(ruled, ruled, file=file or None, hint=_HINT)
    return ruled, tuple(f"the rule {printable(rules[n].text)!r} matches no name" for n in idle)
