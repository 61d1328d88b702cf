"""Make torch tensors from references to bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ckptool.core.model import Global, StorageRef, TensorRef, Wrapping
from ckptool.core.tree import walk_everything
from ckptool.dtypes import BY_NAME
from ckptool.errors import (
    CheckpointError,
    CorruptFile,
    DeviceError,
    UnsupportedFormat,
    warn,
)
from ckptool.tensors.storages import (
    MapLocation,
    Placement,
    StorageReader,
    check_float_dtype,
    describe_name,
    get_torch_dtype,
    require_torch,
)
from ckptool.words import listed

if TYPE_CHECKING:
    import torch


def set_attributes(instance: Any, attributes: Mapping[Any, Any], where: str) -> None:
    """Set attributes from a file on `instance`, except those that its class has.

    So no file replaces a method or a property. A `CheckpointWarning` names the refused attributes
    and `where`.
    """
    refused: list[str] = []
    for name, value in attributes.items():
        if isinstance(name, str) and name[:2] != "__" and not hasattr(type(instance), name):
            setattr(instance, name, value)
        elif name not in vars(instance):  # torch has set those of a jagged tensor already
            refused.append(str(name))
    if refused:
        names, kind = listed(refused), type(instance).__name__
        warn(f"left out attributes of {where} that class {kind} already has: {names}")


def _make_quantized(
    ref: TensorRef, quantizer: tuple[Any, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return an empty quantized tensor with the quantizer that `_rebuild_qtensor` was given.

    `quantizer` is the scheme, then scale and zero point, or these per channel and the axis.

    Raises:
        ValueError: if the scheme is unknown, or the quantizer does not fit the shape.
    """
    import torch

    scheme, *numbers = quantizer
    name = scheme.name if isinstance(scheme, Global) else str(scheme)
    if name == "per_tensor_affine":
        scale, zero_point = numbers
        return torch._empty_affine_quantized(
            (0,), scale=scale, zero_point=zero_point, dtype=dtype, device=device
        )
    if name not in ("per_channel_affine", "per_channel_affine_float_qparams"):
        raise ValueError(f"its scheme {name} is unknown")
    scales, zero_points, axis = numbers
    if type(axis) is not int or not 0 <= axis < len(ref.shape):
        raise ValueError(f"its axis {axis!r} is not one of its {len(ref.shape)} dimensions")
    if isinstance(scales, list):  # of torch 1.4
        is_integer = name == "per_channel_affine"  # the other scheme has zero points of float
        scales = torch.tensor(scales, dtype=torch.float64 if is_integer else torch.float32)
        zero_points = torch.tensor(zero_points, dtype=torch.int64 if is_integer else torch.float32)
    if not scales.numel() == zero_points.numel() == ref.shape[axis]:
        raise ValueError(f"it has {scales.numel()} scales for {ref.shape[axis]} channels")
    # torch checks the channels of an empty tensor too, but needs no memory for it: a stride of zero
    # may give a small storage an enormous shape.
    empty_shape = [0] * len(ref.shape)
    empty_shape[axis] = scales.numel()
    return torch._empty_per_channel_affine_quantized(
        empty_shape,
        scales=scales.to(device),
        zero_points=zero_points.to(device),
        axis=axis,
        dtype=dtype,
        device=device,
    )


_KINDS_OF_PARTS = (
    "sparse_coo",
    "sparse_csr",
    "sparse_csc",
    "sparse_bsr",
    "sparse_bsc",
    "nested",
    "meta",
)
"""Kinds of tensors that have no storage of their own."""


def _assemble_parts(ref: TensorRef, parts: Mapping[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without storage of its own, made from its loaded parts.

    Its kind is meta, sparse or nested. Invariants are checked, unless the parts are on the meta
    device and have no elements.
    """
    import torch

    if ref.kind == "meta":
        return torch.empty_strided(ref.sizes, ref.stride, dtype=dtype, device="meta")
    if ref.kind == "sparse_coo":
        return torch.sparse_coo_tensor(
            parts["indices"],
            parts["values"],
            ref.sizes,
            check_invariants=parts["indices"].device.type != "meta",
            is_coalesced=parts.get("is_coalesced"),
        )
    if ref.kind != "nested":
        layout: torch.layout = vars(torch)[ref.kind]
        return torch.sparse_compressed_tensor(
            parts["compressed_indices"],
            parts["plain_indices"],
            parts["values"],
            ref.sizes,
            layout=layout,
            check_invariants=parts["values"].device.type != "meta",
        )
    if "state" in parts:  # a nested tensor with the jagged layout is pickled with its attributes
        return _make_jagged(parts["state"])
    buffer, sizes, strides, offsets = (
        parts[name] for name in ("buffer", "sizes", "strides", "offsets")
    )
    if buffer.device.type != "meta":
        _check_nested(buffer, sizes.cpu(), strides.cpu(), offsets.cpu())
    return torch._nested_view_from_buffer(buffer, sizes, strides, offsets)


def _check_nested(
    buffer: torch.Tensor, sizes: torch.Tensor, strides: torch.Tensor, offsets: torch.Tensor
) -> None:
    """Raise ValueError if a component of a nested tensor is outside of its buffer."""
    import torch

    if any(table.dtype != torch.int64 for table in (sizes, strides, offsets)):
        raise ValueError("its sizes, strides and offsets are not int64")
    if buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError("its buffer is not contiguous")
    if sizes.shape != strides.shape or offsets.shape != sizes.shape[:1]:
        raise ValueError("its sizes, strides and offsets are inconsistent")
    rows = zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True)
    for size, stride, offset in rows:
        is_scalar = not isinstance(size, list)  # a component without dimensions
        dimensions = [] if is_scalar else list(zip(size, stride, strict=True))
        if offset < 0 or any(count < 0 or step < 0 for count, step in dimensions):
            raise ValueError("a component has a negative size, stride or offset")
        if all(count for count, _ in dimensions):  # others have no elements
            last = offset + sum((count - 1) * step for count, step in dimensions)
            if last >= buffer.numel():
                raise ValueError(f"a component reaches element {last:,} of {buffer.numel():,}")


def _make_jagged(state: Mapping[str, Any]) -> torch.Tensor:
    """Return the jagged tensor of its state: values, offsets and lengths."""
    import torch

    if not hasattr(torch.nested, "nested_tensor_from_jagged"):
        raise UnsupportedFormat(
            f"has a jagged tensor, which torch {torch.__version__} does not support",
            hint="pip install --upgrade torch",
        )
    values, offsets, lengths = state["values"], state["offsets"], state.get("lengths")
    ragged = state.get("_ragged_idx", 1)
    if offsets.device.type != "meta":
        _check_jagged(values, offsets, lengths, ragged)
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=ragged)


def _check_jagged(values: Any, offsets: Any, lengths: Any, ragged: Any) -> None:
    """Raise ValueError if offsets or lengths do not fit the values.

    `ragged` is the ragged dimension of the jagged tensor, which has the batch as dimension 0. The
    values have no batch dimension.
    """
    if type(ragged) is not int or not 1 <= ragged <= values.dim() or offsets.dim() != 1:
        raise ValueError(f"its ragged dimension {ragged!r} does not exist")
    starts = offsets.tolist()  # of the components, and the end of the last one
    ends = starts[1:]
    if lengths is not None:
        counts = lengths.tolist()
        ends = [start + count for start, count in zip(starts, counts, strict=False)]
        if len(counts) != len(starts) - 1 or any(count < 0 for count in counts):
            raise ValueError("its lengths do not fit its offsets")
    row_count = values.shape[ragged - 1]
    is_rising = all(start <= end for start, end in zip(starts, ends, strict=False))
    if not starts or starts[0] < 0 or not is_rising or max((*ends, *starts)) > row_count:
        raise ValueError(f"its offsets exceed the {row_count:,} rows of its values")


def materialize(
    ref: TensorRef,
    *,
    map_location: MapLocation = "cpu",
    mmap: bool = False,
    dtype: torch.dtype | str | None = None,
) -> torch.Tensor:
    """Return the tensor of `ref`; options as in `ckptool.load_state_dict`.

    Only tensors made by one `Materializer` share storages.
    """
    maker = Materializer(ref, map_location=map_location, mmap=mmap, dtype=dtype)
    return maker.make_tensor(ref)


class Materializer:
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
        """Plan the reads for the tensors below `root`; nothing is read yet.

        `convert` converts the values among a tensor's own attributes; without it only the tensors
        among them are converted.

        Raises:
            TorchMissing: torch is not installed.
            DeviceError: `map_location` is not a value that `torch.load` accepts.
            UsageError: `dtype` is not a floating dtype.
        """
        require_torch()
        self._convert = convert
        self._requested_dtype = check_float_dtype(dtype)
        self._storage_reader = StorageReader(
            Placement(map_location), mapped=mmap, dtype=self._requested_dtype
        )
        self._tensor_by_ref: dict[tuple[int, bool], tuple[TensorRef, torch.Tensor]] = {}
        """By `id` of a `TensorRef` and `cast`: the reference, and its tensor."""
        for node in walk_everything(root):
            if isinstance(node, StorageRef):
                self._storage_reader.announce_span(node.storage, (0, node.storage.nbytes))
            elif isinstance(node, TensorRef) and node.storage is not None:
                self._storage_reader.announce_span(node.storage, node.reach)

    def make_tensor(self, ref: TensorRef, name: str = "", *, cast: bool = True) -> torch.Tensor:
        """Return the tensor of `ref`, always the same object for the same `ref`.

        A numpy array becomes a tensor. A subclass with a storage becomes a plain tensor with its
        attributes from the file, and so does a DTensor of which this file has all. `name` is for
        messages; `cast` allows the requested change of floating dtypes.

        Raises:
            DeviceError: its device is not available; the message has a remedy.
            CorruptFile: torch rejects the description in the file.
            UnsupportedFormat: a wrapper (DTensor, ShardedTensor) of which this file has a part.
        """
        cached = self._tensor_by_ref.get((id(ref), cast))
        if cached is not None:
            return cached[1]
        if is_one_part(ref):
            raise only_part_error(ref, name)
        tensor = self._assemble(ref.whole or ref, name, cast=cast)
        self._tensor_by_ref[id(ref), cast] = (ref, tensor)  # alive, a ref keeps its id
        for layer in ref.wrapping:
            set_attributes(tensor, self._load_attributes(layer), describe_name(name))
        return tensor

    def make_storage(
        self, ref: StorageRef, name: str = ""
    ) -> torch.UntypedStorage | torch.storage.TypedStorage:
        """Return a storage that is a value of the tree, typed or untyped as in the file.

        The requested dtype is only for tensors, so it is not cast.
        """
        import torch

        loaded, _ = self._storage_reader.get(
            ref.storage, ref.dtype, device=ref.storage.device, name=name, cast=False
        )
        if ref.untyped:
            return loaded
        dtype = get_torch_dtype(ref.dtype)
        return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=loaded, dtype=dtype, _internal=True
        )

    def forget(self) -> None:
        """Release all tensors and storages made so far; only the caller's references keep them."""
        self._tensor_by_ref.clear()
        self._storage_reader.forget()
        self._convert = None

    def _assemble(self, ref: TensorRef, name: str, *, cast: bool) -> torch.Tensor:
        """Return the tensor with its wrapping layers, but without their attributes.

        Raises:
            CorruptFile: torch rejects the description in the file.
        """
        import torch

        is_cast = cast and BY_NAME[ref.dtype].floating
        dtype_name = (self._requested_dtype if is_cast else None) or ref.dtype
        dtype = get_torch_dtype(dtype_name, file=_file_of(ref))
        # The scales of a quantized tensor are not weights: they keep their dtype.
        parts = self._load_parts(ref, name, cast=cast and ref.kind != "quantized")
        storage, offset = None, 0
        if ref.storage is not None:
            storage, first = self._storage_reader.get(
                ref.storage, ref.dtype, device=ref.device, name=name, cast=cast
            )
            offset = max(0, ref.offset - first)  # an empty tensor may be before the first
        try:
            if storage is None:
                return _wrap_layers(_assemble_parts(ref, parts, dtype), ref)
            # As torch rebuilds tensors: an empty one is set to the storage.
            if ref.kind == "quantized":
                tensor = _make_quantized(ref, parts["quantizer"], dtype, storage.device)
            else:
                tensor = torch.empty((0,), dtype=dtype, device=storage.device)
            tensor.set_(storage, offset, ref.sizes, ref.stride)
            if ref.flags:
                flags = dict.fromkeys(ref.flags, True)
                torch._utils.set_tensor_metadata(tensor, flags)  # type: ignore[no-untyped-call]
            return _wrap_layers(tensor, ref)
        except (CheckpointError, torch.cuda.OutOfMemoryError):
            raise
        except _REFUSALS as error:
            raise _creation_error(ref, name, error) from error

    def _load_parts(self, ref: TensorRef, name: str, *, cast: bool) -> dict[str, Any]:
        """Return the parts of a tensor with tensors loaded; {} if its kind is not made of parts."""
        if ref.kind not in _KINDS_OF_PARTS and ref.kind != "quantized":  # it has a quantizer
            return {}
        return {
            key: self._load_part(part, name, cast=cast) for key, part in (ref.parts or {}).items()
        }

    def _load_part(self, part: Any, name: str, *, cast: bool) -> Any:
        """Return a part with every tensor in it loaded."""
        if isinstance(part, TensorRef):
            return self.make_tensor(part, name, cast=cast)
        if isinstance(part, tuple):
            return tuple(self._load_part(item, name, cast=cast) for item in part)
        if isinstance(part, dict):  # of a jagged tensor
            return {key: self._load_part(item, name, cast=cast) for key, item in part.items()}
        return part

    def _load_attributes(self, layer: Wrapping) -> dict[Any, Any]:
        """Return the Python attributes in the state of a layer, with values converted.

        A class with slots has a state of two dicts: its `__dict__`, and the slots.
        """
        # Without a `convert` given to the call, only the tensors in the state are converted.
        convert = self._convert or (lambda state: self._load_part(state, "", cast=False))
        state = convert(layer.state)
        groups = state if isinstance(state, tuple) else (state,)
        return {
            name: value
            for group in groups
            if isinstance(group, dict)
            for name, value in group.items()
        }


_REFUSALS = (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError)
"""The errors of torch for invalid arguments."""


def _wrap_layers(tensor: torch.Tensor, ref: TensorRef) -> torch.Tensor:
    """Wrap a tensor in its Parameter layers, innermost first; subclasses are never created.

    A tensor that is not a Parameter only gets its `requires_grad`.
    """
    import torch

    if not ref.is_parameter:
        return tensor.requires_grad_() if ref.requires_grad else tensor
    for layer in ref.wrapping:
        if layer.kind != "type":  # "type" is the layer of a subclass
            tensor = torch.nn.Parameter(tensor, layer.requires_grad)
    return tensor


def is_one_part(ref: TensorRef) -> bool:
    """Return True for a subclass that has components in place of a storage, such as a DTensor.

    Only its class can put them together, with those in the files of other ranks. A DTensor that is
    complete in this file (`whole`) is none.
    """
    return ref.kind == "subclass" and ref.storage is None and ref.whole is None


def only_part_error(ref: TensorRef, name: str) -> UnsupportedFormat:
    """Return the error for a distributed tensor or a subclass that cannot be made."""
    class_name = ref.class_name.rpartition(".")[2]
    if not ref.is_spread:  # a subclass in one process, for example of torchao
        return UnsupportedFormat(
            f"{describe_name(name)} is a {ref.class_name}, which only its class can assemble",
            file=_file_of(ref),
            hint="convert torchao tensors with ckptool cast --dequantize float32, or call "
            ".dequantize() before saving",
        )
    return UnsupportedFormat(
        f"{describe_name(name)} is a {class_name}, distributed over ranks; "
        "this file has only one part",
        file=_file_of(ref),
        hint="gather it before saving (full_tensor(), get_model_state_dict with full_state_dict), "
        "or read this part with ckptool.open(FILE)[NAME].local.torch()",
    )


def _creation_error(ref: TensorRef, name: str, error: Exception) -> Exception:
    """Return the error to raise if torch or a check rejected the description of a tensor."""
    import torch

    reason = str(error).strip().partition("\n")[0][:200]
    if isinstance(error, NotImplementedError):
        return DeviceError(
            f"{describe_name(name)} is {ref.kind}, which torch {torch.__version__} cannot create "
            f"on the requested device ({reason})",
            file=_file_of(ref),
            hint='map_location="cpu"',
        )
    return CorruptFile(
        f"{describe_name(name)} ({ref.kind}) cannot be created: {reason}", file=_file_of(ref)
    )


def _file_of(ref: TensorRef) -> str | None:
    """Return the name of the file with the data of a tensor, or of the first of its components.

    None if it has no data.
    """
    if ref.storage is not None:
        return ref.storage.data.source.name if ref.storage.data else None
    component = next(ref.tensors_inside(), None)
    return None if component is None else _file_of(component)
