"""The safetensors format, read, written and edited in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ckptool.core.checkpoint import Checkpoint, Details
from ckptool.core.model import (
    SPARSE_KINDS,
    Opaque,
    Storage,
    TensorRef,
    find_tensors,
    row_major_strides,
)
from ckptool.core.modules import find_tensor_attributes, has_tensors
from ckptool.core.quantizers import class_scheme, find_quantized
from ckptool.core.sections import list_wrappable_keys
from ckptool.dtypes import BY_NAME, BY_SAFETENSORS
from ckptool.errors import CorruptFile, NotRepresentable
from ckptool.files import ByteRange, Source
from ckptool.files.source import WORTH_SHARING, Shared, join_neighbors
from ckptool.formats.base import EditableFormat, NewFile, Probe, WritePlan
from ckptool.formats.registry import JSON_SPACE
from ckptool.formats.safetensors_header import (
    FORMAT,
    LENGTH,
    METADATA,
    RESERVED,
    Header,
    HeaderEntry,
    check_tiling,
    encode_header,
    encode_header_json,
    extract_json_versions,
    is_unicode,
    make_metadata,
    read_header,
    restore_state_dict,
)
from ckptool.words import counted, listed, printable

if TYPE_CHECKING:
    from ckptool.files.atomic import FileOutput

_REMEDY_BY_KIND = {
    **dict.fromkeys(SPARSE_KINDS, "call .to_dense() before saving in torch"),
    "quantized": "add --dequantize float32, or call .dequantize() before saving in torch",
    "nested": "pad it with torch.nested.to_padded_tensor(tensor, 0.0) before saving in torch",
    "subclass": "add --dequantize float32 for torchao tensors, or call .dequantize() before "
    "saving in "
    "torch",
}
"""Hints for kinds of tensors that have no plain bytes."""
_CALL_FULL_TENSOR = "call .full_tensor() before saving in torch"


def _check_flat_tensors(root: Any, file: str) -> dict[str, TensorRef]:
    """Return the tensors of a state dict by key, checked for safetensors.

    Raises:
        NotRepresentable: the root is not a state dict, or a tensor or its key cannot be stored.
    """
    items = list(root.items()) if isinstance(root, dict) else []
    tensors = [(key, value) for key, value in items if isinstance(value, TensorRef)]
    if not tensors and (items or not isinstance(root, dict)):
        raise NotRepresentable(
            "safetensors needs one flat state dict, and this is not one",
            file=file,
            hint="choose a state dict with --key NAME; ckptool info lists them",
        )
    for key, tensor in tensors:
        problem = _describe_key_problem(key) or _describe_tensor_problem(tensor)
        if problem is not None:
            remedy = _CALL_FULL_TENSOR if tensor.is_spread else _REMEDY_BY_KIND.get(tensor.kind)
            raise NotRepresentable(
                f"tensor '{printable(str(key))}' {problem}, which safetensors cannot store",
                file=file,
                hint=None if tensor.has_content else remedy,  # with content, the key is the problem
            )
    _check_containers(root, file)
    return dict(tensors)


def _check_containers(root: Any, file: str) -> None:
    """Refuse values with tensors inside: packed parameters, objects, attributes of tensors.

    Raises:
        NotRepresentable: if there are any. The message lists their keys, and the quantizer if
            known; the hint excludes them with `--exclude` and globs.
    """
    containers: dict[str, Any] = {}
    for key, value in root.items():
        content = dict(find_tensor_attributes(value)) if isinstance(value, TensorRef) else value
        if has_tensors(content):
            containers[str(key)] = content
    if not containers:
        return
    quantized = find_quantized(containers)
    model_keys = frozenset(list_wrappable_keys(root))
    descriptions, globs = [], dict[str, None]()
    for key, content in containers.items():
        count = counted(sum(1 for _ in find_tensors(content)), "tensor")
        if key in quantized:
            descriptions.append(f"{key} ({quantized[key].scheme}: {count} inside)")
            glob = f"*{key.rpartition('.')[2]}"  # all quantized layers have this last component
        else:
            descriptions.append(f"{key} ({count} inside)")
            glob = key if key in model_keys else f"{key}/*"  # a value is excluded by its content
        globs[glob] = None
    raise NotRepresentable(
        f"safetensors stores only tensors, not objects with tensors inside: {listed(descriptions)}",
        file=file,
        hint="write a .pth file, or leave them out: "
        + " ".join(f"--exclude '{printable(glob)}'" for glob in globs),
    )


def _describe_key_problem(key: Any) -> str | None:
    """Return a clause on a key that safetensors cannot store, else None."""
    if not isinstance(key, str):
        return f"has a key of type {type(key).__name__}"
    if key == METADATA:
        return "has the key of the header's own entry"
    return None if is_unicode(key) else "has a key that is not valid Unicode"


def _describe_tensor_problem(tensor: TensorRef) -> str | None:
    """Return a clause on a tensor that safetensors cannot store, else None."""
    if tensor.kind == "meta" or tensor.device == "meta":
        return "is on the meta device and has no data"
    if not tensor.has_content:
        if tensor.is_spread:
            return "is a distributed tensor, with only a part of it in this file"
        if tensor.kind == "subclass":
            scheme = class_scheme(tensor)
            scheme_note = f" ({scheme})" if scheme else ""
            return f"is of the class {printable(tensor.class_name)}{scheme_note}"
        return f"is a {tensor.kind} tensor"
    if BY_NAME[tensor.dtype].safetensors is None:
        return f"has the dtype {tensor.dtype}"
    if tensor.dtype == "float4_e2m1fn_x2" and not tensor.shape:
        return "is a pair of float4 without a dimension"
    return None


def _find_ties(tensors: Mapping[str, TensorRef], metadata_keys: Container[str]) -> dict[str, str]:
    """Return each key that shares its tensor with an earlier key, with that key.

    `__metadata__` stores a tie under the tied key. A key that `metadata_keys` already uses there
    keeps a tensor of its own.
    """
    first_key_by_place: dict[Any, str] = {}
    ties: dict[str, str] = {}
    for key, tensor in tensors.items():
        first_key = first_key_by_place.setdefault(tensor.place, key)
        if first_key != key and key not in metadata_keys:
            ties[key] = first_key
    return ties


def describe_losses(root: Mapping[Any, Any]) -> Iterator[str]:
    """Yield a phrase for each property that a safetensors file does not keep."""
    tensors = [value for value in root.values() if isinstance(value, TensorRef)]
    others = {key: value for key, value in root.items() if not isinstance(value, TensorRef)}
    if others:
        labels = (
            f"{key} ({value.class_name})" if isinstance(value, Opaque) else str(key)
            for key, value in others.items()
        )
        yield f"{listed(labels)} ({'value' if len(others) == 1 else 'values'})"
    # A plain Parameter is wrapped in a layer without state. A class of its own is a layer of kind
    # "type"; attributes are the state of a layer.
    customized_count = sum(
        any(layer.state is not None or layer.kind == "type" for layer in tensor.wrapping)
        for tensor in tensors
    )
    device_counts = Counter(tensor.device for tensor in tensors if tensor.device != "cpu")
    if device_counts:
        shown = listed(f"{tag} on {counted(n, 'tensor')}" for tag, n in device_counts.items())
        yield f"saved devices ({shown})"
    for property_, count in (
        ("the Parameter type", sum(tensor.is_parameter for tensor in tensors)),
        ("requires_grad", sum(tensor.requires_grad for tensor in tensors)),
        ("backward hooks", sum(tensor.hooks is not None for tensor in tensors)),
        ("the class or attributes", customized_count),
    ):
        if count:
            yield f"{property_} of {counted(count, 'tensor')}"


def describe_changes(tensors: Mapping[str, TensorRef], ties: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each change of the tensors that loses nothing."""
    if ties:
        pairs = listed(f"{name} = {kept}" for name, kept in ties.items())
        yield f"wrote tied tensors once; {METADATA} lists the other keys: {pairs}"
    strided = [name for name, tensor in tensors.items() if not tensor.is_contiguous]
    if strided:
        yield f"made {counted(len(strided), 'tensor')} contiguous: {listed(strided)}"
    arrays = [name for name, tensor in tensors.items() if tensor.kind == "numpy"]
    if arrays:
        yield f"converted numpy arrays to tensors: {listed(arrays)}"


def describe_overlaps(tensors: Mapping[str, TensorRef]) -> Iterator[str]:
    """Yield a sentence on tensors with shared bytes, which get their own."""
    shared = find_overlapping_keys(tensors)
    if shared:
        yield f"gave tensors with shared memory their own bytes: {listed(shared)}"


def find_overlapping_keys(tensors: Mapping[str, TensorRef]) -> list[str]:
    """Return the keys of the tensors that share bytes with another one, in their order."""
    keys_by_storage: dict[int, list[str]] = {}
    for key, tensor in tensors.items():
        if tensor.nbytes:
            keys_by_storage.setdefault(id(tensor.storage), []).append(key)
    overlapping: set[str] = set()
    for keys in keys_by_storage.values():
        if len(keys) == 1:
            continue
        # By start: a tensor overlaps an earlier one if it begins before the furthest end so far.
        furthest_stop, furthest_key = 0, ""
        for start, stop, key in sorted((*tensors[key].reach, key) for key in keys):
            if start < furthest_stop:
                overlapping |= {furthest_key, key}
            if stop > furthest_stop:
                furthest_stop, furthest_key = stop, key
    return [key for key in tensors if key in overlapping]


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a file that will be written."""

    tensors: Mapping[str, TensorRef]
    """All tensors by key, in the order of the state dict."""
    ties: Mapping[str, str]
    """Each key without an entry of its own, with the key that has the entry."""
    metadata: Mapping[str, str]
    """The header's `__metadata__`."""
    left_out: tuple[str, ...]
    """What the file will not have, one phrase each."""

    @property
    def written(self) -> dict[str, TensorRef]:
        """The tensors with an entry of their own."""
        return {name: ref for name, ref in self.tensors.items() if name not in self.ties}


def plan_content(checkpoint: Checkpoint, other_entries: Mapping[str, str]) -> Content:
    """Return the content of a file: tensors, ties, `__metadata__`, and phrases on omissions.

    `other_entries` are the entries of `__metadata__` that do not describe ties or `_metadata`.

    Raises:
        NotRepresentable: safetensors cannot store a tensor, or the root is not a state dict.
    """
    tensors = _check_flat_tensors(checkpoint.root, checkpoint.path)
    ties = _find_ties(tensors, RESERVED | other_entries.keys())
    versions, lost_names = extract_json_versions(getattr(checkpoint.root, "attributes", {}))
    lost_attributes = (f"attributes: {listed(lost_names)}",) if lost_names else ()
    return Content(
        tensors,
        ties,
        {**other_entries, **make_metadata(ties, tensors, versions, other_entries)},
        (*describe_losses(checkpoint.root), *lost_attributes),
    )


def _lay_out_entries(tensors: Mapping[str, TensorRef]) -> dict[str, HeaderEntry]:
    """Return the entry of each tensor by key, in the order of the bytes.

    The largest elements come first, so that every tensor is aligned; the order is kept otherwise.
    """

    def compute_alignment(name: str) -> int:
        """Return the largest power of two that divides the element size, which may be 3."""
        itemsize = tensors[name].itemsize
        return itemsize & -itemsize  # its lowest bit

    entries: dict[str, HeaderEntry] = {}
    end = 0
    for name in sorted(tensors, key=compute_alignment, reverse=True):
        entries[name] = _make_entry(name, tensors[name], end)
        end = entries[name].stop
    return entries


def _make_entry(name: str, tensor: TensorRef, start: int) -> HeaderEntry:
    """Return the header entry of a tensor with its bytes at `start`."""
    code = BY_NAME[tensor.dtype].safetensors or ""
    return HeaderEntry(name, code, _to_header_shape(tensor), start, start + tensor.nbytes)


def _to_header_shape(tensor: TensorRef) -> tuple[int, ...]:
    """Return the shape in the header, where an element of `float4_e2m1fn_x2` is two of F4."""
    shape = tensor.sizes
    if tensor.dtype == "float4_e2m1fn_x2":
        return (*shape[:-1], 2 * shape[-1]) if shape else (2,)
    return shape


def _plan_pieces(tensors: Iterable[TensorRef]) -> Iterator[ByteRange | TensorRef]:
    """Yield ranges to copy, with neighbors joined, and tensors to stream, in order.

    A tensor is streamed if its elements are not in this form in the file; empty ones are left out.
    """
    filled = (tensor for tensor in tensors if tensor.nbytes)
    for is_verbatim, group in groupby(filled, key=attrgetter("is_verbatim")):
        if is_verbatim:
            yield from join_neighbors(tensor.data for tensor in group)
        else:
            yield from group


def _find_shared_piece(
    pieces: Sequence[ByteRange | TensorRef], nbytes: int, sources: Sequence[Source]
) -> Shared | None:
    """Return the first piece, if it is most of `nbytes` and copied from one of `sources`.

    Its blocks can be shared with the source on file systems that support it. None for a piece of
    less than `WORTH_SHARING` bytes.
    """
    first = pieces[0] if pieces else None
    if not isinstance(first, ByteRange) or not any(first.source is source for source in sources):
        return None
    is_most = first.length >= WORTH_SHARING and 2 * first.length > nbytes
    return Shared(first.length, first) if is_most else None


_LIKELY_HEADER = 1 << 40
"""An upper bound for header lengths; eight letters of a text are a much larger number."""


class Safetensors(EditableFormat):
    """The format `safetensors`."""

    name = "safetensors"
    flat = True
    tensors_only = True
    can_salvage = True
    header_key = "format"

    def recognize(self, probe: Probe) -> bool:
        """Return whether the file begins with a plausible length and a JSON object."""
        head = probe.head
        if len(head) <= LENGTH.size or LENGTH.unpack_from(head)[0] >= _LIKELY_HEADER:
            return False
        text = head[LENGTH.size :].lstrip(JSON_SPACE)
        if not text.startswith(b"{"):
            return False
        return text[1:].lstrip(JSON_SPACE)[:1] in (b'"', b"}", b"")  # a key, the end, no more bytes

    def read(self, probe: Probe) -> Checkpoint:
        """Return the state dict with its tied keys and `_metadata`."""
        source = probe.require_source()
        header = read_header(source, probe.limits, salvages=probe.salvages is not None)
        tensors = {entry.name: _make_tensor(entry, header) for entry in header.entries}
        root, other_entries = restore_state_dict(tensors, header.metadata)
        return Checkpoint(
            root,
            self.name,
            probe.path,
            Details(
                size=source.size,
                writer="safetensors",
                storage_bytes=header.body.length,
                notes=_describe_header(other_entries),
                header=other_entries,
                left_behind=_describe_unused_bytes(header, source),
            ),
            sources=(source,),
        )

    def plan(self, checkpoint: Checkpoint) -> WritePlan:
        """Plan the file for a checkpoint with one flat state dict as its root.

        The tensors are in the order of decreasing alignment; the header keeps the order of keys. If
        most bytes come from one file, the header is padded so that the tensors begin at the same
        offset within a block as there, and the file system can share the blocks.
        """
        content = plan_content(checkpoint, {FORMAT: "pt", **checkpoint.details.header})
        written = content.written
        entries = _lay_out_entries(written)
        pieces = list(_plan_pieces(written[name] for name in entries))
        nbytes = sum(tensor.nbytes for tensor in written.values())
        shared = _find_shared_piece(pieces, nbytes, checkpoint.sources)
        head = encode_header(
            (entries[name] for name in written),
            content.metadata,
            file=checkpoint.path,
            congruent=shared.run.offset if shared else None,
        )

        def write(output: FileOutput) -> None:
            """Write the header, then each piece: a range of a file, or a tensor to be computed."""
            output.write(head)
            for piece in pieces:
                if isinstance(piece, ByteRange):
                    output.copy(piece)
                else:
                    output.write_blocks(piece.content())

        return WritePlan(
            self.name,
            (NewFile(len(head) + nbytes, write, checkpoint, shared=shared),),
            left_out=content.left_out,
            notes=(*describe_changes(content.tensors, content.ties), *describe_overlaps(written)),
            tensors=len(content.tensors),
        )

    def plan_edit(self, checkpoint: Checkpoint) -> WritePlan | None:
        """Plan a header that makes the file equal to `checkpoint`; None if that needs a new file.

        It needs one if the header becomes longer or cannot express a change, or if the tensors are
        not exactly the ranges after the header. Other entries of the header stay; spaces fill the
        rest of the old length.
        """
        from ckptool.files.editing import Patch  # not needed to list tensors

        if checkpoint.format != "safetensors" or len(checkpoint.sources) != 1:
            return None
        content = plan_content(checkpoint, checkpoint.details.header)
        if content.left_out:
            return None
        source = checkpoint.sources[0]
        (old_length,) = LENGTH.unpack(source.read(0, LENGTH.size))
        body_offset = LENGTH.size + old_length
        entries = []
        for key, tensor in content.written.items():
            if not tensor.is_verbatim or tensor.data.source is not source:
                return None
            entries.append(_make_entry(key, tensor, tensor.data.offset - body_offset))
        try:
            check_tiling(entries, source.size - body_offset)
        except CorruptFile:
            return None
        text = encode_header_json(entries, content.metadata)
        if len(text) > old_length:
            return None
        return WritePlan(
            self.name,
            patch=Patch(0, LENGTH.pack(old_length) + text.ljust(old_length)),
            kept=source.size,
            notes=tuple(describe_changes(content.tensors, content.ties)),
            tensors=len(content.tensors),
        )


SAFETENSORS = Safetensors()


def _make_tensor(entry: HeaderEntry, header: Header) -> TensorRef:
    """Return the tensor of a header entry, without data if its bytes are truncated."""
    dtype = BY_SAFETENSORS[entry.code]
    nbytes = entry.stop - entry.start
    is_complete = entry.stop <= header.body.length  # otherwise the file is being salvaged
    data = header.body.slice(entry.start, nbytes) if is_complete else None
    shape = _to_torch_shape(entry)
    storage = Storage(entry.name, data, nbytes)
    return TensorRef(dtype.name, shape, row_major_strides(shape), 0, storage, "cpu")


def _to_torch_shape(entry: HeaderEntry) -> tuple[int, ...]:
    """Return the shape in torch, where two elements of F4 are one of `float4_e2m1fn_x2`."""
    if entry.code != "F4":
        return entry.shape
    if not entry.shape or entry.shape[-1] % 2:
        raise CorruptFile(
            f"tensor '{printable(entry.name)}' of F4 and shape {list(entry.shape)} splits a "
            "byte: its last dimension is odd"
        )
    return (*entry.shape[:-1], entry.shape[-1] // 2)


def _describe_unused_bytes(header: Header, source: Source) -> tuple[str, ...]:
    """Return a phrase on the bytes of a salvaged file that belong to no tensor.

    These are gaps between tensors, and what precedes the last copy of a restarted download.
    """
    (header_length,) = LENGTH.unpack(source.read(0, LENGTH.size))
    # The first copy and the last one have the same header.
    last_copy_offset = header.body.offset - (LENGTH.size + header_length)
    spans = [(0, last_copy_offset)] if last_copy_offset else []
    spans += [
        (header.body.offset + start, header.body.offset + stop) for start, stop in header.unused
    ]
    if not spans:
        return ()
    total = sum(stop - start for start, stop in spans)
    where = listed(f"{start:,} to {stop:,}" for start, stop in spans)
    return (f"{total:,} bytes that belong to no tensor (offsets {where})",)


def _describe_header(other_entries: dict[str, Any]) -> tuple[str, ...]:
    """Return a note with the other entries of the header, if there are any."""
    facts = [f"{key}={value}" for key, value in other_entries.items() if key != FORMAT]
    return (f"header: {listed(facts)}",) if facts else ()
