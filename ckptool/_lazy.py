"""Names of a package that are imported when they are first used: a list needs no writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from ckptool._collecting import uncollected

__all__ = ["importer"]


def importer(
    package: str, namespace: dict[str, Any], homes: Mapping[str, Sequence[str]]
) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose names are at home in modules (module -> names).

    What has been imported once stands in the package's own `namespace` from then on.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def imported(name: str) -> Any:
        home = home_of.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with uncollected():
            value = getattr(import_module(f"{package}.{home}"), name)
        namespace[name] = value
        return value

    return imported
