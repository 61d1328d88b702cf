"""Device options as the library takes them."""

from __future__ import annotations

from collections.abc import Sequence

from ckptool.errors import UsageError

__all__ = ["parsed_rules", "parsed_visible"]


def parsed_rules(rules: Sequence[str]) -> dict[str, str]:
    """The rules `A=B` by their A.

    Raises:
        UsageError: a rule that is not `A=B`, or two for one device.
    """
    mapping: dict[str, str] = {}
    for rule in rules:
        source, _, target = (part.strip() for part in rule.partition("="))
        if not (source and target):
            raise UsageError(f"{rule!r} is no rule A=B", hint="for example cuda:3=cuda:0")
        if mapping.setdefault(source, target) != target:
            raise UsageError(
                f"there are two rules for {source!r}: to {mapping[source]!r} and to {target!r}",
                hint="keep one of them",
            )
    return mapping


def parsed_visible(listed: str) -> list[int]:
    """The physical indexes of `0,2`, in the order of the program's own.

    Raises:
        UsageError: anything but numbers with commas between.
    """
    words = [word.strip() for word in listed.split(",")]
    if not all(word.isascii() and word.isdecimal() and len(word) < 10 for word in words):
        raise UsageError(
            f"{listed!r} is no list of device numbers", hint="for example --visible-devices 0,2"
        )
    return [int(word) for word in words]
