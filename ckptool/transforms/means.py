"""The storages of averaged tensors: what shares memory in every file goes on sharing it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ckptool.checkpoint import Change
from ckptool.dtypes import BY_NAME
from ckptool.errors import UsageError
from ckptool.files import ByteRange
from ckptool.model import Storage, TensorRef
from ckptool.tensors.averaging import Averager, Elements, elements_of
from ckptool.words import listed, printable

__all__ = ["Group", "averaged_groups"]

Tensors = tuple[TensorRef, ...]
"""Those of one name: one from each file."""


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors over one storage of the first file, each with its mean in the same shape."""

    made: tuple[tuple[TensorRef, TensorRef], ...]
    warnings: tuple[Change, ...] = ()


def averaged_groups(named: Sequence[tuple[str, Tensors]], files: Sequence[str]) -> list[Group]:
    """The mean of each name's tensors, as a tensor like the first, to be computed when it is read.

    Raises:
        UsageError: what is one tensor in the first file is several in another.
    """
    averager = Averager()
    stored: dict[int, list[tuple[str, Tensors]]] = {}
    for name, tensors in named:
        stored.setdefault(id(tensors[0].storage), []).append((name, tensors))
    return [_group(averager, members, files) for members in stored.values()]


def _group(averager: Averager, members: list[tuple[str, Tensors]], files: Sequence[str]) -> Group:
    every = [tensors for _, tensors in members]
    if _laid_out_alike(every):
        return Group(tuple(_together(averager, members[0][0], every)))
    apart: dict[object, list[tuple[str, Tensors]]] = {}
    for name, tensors in members:
        apart.setdefault(tuple(map(_place, tensors)), []).append((name, tensors))
    owners: dict[int, str] = {}
    for tied in apart.values():
        for name, tensors in tied:
            if owners.setdefault(id(tensors[0]), tied[0][0]) != tied[0][0]:
                raise UsageError(
                    f"{printable(owners[id(tensors[0])])!r} and {printable(name)!r} are one tensor "
                    "in this file and several in another",
                    file=files[0],
                    hint=f"ckptool convert --ties copy {files[0]} OUT, and average that",
                )
    made = [pair for tied in apart.values() for pair in _alone(averager, tied)]
    warnings = []
    if len(apart) > 1:
        names = listed(name for name, _ in members)
        text = f"memory that not every file shares is shared no longer: {names}"
        warnings.append(Change("warning", text, len(members)))
    return Group(tuple(made), tuple(warnings))


def _place(tensor: TensorRef) -> tuple[object, ...]:
    """What two names have in common that stand for one tensor."""
    return id(tensor.storage), tensor.offset, tensor.stride, tensor.dtype, tensor.flags


def _laid_out_alike(every: list[Tensors]) -> bool:
    """Whether the tensors of one storage lie in every file as they do in the first."""
    for column in zip(*every, strict=True):
        one, first = column[0], every[0][0]
        for tensors, tensor in zip(every, column, strict=True):
            if (
                tensor.storage is not one.storage
                or tensor.dtype != one.dtype
                or tensor.flags
                or tensor.offset - one.offset != tensors[0].offset - first.offset
                or _steps(tensor) != _steps(tensors[0])
            ):
                return False
    return True


def _steps(tensor: TensorRef) -> list[int]:
    """The strides that matter."""
    pairs = zip(tensor.stride, tensor.shape, strict=True)
    return [step for step, size in pairs if size != 1]


def _together(
    averager: Averager, name: str, every: list[Tensors]
) -> Iterator[tuple[TensorRef, TensorRef]]:
    """Each tensor over one mean of all that they look at, in the order of the storage."""
    first = every[0][0]
    reach = [_extent(tensors[0]) for tensors in every if tensors[0].numel]
    low = min((start for start, _ in reach), default=0)
    high = max((stop for _, stop in reach), default=0)
    runs = []
    for tensor in every[0]:
        held, data = _stored(tensor)
        size = BY_NAME[tensor.dtype].itemsize
        start = (low + tensor.offset - first.offset) * size if reach else 0
        run = data.slice(start, (high - low) * size)
        runs.append(Elements(tensor.dtype, run, held.byteorder, held))
    storage = averager.mean(runs, _stored(first)[0], first.dtype, name)
    for tensors in every:
        at = tensors[0].offset - low if tensors[0].numel else 0
        yield tensors[0], replace(tensors[0], storage=storage, offset=at)


def _stored(tensor: TensorRef) -> tuple[Storage, ByteRange]:
    """The storage of a tensor that has content, and its bytes."""
    storage = tensor.storage
    if storage is None or storage.data is None:
        raise UsageError("a tensor without bytes has no mean")
    return storage, storage.data


def _extent(tensor: TensorRef) -> tuple[int, int]:
    """The first element of the storage that a tensor looks at, and the one after the last."""
    last = sum(
        ((size or 0) - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True)
    )
    return tensor.offset, tensor.offset + last + 1


def _alone(
    averager: Averager, tied: list[tuple[str, Tensors]]
) -> Iterator[tuple[TensorRef, TensorRef]]:
    """One tensor under its names, over a mean of its own; its strides stay if it has no holes."""
    name, tensors = tied[0]
    first = tensors[0]
    order = sorted(range(len(first.stride)), key=lambda axis: -first.stride[axis])
    if not _permuted(first, order).is_contiguous:
        order = list(range(len(first.stride)))
    runs = [elements_of(_permuted(tensor, order)) for tensor in tensors]
    stride, step = [0] * len(order), 1
    for axis in reversed(order):
        stride[axis] = step
        step *= max(first.shape[axis] or 0, 1)
    storage = averager.mean(runs, _stored(first)[0], first.dtype, name)
    for one in dict.fromkeys(tensors[0] for _, tensors in tied):
        yield one, replace(one, storage=storage, offset=0, stride=tuple(stride), flags=())


def _permuted(tensor: TensorRef, order: Sequence[int]) -> TensorRef:
    return replace(
        tensor,
        shape=tuple(tensor.shape[axis] for axis in order),
        stride=tuple(tensor.stride[axis] for axis in order),
        parts=None,
        wrapping=(),
    )
