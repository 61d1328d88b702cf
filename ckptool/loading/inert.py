"""Read-only views of objects in a file that are not created."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptool.core.model import Opaque
from ckptool.core.tree import list_items
from ckptool.words import listed, printable


class InertObject:
    """A view of a saved object without its class: state as attributes, items by key.

    The view has no public attributes of its own: `.args` is the object's `args`. `vars()` returns
    the state as a dict; `ckptool.open(path)[...]` returns the `Opaque` with class and arguments.
    """

    __slots__ = ("__node",)

    def __init__(self, node: Opaque) -> None:
        """Wrap an object with converted values."""
        object.__setattr__(self, "_InertObject__node", node)

    @property
    def __dict__(self) -> dict[Any, Any]:  # type: ignore[override]
        """The state: attributes by name."""
        return dict(node_of(self).attributes)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the state.

        Names such as `__array_interface__` are excluded, because Python and numpy act on them.
        """
        node = node_of(self)
        if not name.startswith("__") and name in node.attributes:
            return node.attributes[name]
        known = [key for key in node.attributes if isinstance(key, str)]
        subject = f"this object of class {printable(node.class_name)}"
        available = f"; it has {listed(known)}" if known else ""
        raise AttributeError(f"{subject} has no attribute {printable(name)!r}{available}")

    def __setattr__(self, name: str, value: object) -> None:
        """Raise an error: the view is read-only."""
        raise AttributeError(f"cannot set {name!r}: an inert object is read-only")

    def __getitem__(self, key: Any) -> Any:
        """Return an item of a list or dict."""
        return dict(list_items(node_of(self)))[key]

    def __iter__(self) -> Iterator[Any]:
        """Yield the keys of a dict, or the positions of a list."""
        return (key for key, _ in list_items(node_of(self)))

    def __dir__(self) -> list[str]:
        """Return the attribute names of the state."""
        names = (key for key in node_of(self).attributes if isinstance(key, str))
        return sorted({*object.__dir__(self), *names})

    def __repr__(self) -> str:
        """Return the class name."""
        return f"<InertObject {printable(node_of(self).class_name)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Support copying."""
        return InertObject, (node_of(self),)


def node_of(view: InertObject) -> Opaque:
    """Return the object of a view."""
    node: Opaque = object.__getattribute__(view, "_InertObject__node")
    return node
