"""What is needed of torch itself: that it is there, its dtypes, attributes set with care."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any

from ckptool._lazy import uncollected
from ckptool.errors import TorchMissing, UnsupportedFormat, UsageError, warn
from ckptool.words import listed, printable

if TYPE_CHECKING:
    import torch

__all__ = [
    "called",
    "one_thread",
    "require_torch",
    "set_attributes",
    "torch_dtype",
    "wanted_dtype",
]


def require_torch() -> None:
    """Import torch, or say what to install.

    Raises:
        TorchMissing: it is not installed, or cannot be imported.
    """
    try:
        with uncollected():
            import torch  # noqa: F401
    except ImportError as error:
        raise TorchMissing(
            f"tensors cannot be made without torch: {error}", hint="pip install torch"
        ) from error


_LOCK, _BEFORE = Lock(), list[int]()


@contextmanager
def one_thread() -> Iterator[None]:
    """Have torch calculate in the calling thread alone.

    Its threads wait for each other by spinning: on a machine that is busy a pass over half a
    million elements at a time takes twenty times as long, and elsewhere it gains little.
    """
    import torch

    with _LOCK:
        _BEFORE.append(torch.get_num_threads())
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _LOCK:  # the first had the number of before, and the last gives it back
            torch.set_num_threads(_BEFORE.pop(1) if len(_BEFORE) > 1 else _BEFORE.pop())


def torch_dtype(name: str, *, file: str | None = None) -> torch.dtype:
    """Return the `torch.dtype` of a name.

    Raises:
        UnsupportedFormat: the torch that is installed has none.
    """
    import torch

    # vars, not getattr: a lookup must never make torch import one of its lazy submodules.
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedFormat(
            f"holds elements of type {name}, which torch {torch.__version__} does not have",
            file=file,
            hint="pip install --upgrade torch",
        )
    return dtype


def wanted_dtype(dtype: torch.dtype | str | None) -> str | None:
    """Return the bare name of an element type that a caller asks for: `float16`; None for None.

    Raises:
        UsageError: it is no floating type of this torch.
    """
    if dtype is None:
        return None
    import torch

    name = str(dtype).removeprefix("torch.")
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(
            f"dtype {name!r} is not a floating element type of torch {torch.__version__}",
            hint="float32, float16 and bfloat16 are",
        )
    return str(found).removeprefix("torch.")


def called(name: str) -> str:
    """Return how a message calls a tensor, which may stand alone."""
    return f"tensor {printable(name)!r}" if name else "the tensor"


def set_attributes(made: Any, attributes: Mapping[Any, Any], where: str) -> None:
    """Give `made` attributes that came from a file, but none that its class has.

    So no file replaces a method or a property of the object; a `CheckpointWarning` names what was
    refused, and `where`.
    """
    refused: list[str] = []
    for name, value in attributes.items():
        if isinstance(name, str) and name[:2] != "__" and not hasattr(type(made), name):
            setattr(made, name, value)
        elif name not in vars(made):  # a jagged tensor has been given its own already
            refused.append(str(name))
    if refused:
        names, kind = listed(refused), type(made).__name__
        warn(f"{where} is returned without its attributes {names}: class {kind} has such itself")
