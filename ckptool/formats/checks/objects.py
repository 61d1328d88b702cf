"""What a pickle without a checksum names that is nearly, and not quite, what torch writes.

A byte more or less in the name of a function makes an object of unknown class of what was a tensor,
and the file still reads. Names of unknown classes are lawful; those that share a half with one that
is known are not: the module of `torch._utils._rebuild_tensor_v2` has no other functions, and no
other module has that one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ckptool.checkpoint import Checkpoint
from ckptool.formats.problems import Problem
from ckptool.model import Global, Opaque, StorageRef, TensorRef
from ckptool.rebuilding import everything
from ckptool.symbolic.calls import RECOGNISED
from ckptool.words import printable

__all__ = ["frame_problems", "pickle_problems"]

_KNOWN = frozenset(
    {*RECOGNISED, "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"}
)
_NAMES = frozenset(
    own for own in (name.rpartition(".")[2] for name in _KNOWN) if own.startswith(("_re", "enc"))
)
_MODULES = frozenset(
    {"torch._utils", "torch._tensor", "_codecs", "numpy.core.multiarray", "numpy._core.multiarray"}
)
_ARRAYS = frozenset({"ndarray", "matrix", "memmap", "recarray"})


def pickle_problems(checkpoint: Checkpoint) -> Iterator[Problem]:
    """What no pickler can have written, each function once."""
    if not checkpoint.details.tidy:
        text = "its pickle leaves gaps in its memo, or objects on its stack, which no pickler does"
        yield Problem("pickle", "", text)
    told: set[str] = set()
    for node in everything(checkpoint.root):
        for name, fact in _oddities(node):
            if name not in told:
                told.add(name)
                yield Problem("pickle", "", f"its pickle calls {printable(name)} {fact}")


def frame_problems(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Whether a frame of a pickle states another length than it has."""
    if not checkpoint.details.framed:
        text = (
            "a frame of its pickle does not end where it says: pickle reads beyond its end, or "
            "asks for all memory"
        )
        yield Problem("pickle", "", text)


def _oddities(node: Any) -> Iterator[tuple[str, str]]:
    """Functions that were called otherwise than anybody does, and how."""
    if isinstance(node, TensorRef) and isinstance(node.hooks, Opaque):
        yield node.hooks.class_name, "where every tensor has an OrderedDict"
    if not isinstance(node, Opaque) or node.maker == "persid":
        return
    if not isinstance(node.func, Global):
        if not isinstance(node.func, Opaque):
            yield f"something of type {type(node.func).__name__}", "as if it were a function"
        return
    name, module, own = node.func.qualified, node.func.module, node.func.name
    args = node.args if isinstance(node.args, tuple) else ()
    if name in _KNOWN:
        if own == "encode" or any(isinstance(arg, (StorageRef, TensorRef)) for arg in args):
            yield name, "with arguments that it does not take"
        elif own == "_reconstruct" and not (_is_array(args[:1]) and _is_array_state(node.state)):
            yield name, "for an array that is none"
    elif own in _NAMES or module in _MODULES:
        yield name, "and there is no such function"
    elif any(isinstance(arg, StorageRef) for arg in args):
        yield name, "on a storage, which is not known"
    elif name == "numpy.dtype" and not _is_dtype_made(args, node.state):
        yield name, "for a type whose state is none"


def _is_array_state(state: Any) -> bool:
    """Of a `numpy.ndarray`: version, shape, dtype, order and content."""
    match state:
        case (1, tuple(), dtype, bool() | int(), _):
            return _is_dtype(dtype)
    return False


def _is_array(classes: Sequence[Any]) -> bool:
    """Whether it can be a class of arrays: numpy's own, or one derived from it elsewhere."""
    return all(
        isinstance(one, Global)
        and (one.module.startswith("numpy.") or (one.module == "numpy") is (one.name in _ARRAYS))
        for one in classes
    )


def _is_dtype(node: Any) -> bool:
    """Whether it is an element type of numpy's, by its old class or one of the new ones."""
    if not isinstance(node, Opaque):
        return False
    return node.class_name == "numpy.dtype" or node.class_name.startswith("numpy.dtypes.")


def _is_dtype_made(args: tuple[Any, ...], state: Any) -> bool:
    """Of a `numpy.dtype`: a code and two flags, and as many items as the version has."""
    match args, state:
        case (str(), bool() | int(), bool() | int()), (int() as version, *items):
            return len(items) == version + 4
        case (str(), bool() | int(), bool() | int()), None:
            return True
    return False
