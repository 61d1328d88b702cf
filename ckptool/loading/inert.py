"""Objects of a file that are not made: a view of their state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptool.core.model import Opaque
from ckptool.core.tree import held_items
from ckptool.words import listed, printable


class InertObject:
    """An object of a file whose class was not imported: its state as attributes, its items by key.

    The view has no other public attributes: `.args` is that of the object. `vars()` gives the state
    as a dict; `ckptool.open(path)[...]` gives the `Opaque` with the class and all arguments.
    """

    __slots__ = ("__node",)

    def __init__(self, node: Opaque) -> None:
        """Show an object, the values in which are made."""
        object.__setattr__(self, "_InertObject__node", node)

    @property
    def __dict__(self) -> dict[Any, Any]:  # type: ignore[override]
        """Its state: attributes by name."""
        return dict(node_of(self).attributes)

    def __getattr__(self, name: str) -> Any:
        """Return a part of its state.

        No name such as `__array_interface__`: Python and numpy would obey what the file says there.
        """
        node = node_of(self)
        if not name.startswith("__") and name in node.attributes:
            return node.attributes[name]
        known = [key for key in node.attributes if isinstance(key, str)]
        what = f"this object of class {printable(node.class_name)}"
        there = f"; it has {listed(known)}" if known else ""
        raise AttributeError(f"{what} has no attribute {printable(name)!r}{there}")

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse: it is what the file has."""
        raise AttributeError(f"{name!r} of an inert object cannot be set")

    def __getitem__(self, key: Any) -> Any:
        """Return an item of what it holds as a list or dict."""
        return dict(held_items(node_of(self)))[key]

    def __iter__(self) -> Iterator[Any]:
        """Yield the keys of what it holds as a dict, or the positions of a list."""
        return (key for key, _ in held_items(node_of(self)))

    def __dir__(self) -> list[str]:
        """Return the names of its state."""
        names = (key for key in node_of(self).attributes if isinstance(key, str))
        return sorted({*object.__dir__(self), *names})

    def __repr__(self) -> str:
        """Return its class in one line."""
        return f"<InertObject {printable(node_of(self).class_name)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how it is copied."""
        return InertObject, (node_of(self),)


def node_of(view: InertObject) -> Opaque:
    """Return the object that a view shows."""
    node: Opaque = object.__getattribute__(view, "_InertObject__node")
    return node
