"""The allow-list: calls that pickles of checkpoints make, and what stands for each here.

A handler takes the machine and the arguments as they lie in the file and returns our own object,
or NotImplemented where the call is of a form that it does not know (it then stays an `Opaque`).
Tensors are in `rebuild.py`, numpy in `arrays.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckptool.model import DeviceValue, Global, Opaque, OrderedMap, Size, StorageRef, TensorRef
from ckptool.symbolic import arrays, rebuild
from ckptool.symbolic.text import raw_bytes

if TYPE_CHECKING:
    from ckptool.symbolic.machine import Machine

__all__ = ["RECOGNISED", "Call", "new_object"]

Call = Callable[["Machine", Any], Any]


def _ordered_dict(machine: Machine, args: Any) -> Any:
    """`OrderedDict()`, or Python 2's `OrderedDict([[key, value], ...])`."""
    made = OrderedMap()
    if args:
        for key, value in args[0]:
            machine.check_key(key)
            made[key] = value
    return made


def _size(machine: Machine, args: Any) -> Any:
    """`torch.Size((2, 3))`."""
    return Size(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else Size()


def _device(machine: Machine, args: Any) -> Any:
    """`torch.device('cuda', 0)`, `torch.device('cpu')`."""
    match args:
        case (str() as word,):
            return DeviceValue(word)
        case (str() as word, int() as index):
            return DeviceValue(f"{word}:{index}")
    return NotImplemented


def _encode(machine: Machine, args: Any) -> Any:
    """`_codecs.encode(text, 'latin1')`: how protocol 2 spells bytes."""
    match args:
        case (str() as text, str() as codec) if codec.replace("-", "").lower() == "latin1":
            return text.encode("latin-1")
    return NotImplemented


def _bytes(machine: Machine, args: Any) -> Any:
    """`bytes()`: how protocol 2 spells empty bytes."""
    return b"" if args == () else NotImplemented


def _complex(machine: Machine, args: Any) -> Any:
    """`complex(1.0, 2.0)`."""
    match args:
        case (int() | float() as real, int() | float() as imaginary):
            return complex(real, imaginary)
    return NotImplemented


def _load_from_bytes(machine: Machine, args: Any) -> Any:
    """`torch.storage._load_from_bytes(b)`: a whole torch file inside a plain pickle."""
    raw = raw_bytes(args[0]) if len(args) == 1 else None
    if raw is None or machine.nested is None:
        return NotImplemented
    found = machine.nested(raw)
    return found if isinstance(found, (StorageRef, TensorRef)) else NotImplemented


def _paddle_array(machine: Machine, args: Any) -> Any:
    """`eval('data', {'data': array})`: how PaddlePaddle pickles an array of a LoDTensor."""
    match args:
        case ("data", {"data": TensorRef() as array} as names) if len(names) == 1:
            return array
    return NotImplemented


def _new_object_call(machine: Machine, args: Any) -> Any:
    """`copyreg.__newobj__(cls, ...)`: protocol 1's way to spell NEWOBJ."""
    return new_object(machine, args[0], tuple(args[1:]))


def new_object(machine: Machine, cls: Any, args: Any) -> Any:
    """Return what NEWOBJ leaves: a recognised class made, else an `Opaque`."""
    if isinstance(cls, Global) and cls.qualified in ("collections.OrderedDict", "torch.Size"):
        return RECOGNISED[cls.qualified](machine, args)
    return Opaque(cls, args, maker="newobj")


RECOGNISED: dict[str, Call] = {
    "collections.OrderedDict": _ordered_dict,
    "torch.Size": _size,
    "torch.device": _device,
    "_codecs.encode": _encode,
    "builtins.bytes": _bytes,
    "builtins.eval": _paddle_array,
    "builtins.complex": _complex,
    "copyreg.__newobj__": _new_object_call,
    "torch.storage._load_from_bytes": _load_from_bytes,
    **rebuild.CALLS,
    **arrays.CALLS,
}
