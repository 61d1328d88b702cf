"""GGUF files of llama.cpp: plain tensors as stored, quantized ones dequantized to float32.

Source: ggml/docs/gguf.md and gguf-py/gguf/constants.py (types and the sizes of their blocks).
Version 1 (with shorter counts) and big-endian files are rejected.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from functools import partial
from math import prod
from typing import Any, NamedTuple

from ckptool.core.checkpoint import Checkpoint, Details
from ckptool.core.model import OrderedMap, TensorRef, make_plain_tensor
from ckptool.dtypes import BY_NAME
from ckptool.errors import CorruptFile, UnsupportedFormat
from ckptool.files import ByteRange, Source
from ckptool.files.computed import ComputedSource
from ckptool.formats.base import (
    Format,
    Probe,
    Refusal,
    add_error_context,
    check_limit,
    require_package,
)
from ckptool.formats.foreign.cursor import Cursor
from ckptool.quotes import quote
from ckptool.words import counted, listed, printable

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT_KEY = "general.alignment"
_ENTRY_COST = 10
"""The cost of a tensor relative to a metadata entry."""
_SCALAR_LAYOUTS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING_TYPE, _ARRAY_TYPE = 8, 9
_DTYPE_BY_TYPE = {
    0: "float32",
    1: "float16",
    24: "int8",
    25: "int16",
    26: "int32",
    27: "int64",
    28: "float64",
    30: "bfloat16",
}
_BLOCKS_BY_TYPE = {
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip
"""By number: the name, the elements of a block, and its bytes."""


class _Entry(NamedTuple):
    """A tensor in the header: its type by number, and its offset in the tensor data."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


class Gguf(Format):
    """The format `gguf`: read only."""

    name = "gguf"
    flat = True
    refusal = Refusal(
        "gguf",
        "it is a GGUF model (llama.cpp), not a torch.save file",
        quote("weights-only"),
        "llama.cpp",
        "read it with llama.cpp or the gguf package",
    )

    def recognize(self, probe: Probe) -> bool:
        """Return whether the file begins with the magic number."""
        return probe.head.startswith(_MAGIC)

    def read(self, probe: Probe) -> Checkpoint:
        """Return the tensors by name, from the header only, with shapes in torch's order."""
        source = probe.require_source()
        header = _Header(source, probe.limits, is_header=True)
        metadata, entries = header.read()
        alignment = metadata.get(_ALIGNMENT_KEY, 32)
        if type(alignment) is not int or alignment < 1:
            raise CorruptFile(f"the alignment is {printable(repr(alignment))}")
        start = -(-header.position // alignment) * alignment
        root = OrderedMap()
        for entry in entries:
            if entry.name in root:
                raise CorruptFile(f"tensor {printable(entry.name)!r} occurs twice")
            root[entry.name] = _make_tensor(source, start, entry)
        texts = {key: str(value) for key, value in metadata.items() if key.startswith("general.")}
        return Checkpoint(
            root,
            self.name,
            probe.path,
            Details(
                size=source.size,
                storage_bytes=source.size - min(start, source.size),
                notes=tuple(_describe_types(entries)),
                header=texts,
            ),
            sources=(source,),
        )


GGUF = Gguf()


class _Header(Cursor):
    """Reads the header in order."""

    def read(self) -> tuple[dict[str, Any], list[_Entry]]:
        """Return the metadata by key, without lists, and the tensors."""
        version = self.read_numbers("<4sI")[1]
        if version not in _VERSIONS:
            is_big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            message = "is big-endian" if is_big_endian else f"is of version {version}"
            raise UnsupportedFormat(f"{message}, which is not supported")
        tensors, pairs = self.read_numbers("<QQ")
        metadata = {}
        for _ in range(pairs):
            key = self._read_text()
            value = self._read_value(*self.read_numbers("<I"))
            if value is not None:
                metadata[key] = value
        return metadata, [self._read_entry() for _ in range(tensors)]

    def _read_entry(self) -> _Entry:
        """Return the next tensor of the header."""
        self.charge(_ENTRY_COST)
        name = self._read_text()
        (count,) = self.read_numbers("<I")
        check_limit(f"{printable(name)!r} has", count, "dimensions", self.limits.max_dimensions)
        sizes = self.read_numbers(f"<{count}Q")
        return _Entry(name, tuple(reversed(sizes)), *self.read_numbers("<IQ"))

    def _read_value(self, type: int, depth: int = 0) -> Any:
        """Return a value of this type; None for a list, which is skipped, with lists inside it."""
        self.charge(1)
        if type in _SCALAR_LAYOUTS:
            return self.read_numbers(_SCALAR_LAYOUTS[type])[0]
        if type == _STRING_TYPE:
            return self._read_text()
        if type != _ARRAY_TYPE or depth > 1:
            raise CorruptFile(f"an entry has the unknown type {type}")
        inner, count = self.read_numbers("<IQ")
        if inner in _SCALAR_LAYOUTS:
            self.skip(count * struct.calcsize(_SCALAR_LAYOUTS[inner]))
        else:
            for _ in range(count):
                self._read_value(inner, depth + 1)
        return None

    def _read_text(self) -> str:
        """Return the next text, which follows its length."""
        (length,) = self.read_numbers("<Q")
        return self.read_bytes(length).decode("utf-8", "replace")


def _make_tensor(source: Source, start: int, entry: _Entry) -> TensorRef:
    """Return the tensor of an entry; a quantized one becomes float32 when it is read.

    `start` is the offset of the tensor data. A quantized row has blocks of several elements.
    """
    elements, plain_dtype = prod(entry.shape), _DTYPE_BY_TYPE.get(entry.type)
    if plain_dtype is None and entry.type not in _BLOCKS_BY_TYPE:
        return _make_unreadable_tensor(source, entry, elements)
    name, block, size = _BLOCKS_BY_TYPE.get(entry.type) or (
        plain_dtype, 1, BY_NAME[str(plain_dtype)].itemsize,
    )  # fmt: skip
    if entry.shape[-1:] and entry.shape[-1] % block:
        message = (
            f"tensor {printable(entry.name)!r} has rows of {entry.shape[-1]} elements, in blocks "
            f"of {block}"
        )
        raise CorruptFile(message)
    with add_error_context(source.name, f"tensor {printable(entry.name)!r}"):
        data = ByteRange(source, start + entry.offset, elements // block * size)
    if plain_dtype is None:
        fill = partial(_dequantize_into, data, str(name), block, size)
        dequantized = ComputedSource(source.name, elements * 4, fill)
        dequantized.made_of = (data,)
        data = ByteRange(dequantized, 0, dequantized.size)
    return make_plain_tensor(entry.name, plain_dtype or "float32", entry.shape, data)


def _make_unreadable_tensor(source: Source, entry: _Entry, elements: int) -> TensorRef:
    """Return a tensor with an unknown layout: it is listed, but reading it fails."""
    message = (
        f"tensor {printable(entry.name)!r} has GGUF type {entry.type}, which ckptool does not know"
    )
    if elements > 8 * source.size:  # no type has less than one bit per weight
        raise CorruptFile(f"{message}, and the file is too small for its shape {list(entry.shape)}")

    def refuse(offset: int, buffer: memoryview) -> None:
        raise UnsupportedFormat(message, file=source.name)

    data = ByteRange(ComputedSource(source.name, elements * 4, refuse), 0, elements * 4)
    return make_plain_tensor(entry.name, "float32", entry.shape, data)


def _dequantize_into(
    data: ByteRange, name: str, block: int, size: int, offset: int, buffer: memoryview
) -> None:
    """Fill `buffer` with float32 values from byte `offset`, reading the blocks that it needs.

    `data` has blocks of `size` bytes for `block` elements each, of the quantization `name`.
    """
    with require_package("gguf", f"its tensors are quantized ({name})", data.source.name):
        import numpy
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    first, last = offset // (4 * block), -(-(offset + len(buffer)) // (4 * block))
    raw = numpy.frombuffer(data.read(first * size, (last - first) * size), numpy.uint8)
    try:
        values = dequantize(raw.reshape(-1, size), GGMLQuantizationType[name])
    except (KeyError, NotImplementedError) as error:
        message = f"its tensors are quantized ({name}), which the gguf package cannot read"
        raise UnsupportedFormat(message, file=data.source.name) from error
    content = memoryview(values.astype("<f4").tobytes())
    begin = offset - first * 4 * block
    buffer[:] = content[begin : begin + len(buffer)]


def _describe_types(entries: list[_Entry]) -> Iterator[str]:
    """Yield sentences on tensors of unknown types, and on quantized ones."""
    types = Counter(
        _BLOCKS_BY_TYPE[entry.type][0] for entry in entries if entry.type in _BLOCKS_BY_TYPE
    )
    unknown = [entry for entry in entries if entry.type not in {*_BLOCKS_BY_TYPE, *_DTYPE_BY_TYPE}]
    if unknown:
        kinds = listed(str(number) for number in dict.fromkeys(entry.type for entry in unknown))
        names = listed(printable(entry.name) for entry in unknown)
        yield f"ckptool cannot read {counted(len(unknown), 'tensor')} of GGUF type {kinds}: {names}"
    if not types:
        return
    count = counted(sum(types.values()), "tensor")
    each = listed(f"{name} ({number:,})" for name, number in types.most_common())
    yield f"{count} are quantized ({each}) and converted to float32 when they are read"
