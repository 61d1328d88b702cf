"""Imports when something is first used, and rest for the garbage collector meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any


class Result:
    """What prints as its page on the command line does, and has one line as its repr."""

    __slots__ = ()

    def __str__(self) -> str:
        """Return the page; where there is none, the line."""
        from ckptool.render import page_of

        return page_of(self)

    def __repr__(self) -> str:
        """Return one line that says what it is, safe for a terminal."""
        from ckptool.render import line_of

        return line_of(self)

    def _repr_html_(self) -> str:
        """Return the page for a notebook, with every name in it escaped."""
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"


@contextmanager
def pause_gc() -> Iterator[None]:
    """Disable garbage collection in a block or a decorated function.

    Searching a tree, or all of torch, for what is dead takes longer than what is done, and finds
    nothing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def importer(
    package: str, namespace: dict[str, Any], homes: Mapping[str, Sequence[str]]
) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package whose names are at home in modules (module -> names).

    What has been imported once stands in the package's own `namespace` from then on.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def imported(name: str) -> Any:
        home = home_of.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with pause_gc():
            module = import_module(f"{package}.{home}")
        value = module if name == home else getattr(module, name)
        namespace[name] = value
        return value

    return imported
