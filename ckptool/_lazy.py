"""Imports on first use, with garbage collection paused."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any


class Result:
    """A result that prints like its page on the command line, and has a repr of one line."""

    __slots__ = ()

    def __str__(self) -> str:
        """Return the page; for classes without one, the line."""
        from ckptool.render import format_page

        return format_page(self)

    def __repr__(self) -> str:
        """Return a description in one line, safe for a terminal."""
        from ckptool.render import format_line

        return format_line(self)

    def _repr_html_(self) -> str:
        """Return the page for a notebook, with every name in it escaped."""
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"


@contextmanager
def pause_gc() -> Iterator[None]:
    """Disable garbage collection in a block or a decorated function.

    A collection that searches a tree, or all of torch, takes longer than the work itself, and finds
    nothing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def make_importer(
    package: str, namespace: dict[str, Any], homes: Mapping[str, Sequence[str]]
) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that imports its names from its modules on first use.

    `homes` maps each module of the package to the names that it defines. Imported objects are
    stored in the package's `namespace`.
    """
    home_by_name = {name: home for home, names in homes.items() for name in names}

    def import_name(name: str) -> Any:
        """Import the object of this name on first use; it may be a whole module."""
        home = home_by_name.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with pause_gc():
            module = import_module(f"{package}.{home}")
        value = module if name == home else getattr(module, name)
        namespace[name] = value
        return value

    return import_name
