"""The containers of a checkpoint's tree, and its leaves that are no tensors and not plain either.

Import them from `model`, which has the rest: what lies over bytes of a file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckptool.dtypes import BY_NAME

__all__ = ["ByteString", "DeviceValue", "Global", "Opaque", "OrderedMap", "Size"]


class OrderedMap(dict[Any, Any]):
    """A `collections.OrderedDict` of the file; `attributes` is what its `__dict__` held.

    Attributes are kept apart so that a file cannot replace a method of the object.
    """

    __slots__ = ("attributes",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what `dict` takes; there are no attributes yet."""
        super().__init__(*args, **kwargs)
        self.attributes: dict[Any, Any] = {}

    @property
    def metadata(self) -> Any:
        """The state dict's `_metadata` (module path -> version), or None."""
        return self.attributes.get("_metadata")


class ByteString(str):
    """A Python 2 `str` beyond ASCII: read as text, its bytes kept."""

    __slots__ = ("raw",)
    raw: bytes


class Size(tuple[Any, ...]):
    """A `torch.Size`: walked like a tuple, written back as what it was."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that the file names, and nobody imports."""

    module: str
    name: str
    shown: str = ""
    """The name in today's Python where the pickle spells it as Python 2 did."""

    @property
    def qualified(self) -> str:
        """`module.name`, in today's spelling."""
        return self.shown or f"{self.module}.{self.name}"

    @property
    def class_name(self) -> str:
        """`torch.dtype` for one of torch's element types, else the qualified name."""
        return "torch.dtype" if self.dtype else self.qualified

    @property
    def dtype(self) -> str | None:
        """The element type that this global is, if it is one."""
        return self.name if self.module == "torch" and self.name in BY_NAME else None


@dataclass(frozen=True, slots=True, repr=False)
class DeviceValue:
    """A `torch.device` among the values; `tag` as torch prints it (`cuda:0`, `cpu`)."""

    tag: str
    class_name = "torch.device"

    def __repr__(self) -> str:
        """As torch spells it: `device(type='cuda', index=0)`."""
        word, _, index = self.tag.partition(":")
        return f"device(type={word!r}, index={index})" if index else f"device(type={word!r})"


@dataclass(slots=True, eq=False)
class Opaque:
    """Anything that is neither plain data nor a tensor: kept as data, written back as it came.

    `func(*args, **kwargs)` made it (`newobj`: `cls.__new__`), then `steps` were applied in order:
    `("build", state)`, `("append", [item, ...])`, `("set", [(key, value), ...])`,
    `("add", [item, ...])`. A `persid` is a persistent id of a kind that is not known, in `args`.
    Filled while the pickle is read, and left alone afterwards.
    """

    func: Any
    """Mostly a `Global`: a class or function by its name, not imported."""
    args: Any = ()
    kwargs: Any = None
    """None where there were none."""
    maker: str = "reduce"
    """How it was made: `reduce`, `newobj` or `persid`."""
    steps: list[tuple[str, Any]] = field(default_factory=list)
    plain: tuple[str, Any] | None = None
    """Type and value, where the object is a plain value all the same (a numpy scalar)."""

    @property
    def class_name(self) -> str:
        """The qualified name of its class, as far as the file tells."""
        if self.maker == "persid":
            return "persistent id"
        if isinstance(self.func, Global):
            args = self.args if isinstance(self.args, tuple) else ()
            if self.func.name in _RECONSTRUCTORS and args and isinstance(args[0], Global):
                return args[0].qualified
            return _MADE_BY.get(self.func.name, self.func.qualified)
        match self.func:
            case Opaque(func=Global(name="getattr"), args=(Global() as owner, str() as name)):
                return f"{owner.qualified}.{name}"  # how old protocols name an inner class
        return "object"

    @property
    def state(self) -> Any:
        """What the last BUILD gave it; None where there was none."""
        return next((value for kind, value in reversed(self.steps) if kind == "build"), None)

    @property
    def attributes(self) -> dict[Any, Any]:
        """Its attributes by name: the state dict, slots merged in; empty for any other state."""
        state = self.state
        if isinstance(state, dict):
            return state
        match state:
            case (None | dict() as plain, dict() as slots):
                return {**(plain or {}), **slots}
        return {}


_RECONSTRUCTORS = frozenset({"_reconstructor", "__newobj__", "__newobj_ex__", "_reconstruct"})
_MADE_BY = {"_frombuffer": "numpy.ndarray", "_get_layout": "torch.layout"}
"""Classes of what functions of no telling name make."""
