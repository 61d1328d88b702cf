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
        start = -(-header.position // alignment) * alignment  # of the tensor data
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
        _magic, version = self.read_numbers("<4sI")
        if version not in _VERSIONS:
            is_big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            message = "is big-endian" if is_big_endian else f"is of version {version}"
            raise UnsupportedFormat(f"{message}, which is not supported")
        tensor_count, metadata_count = self.read_numbers("<QQ")
        metadata = {}
        for _ in range(metadata_count):
            key = self._read_text()
            (value_type,) = self.read_numbers("<I")
            value = self._read_value(value_type)
            if value is not None:  # not a list, such as a vocabulary
                metadata[key] = value
        return metadata, [self._read_entry() for _ in range(tensor_count)]

    def _read_entry(self) -> _Entry:
        """Return the next tensor of the header, which states the sizes from the last axis on."""
        self.charge(_ENTRY_COST)  # counts toward the limit of values
        name = self._read_text()
        (count,) = self.read_numbers("<I")
        check_limit(f"{printable(name)!r} has", count, "dimensions", self.limits.max_dimensions)
        sizes = self.read_numbers(f"<{count}Q")
        type_number, offset = self.read_numbers("<IQ")
        return _Entry(name, tuple(reversed(sizes)), type_number, offset)

    def _read_value(self, value_type: int, depth: int = 0) -> Any:
        """Return the next value; None for a list, which is skipped with the lists inside it.

        Raises:
            CorruptFile: it has an unknown type, or is a list inside of two others.
            LimitExceeded: the header has too many values.
        """
        self.charge(1)
        if value_type in _SCALAR_LAYOUTS:
            return self.read_numbers(_SCALAR_LAYOUTS[value_type])[0]
        if value_type == _STRING_TYPE:
            return self._read_text()
        if value_type != _ARRAY_TYPE or depth > 1:
            raise CorruptFile(f"an entry has the unknown type {value_type}")
        item_type, count = self.read_numbers("<IQ")
        if item_type in _SCALAR_LAYOUTS:
            self.skip(count * struct.calcsize(_SCALAR_LAYOUTS[item_type]))
        else:
            for _ in range(count):
                self._read_value(item_type, depth + 1)
        return None

    def _read_text(self) -> str:
        """Return the next text, which follows its length."""
        (length,) = self.read_numbers("<Q")
        return self.read_bytes(length).decode("utf-8", "replace")


def _make_tensor(source: Source, data_offset: int, entry: _Entry) -> TensorRef:
    """Return the tensor of an entry; a quantized one becomes float32 when it is read.

    The offsets of entries count from `data_offset`. A quantized row has blocks of several elements.
    """
    elements, plain_dtype = prod(entry.shape), _DTYPE_BY_TYPE.get(entry.type)
    if plain_dtype is not None:
        name, block_elements, block_bytes = plain_dtype, 1, BY_NAME[plain_dtype].itemsize
    elif entry.type in _BLOCKS_BY_TYPE:
        name, block_elements, block_bytes = _BLOCKS_BY_TYPE[entry.type]
    else:
        return _make_unreadable_tensor(source, entry, elements)
    if entry.shape and entry.shape[-1] % block_elements:
        message = (
            f"tensor {printable(entry.name)!r} has rows of {entry.shape[-1]} elements, in blocks "
            f"of {block_elements}"
        )
        raise CorruptFile(message)
    with add_error_context(source.name, f"tensor {printable(entry.name)!r}"):
        n_bytes = elements // block_elements * block_bytes
        stored = ByteRange(source, data_offset + entry.offset, n_bytes)
    if plain_dtype is not None:
        return make_plain_tensor(entry.name, plain_dtype, entry.shape, stored)
    fill = partial(_dequantize_into, stored, name, block_elements, block_bytes)
    dequantized = ComputedSource(source.name, elements * BY_NAME["float32"].itemsize, fill)
    dequantized.made_of = (stored,)
    data = ByteRange(dequantized, 0, dequantized.size)
    return make_plain_tensor(entry.name, "float32", entry.shape, data)


def _make_unreadable_tensor(source: Source, entry: _Entry, elements: int) -> TensorRef:
    """Return a tensor with an unknown layout: it is listed as float32, but reading it fails."""
    message = (
        f"tensor {printable(entry.name)!r} has GGUF type {entry.type}, which ckptool does not know"
    )
    if elements > 8 * source.size:  # no type has less than one bit per weight
        raise CorruptFile(f"{message}, and the file is too small for its shape {list(entry.shape)}")

    def refuse(offset: int, buffer: memoryview) -> None:
        """Raise instead of filling `buffer` with elements, which only happens on reading."""
        raise UnsupportedFormat(message, file=source.name)

    data = ByteRange(ComputedSource(source.name, elements * 4, refuse), 0, elements * 4)
    return make_plain_tensor(entry.name, "float32", entry.shape, data)


def _dequantize_into(
    data: ByteRange,
    name: str,
    block_elements: int,
    block_bytes: int,
    offset: int,
    buffer: memoryview,
) -> None:
    """Fill `buffer` with the float32 values from byte `offset` of the dequantized tensor.

    Only the blocks of `data` with these values are read. `name` is their quantization.
    """
    with require_package("gguf", f"its tensors are quantized ({name})", data.source.name):
        import numpy
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    float32_bytes = 4 * block_elements
    first = offset // float32_bytes
    stop = -(-(offset + len(buffer)) // float32_bytes)  # rounded up
    raw_blocks = data.read(first * block_bytes, (stop - first) * block_bytes)
    blocks = numpy.frombuffer(raw_blocks, numpy.uint8).reshape(-1, block_bytes)
    try:
        values = dequantize(blocks, GGMLQuantizationType[name])
    except (KeyError, NotImplementedError) as error:
        message = f"its tensors are quantized ({name}), which the gguf package cannot read"
        raise UnsupportedFormat(message, file=data.source.name) from error
    content = memoryview(values.astype("<f4").tobytes())
    begin = offset - first * float32_bytes
    buffer[:] = content[begin : begin + len(buffer)]


def _describe_types(entries: list[_Entry]) -> Iterator[str]:
    """Yield sentences on tensors of unknown types, and on quantized ones."""
    quantizations, unknown = Counter[str](), []
    for entry in entries:
        if entry.type in _BLOCKS_BY_TYPE:
            name, _, _ = _BLOCKS_BY_TYPE[entry.type]
            quantizations[name] += 1
        elif entry.type not in _DTYPE_BY_TYPE:
            unknown.append(entry)
    if unknown:
        types = listed(str(number) for number in dict.fromkeys(entry.type for entry in unknown))
        names = listed(printable(entry.name) for entry in unknown)
        yield f"ckptool cannot read {counted(len(unknown), 'tensor')} of GGUF type {types}: {names}"
    if quantizations:
        count = counted(quantizations.total(), "tensor")
        each = listed(f"{name} ({number:,})" for name, number in quantizations.most_common())
        yield f"{count} are quantized ({each}) and converted to float32 when they are read"
