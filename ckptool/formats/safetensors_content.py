"""What of a checkpoint safetensors can hold: tensors of plain elements under names, no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckptool.dtypes import BY_NAME
from ckptool.errors import NotRepresentable
from ckptool.formats.safetensors_header import METADATA, is_unicode
from ckptool.model import SPARSE_KINDS, Opaque, TensorRef, find_tensors
from ckptool.modules import attributes_of, holds_tensors
from ckptool.quantisers import class_scheme, quantised
from ckptool.statedict import wrapped_names
from ckptool.words import counted, listed, printable

__all__ = [
    "flat_tensors",
    "left_out",
    "overlapping",
    "overlapping_names",
    "remarks",
    "true_ties",
]

_REMEDIES = {
    **dict.fromkeys(SPARSE_KINDS, "make it dense in torch before saving: .to_dense()"),
    "quantized": "make it floating in torch before saving: .dequantize()",
    "nested": "pad it in torch before saving: torch.nested.to_padded_tensor(tensor, 0.0)",
    "subclass": "make it plain in torch before saving: .dequantize()",
}
"""What helps against a tensor of a kind that has no plain bytes."""
_GATHER = "gather it in torch before saving: .full_tensor()"


def flat_tensors(root: Any, file: str) -> dict[str, TensorRef]:
    """The tensors of a state dict by name, each one such as safetensors can hold.

    Raises:
        NotRepresentable: the root is no state dict, or a tensor or its name cannot be held.
    """
    items = list(root.items()) if isinstance(root, dict) else []
    tensors = [(key, value) for key, value in items if isinstance(value, TensorRef)]
    if not tensors and (items or not isinstance(root, dict)):
        raise NotRepresentable(
            "safetensors holds one flat state dict, and this is none",
            file=file,
            hint="--key NAME chooses a state dict inside; ckptool info lists them",
        )
    for key, tensor in tensors:
        fact = _name_fault(key) or _tensor_fault(tensor)
        if fact is not None:
            raise NotRepresentable(
                f"tensor '{printable(str(key))}' {fact}, which safetensors cannot hold",
                file=file,
                hint=_remedy(tensor),
            )
    _check_containers(root, file)
    return dict(tensors)


def _check_containers(root: Any, file: str) -> None:
    """Refuse what holds tensors beside its own elements: packed parameters, objects, attributes.

    Raises:
        NotRepresentable: naming them, with the quantiser where that is known.
    """
    holders = {
        str(key): inside
        for key, value in root.items()
        for inside in [dict(attributes_of(value)) if isinstance(value, TensorRef) else value]
        if holds_tensors(inside)
    }
    if not holders:
        return
    known = quantised(holders)
    own = frozenset(wrapped_names(root))
    texts = (
        f"{name} ({f'{known[name].scheme}: ' if name in known else ''}"
        f"{counted(sum(1 for _ in find_tensors(value)), 'tensor')} inside)"
        for name, value in holders.items()
    )
    globs = dict.fromkeys(
        f"*{name.rpartition('.')[2]}" if name in known else name if name in own else f"{name}/*"
        for name in holders
    )
    raise NotRepresentable(
        f"safetensors holds tensors alone, and no containers of them: {listed(texts)}",
        file=file,
        hint="write a .pth file, or leave it out: "
        + " ".join(f"--exclude '{printable(glob)}'" for glob in globs),
    )


def _name_fault(key: Any) -> str | None:
    if not isinstance(key, str):
        return f"has a name of type {type(key).__name__}"
    if key == METADATA:
        return "has the name of the header's own entry"
    return None if is_unicode(key) else "has a name that is not Unicode"


def _tensor_fault(tensor: TensorRef) -> str | None:
    if tensor.kind == "meta" or tensor.device == "meta":
        return "is on the meta device and has no bytes"
    if not tensor.has_content:
        if tensor.is_spread:
            return "is a distributed tensor, of which this file has a part"
        if tensor.kind == "subclass":
            return f"is of the class {printable(tensor.class_name)}{_scheme(tensor)}"
        return f"is a {tensor.kind} tensor"
    if BY_NAME[tensor.dtype].safetensors is None:
        return f"has the dtype {tensor.dtype}"
    if tensor.dtype == "float4_e2m1fn_x2" and not tensor.shape:
        return "is a pair of float4 without a dimension"
    return None


def _scheme(node: Any) -> str:
    scheme = class_scheme(node)
    return f" ({scheme})" if scheme else ""


def _remedy(tensor: TensorRef) -> str | None:
    if tensor.has_content:
        return None
    return _GATHER if tensor.is_spread else _REMEDIES.get(tensor.kind)


def true_ties(tensors: Mapping[str, TensorRef], taken: Iterable[str]) -> dict[str, str]:
    """Each name that stands for a tensor that an earlier name stands for, with that name.

    A name in `taken` cannot be an entry of the header and stays a tensor of its own.
    """
    first: dict[Any, str] = {}
    ties: dict[str, str] = {}
    for name, tensor in tensors.items():
        kept = first.setdefault(_identity(tensor), name)
        if kept != name and name not in taken:
            ties[name] = kept
    return ties


def _identity(tensor: TensorRef) -> tuple[Any, ...]:
    """What two names must share to be one tensor."""
    place = tensor.offset, tensor.shape, tensor.stride
    return id(tensor.storage), *place, tensor.dtype, tensor.flags


def left_out(root: Mapping[Any, Any]) -> Iterator[str]:
    """What the file will not have, a sentence each."""
    tensors = [value for value in root.values() if isinstance(value, TensorRef)]
    yield from _others(root)
    tags = Counter(tensor.device for tensor in tensors if tensor.device != "cpu")
    if tags:
        yield "device tags: " + listed(
            f"{tag} on {counted(n, 'tensor')}" for tag, n in tags.items()
        )
    for what, count in (
        ("that it is a Parameter", sum(tensor.is_parameter for tensor in tensors)),
        ("requires_grad", sum(tensor.requires_grad for tensor in tensors)),
        ("backward hooks", sum(tensor.hooks is not None for tensor in tensors)),
        ("its class or attributes", sum(map(_has_class, tensors))),
    ):
        if count:
            yield f"{what}, of {counted(count, 'tensor')}"


def _others(root: Mapping[Any, Any]) -> Iterator[str]:
    """The entries of a state dict that are no tensors."""
    groups: dict[str, list[str]] = {"values": [], "objects": [], "containers": []}
    for key, value in root.items():
        if isinstance(value, TensorRef):
            continue
        name = printable(str(key))
        if isinstance(value, Opaque):
            groups["objects"].append(f"{name} ({value.class_name})")
        elif isinstance(value, (dict, list, tuple)):
            groups["containers"].append(f"{name} (0 tensors inside)")
        else:
            groups["values"].append(name)
    for group, names in groups.items():
        if names:
            yield f"{group}: {listed(names)}"


def _has_class(tensor: TensorRef) -> bool:
    return any(layer.state is not None or layer.kind == "type" for layer in tensor.wrapping)


def remarks(tensors: Mapping[str, TensorRef], ties: Mapping[str, str]) -> Iterator[str]:
    """What comes out otherwise than it was, though nothing is lost."""
    if ties:
        pairs = listed(f"{name} = {kept}" for name, kept in ties.items())
        yield f"tied tensors are written once, the other names in {METADATA}: {pairs}"
    scattered = [name for name, tensor in tensors.items() if not tensor.is_contiguous]
    if scattered:
        yield f"made contiguous: {listed(scattered)}"
    arrays = [name for name, tensor in tensors.items() if tensor.kind == "numpy"]
    if arrays:
        yield f"numpy arrays become tensors: {listed(arrays)}"


def overlapping(tensors: Mapping[str, TensorRef]) -> Iterator[str]:
    """The tensors that share bytes, each of which gets its own."""
    shared = overlapping_names(tensors)
    if shared:
        yield f"tensors that share memory get bytes of their own: {listed(shared)}"


def overlapping_names(tensors: Mapping[str, TensorRef]) -> list[str]:
    """The names of the tensors that share bytes with another one."""
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.nbytes:
            groups.setdefault(id(tensor.storage), []).append(name)
    shared: set[str] = set()
    for group in groups.values():
        if len(group) == 1:
            continue
        end, widest = 0, ""
        for start, stop, name in sorted((*_reach(tensors[name]), name) for name in group):
            if start < end:
                shared |= {widest, name}
            if stop > end:
                end, widest = stop, name
    return [name for name in tensors if name in shared]


def _reach(tensor: TensorRef) -> tuple[int, int]:
    """The first element of the storage that it looks at, and the one after the last, in bytes."""
    steps = [
        ((size or 0) - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True)
    ]
    first = tensor.offset + sum(step for step in steps if step < 0)
    last = tensor.offset + sum(step for step in steps if step > 0)
    return first * tensor.itemsize, (last + 1) * tensor.itemsize
