"""`TensorRef` to `torch.Tensor`: parts, layers, ties and identity kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckptool.dtypes import BY_NAME, PACKED
from ckptool.errors import CheckpointError, CorruptFile, DeviceError, UnsupportedFormat
from ckptool.model import StorageRef, TensorRef, Wrapping
from ckptool.rebuilding import everything
from ckptool.tensors.assemble import PART_KINDS, assemble
from ckptool.tensors.placement import MapLocation, Placement
from ckptool.tensors.runtime import (
    called,
    require_torch,
    set_attributes,
    torch_dtype,
    wanted_dtype,
)
from ckptool.tensors.storages import StorageReader

if TYPE_CHECKING:
    import torch

__all__ = ["Materialiser", "is_one_part", "materialise", "only_a_part"]


def materialise(
    ref: TensorRef,
    *,
    map_location: MapLocation = "cpu",
    mmap: bool = False,
    dtype: torch.dtype | str | None = None,
) -> torch.Tensor:
    """The tensor that `ref` stands for; options as `ckptool.load_state_dict`'s.

    Tensors that share a storage share it only where one `Materialiser` makes them all.

    Raises:
        TorchMissing: torch is not installed.
        DeviceError, CorruptFile, UnsupportedFormat: as `Materialiser.tensor`.
    """
    maker = Materialiser(ref, map_location=map_location, mmap=mmap, dtype=dtype)
    return maker.tensor(ref)


class Materialiser:
    """Makes the tensors of one tree: each `TensorRef` once, each storage once."""

    def __init__(
        self,
        root: Any,
        *,
        map_location: MapLocation = "cpu",
        mmap: bool = False,
        dtype: torch.dtype | str | None = None,
        convert: Callable[[Any], Any] | None = None,
    ) -> None:
        """Plan what to read for the tensors below `root`; nothing is read yet.

        `convert` makes the values among a tensor's own attributes; without it only the tensors
        among them are made.

        Raises:
            TorchMissing: torch is not installed.
            DeviceError: `map_location` is nothing that `torch.load` takes.
            UsageError: `dtype` is no floating element type.
        """
        require_torch()
        self._convert = convert
        self._dtype = wanted_dtype(dtype)
        self._storages = StorageReader(Placement(map_location), mapped=mmap, dtype=self._dtype)
        self._made: dict[tuple[int, bool], tuple[TensorRef, torch.Tensor]] = {}
        for node in everything(root):
            if isinstance(node, (TensorRef, StorageRef)) and node.storage is not None:
                self._storages.cover(node.storage, _reach(node))

    def tensor(self, ref: TensorRef, name: str = "", *, cast: bool = True) -> torch.Tensor:
        """The tensor; the same object whenever the same `ref` is asked for.

        A numpy array becomes a tensor. A subclass that has a storage becomes a plain tensor with
        the attributes that the file gives it. `name` is for messages; `cast` allows the change of
        floating types that was asked for.

        Raises:
            DeviceError: it lies on a device that is not here; the message says what helps.
            CorruptFile: torch refuses to make what the file describes.
            UnsupportedFormat: a wrapper (DTensor, ShardedTensor) of which this file has a part.
        """
        known = self._made.get((id(ref), cast))
        if known is not None:
            return known[1]
        if is_one_part(ref):
            raise only_a_part(ref, name)
        made = self._assembled(ref.whole or ref, name, cast=cast)
        self._made[id(ref), cast] = (ref, made)
        for layer in ref.wrapping:
            set_attributes(made, self._attributes(layer), called(name))
        return made

    def storage(
        self, ref: StorageRef, name: str = ""
    ) -> torch.UntypedStorage | torch.storage.TypedStorage:
        """A storage that stands in the tree by itself, typed or untyped as in the file.

        Raises:
            DeviceError: it lies on a device that is not here.
        """
        import torch

        made, _ = self._storages.get(
            ref.storage, ref.dtype, device=ref.storage.device, name=name, cast=False
        )
        if ref.untyped:
            return made
        dtype = torch_dtype(ref.dtype)
        return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=made, dtype=dtype, _internal=True
        )

    def forget(self) -> None:
        """Let go of all that was made: only the caller's references keep it from now on."""
        self._made.clear()
        self._storages.forget()
        self._convert = None

    def _assembled(self, ref: TensorRef, name: str, *, cast: bool) -> torch.Tensor:
        """The tensor with its layers, but without their attributes."""
        import torch

        casts = cast and self._dtype is not None and BY_NAME[ref.dtype].floating
        dtype = torch_dtype(self._dtype if casts and self._dtype else ref.dtype, file=_file(ref))
        # The scales of a quantised tensor are no weights: they keep their type.
        parts = self._parts(ref, name, cast=cast and ref.kind != "quantized")
        storage, offset = None, 0
        if ref.storage is not None:
            storage, first = self._storages.get(
                ref.storage, ref.dtype, device=ref.device, name=name, cast=cast
            )
            offset = max(0, ref.offset - first)
        try:
            made = assemble(ref, parts, dtype=dtype, storage=storage, offset=offset)
            return _with_layers(made, ref)
        except (CheckpointError, torch.cuda.OutOfMemoryError):
            raise
        except _REFUSALS as error:
            raise _refused(ref, name, error) from error

    def _parts(self, ref: TensorRef, name: str, *, cast: bool) -> dict[str, Any]:
        """What it is made of, tensors made; empty for a plain tensor, whatever carried it."""
        if ref.kind not in PART_KINDS and ref.kind != "quantized":
            return {}
        return {key: self._part(part, name, cast=cast) for key, part in (ref.parts or {}).items()}

    def _part(self, part: Any, name: str, *, cast: bool) -> Any:
        if isinstance(part, TensorRef):
            return self.tensor(part, name, cast=cast)
        if isinstance(part, tuple):
            return tuple(self._part(item, name, cast=cast) for item in part)
        if isinstance(part, dict):  # of a jagged tensor
            return {key: self._part(item, name, cast=cast) for key, item in part.items()}
        return part

    def _attributes(self, layer: Wrapping) -> dict[Any, Any]:
        """The Python attributes that a layer's state holds, slots merged in, values made."""
        convert = self._convert or (lambda state: self._part(state, "", cast=False))
        state = convert(layer.state)
        groups = state if isinstance(state, tuple) else (state,)
        return {
            name: value
            for group in groups
            if isinstance(group, dict)
            for name, value in group.items()
        }


_REFUSALS = (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError)
"""What torch raises at arguments that it cannot use."""


def _reach(ref: TensorRef | StorageRef) -> tuple[int, int] | None:
    """The bytes of its storage that it looks at, from and to; None where it has no elements."""
    if isinstance(ref, StorageRef) or ref.dtype in PACKED:
        return 0, ref.storage.nbytes if ref.storage is not None else 0
    if ref.numel == 0:
        return None
    steps = [((size or 0) - 1) * step for size, step in zip(ref.shape, ref.stride, strict=True)]
    first = ref.offset + sum(step for step in steps if step < 0)
    last = ref.offset + sum(step for step in steps if step > 0)
    return first * ref.itemsize, (last + 1) * ref.itemsize


def _with_layers(tensor: torch.Tensor, ref: TensorRef) -> torch.Tensor:
    """Parameters made of it, innermost first; a class that only the file knows is left out."""
    import torch

    if not ref.is_parameter:
        return tensor.requires_grad_() if ref.requires_grad else tensor
    for layer in ref.wrapping:
        if layer.kind != "type":
            tensor = torch.nn.Parameter(tensor, layer.requires_grad)
    return tensor


def is_one_part(ref: TensorRef) -> bool:
    """Whether only its class makes a tensor of the parts that this file has."""
    return ref.kind == "subclass" and ref.storage is None and ref.whole is None


def only_a_part(ref: TensorRef, name: str) -> UnsupportedFormat:
    """The error that such a tensor is: `name` is its own, for the message."""
    shown = ref.class_name.rpartition(".")[2]
    if not ref.is_spread:
        return UnsupportedFormat(
            f"{called(name)} is of the class {ref.class_name}, which alone can put it together",
            file=_file(ref),
            hint="make it plain in torch before saving: .dequantize()",
        )
    return UnsupportedFormat(
        f"{called(name)} is a {shown}: spread over ranks, of which this file holds one rank's part",
        file=_file(ref),
        hint="gather it before saving (full_tensor(), get_model_state_dict with full_state_dict), "
        "or read the part: ckptool.open(FILE)[NAME].local.torch()",
    )


def _refused(ref: TensorRef, name: str, error: Exception) -> Exception:
    """What to raise where torch, or a check before it, refused to make a tensor."""
    import torch

    reason = str(error).strip().partition("\n")[0][:200]
    if isinstance(error, NotImplementedError):
        return DeviceError(
            f"{called(name)} is {ref.kind}, and torch {torch.__version__} cannot make that on the "
            f"device asked for ({reason})",
            file=_file(ref),
            hint='map_location="cpu"',
        )
    return CorruptFile(f"{called(name)} ({ref.kind}) cannot be made: {reason}", file=_file(ref))


def _file(ref: TensorRef) -> str | None:
    """The file that the bytes of a tensor, or of its parts, are in."""
    if ref.storage is not None:
        return ref.storage.data.source.name if ref.storage.data else None
    inside = next(ref.tensors_inside(), None)
    return None if inside is None else _file(inside)
