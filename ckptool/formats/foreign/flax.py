"""MessagePack files of Flax: nested dicts of arrays, read as state dicts with dotted keys.

Sources: the MessagePack specification, and flax/serialization.py (`_ndarray_to_bytes`, `_chunk`):
an array is an extension of type 1, and a scalar of type 3, with its shape, dtype name and bytes; an
array of more than 1 GiB is a dict of chunks.
"""

from __future__ import annotations

import re
from typing import Any

from ckptool.core.checkpoint import Checkpoint, Details
from ckptool.core.model import OrderedMap, TensorRef, find_tensors, make_plain_tensor
from ckptool.core.modules import has_tensors
from ckptool.core.sections import MODEL_MARK
from ckptool.dtypes import BY_NAME
from ckptool.errors import CheckpointError, CorruptFile, LimitExceeded, UnsupportedFormat
from ckptool.files import ByteRange, Source
from ckptool.files.computed import join_ranges
from ckptool.formats.base import Format, Probe, Refusal, check_limit
from ckptool.formats.foreign.cursor import Cursor
from ckptool.limits import Limits
from ckptool.quotes import quote
from ckptool.words import few, printable

_MAP_OF_NAMES = re.compile(
    rb"(?:[\x81-\x8f]|\xde..|\xdf....)(?:[\xa1-\xbf]|\xd9.)[\w./-]", re.DOTALL
)
_CHUNKED_MARK = "__msgpack_chunked_array__"
_OPTIMIZER_KEY = "opt_state"
"""The key of a TrainState next to the variables of the model."""
_MODEL_KEYS, _MODEL_SECTION = ("params", "batch_stats"), "state_dict"
_ARRAY_EXTENSIONS, _COMPLEX_EXTENSION = (1, 3), 2
_VALUE_COST = 5
"""The cost of a value relative to an entry of a zip directory."""
_NUMBER_LAYOUTS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h",
    0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_CONSTANT_VALUES = {0xC0: None, 0xC2: False, 0xC3: True}
_SIZED_KINDS = {
    0xD9: ("text", ">B"), 0xDA: ("text", ">H"), 0xDB: ("text", ">I"), 0xC4: ("bytes", ">B"),
    0xC5: ("bytes", ">H"), 0xC6: ("bytes", ">I"), 0xDC: ("list", ">H"), 0xDD: ("list", ">I"),
    0xDE: ("map", ">H"), 0xDF: ("map", ">I"), 0xC7: ("extension", ">B"), 0xC8: ("extension", ">H"),
    0xC9: ("extension", ">I"),
}  # fmt: skip


class Flax(Format):
    """The format `flax`: read only."""

    name = "flax"
    layout = "Flax"
    refusal = Refusal(
        "flax",
        "it is a MessagePack file of Flax (flax_model.msgpack)",
        quote("weights-only"),
        "flax.serialization.msgpack_restore",
    )

    def recognize(self, probe: Probe) -> bool:
        """Return whether the file begins with a map whose first key is text."""
        return _MAP_OF_NAMES.match(probe.head) is not None

    def read(self, probe: Probe) -> Checkpoint:
        """Return one state dict with dotted keys; for a TrainState also its other entries.

        The variables of a TrainState become the section `state_dict`, marked as the model.
        """
        source = probe.require_source()
        reader = _Reader(source, probe.limits)
        tree = reader.read_value(0)
        if reader.position != source.size:
            trailing = source.size - reader.position
            raise CorruptFile(f"has {trailing:,} bytes after its end")
        if not isinstance(tree, dict):
            raise CorruptFile("does not contain a dict of arrays")
        root: dict[Any, Any] = _flatten_names(tree, probe.limits)
        if not reader.unknown and not has_tensors(tree):  # unknown: arrays that torch lacks
            keys = f"has the keys {few(list(map(str, tree)))}" if tree else "is empty"
            message = f"a MessagePack file without an array: it {keys}"
            text = f"{probe.path} is {message}"
            hint = "read it with msgpack.unpackb, or give the checkpoint itself"
            raise UnsupportedFormat(text, file=probe.path, hint=hint)
        if _OPTIMIZER_KEY in tree:
            root = _split_train_state(tree, probe.limits)
        details = Details(
            size=source.size,
            writer="Flax",
            storage_bytes=sum(node.nbytes for node in find_tensors([root])),
            left_behind=tuple(reader.unknown),
        )
        return Checkpoint(root, self.name, probe.path, details, sources=(source,))


FLAX = Flax()


def _split_train_state(tree: dict[str, Any], limits: Limits) -> dict[Any, Any]:
    """Return the entries of a TrainState, each dict flattened; `tree` is changed.

    The variables of the model become the entry `state_dict`, if there is none, and it is marked as
    the model.
    """
    if _MODEL_SECTION not in tree:
        tree[_MODEL_SECTION] = {key: tree.pop(key) for key in _MODEL_KEYS if key in tree}
    root = {
        key: _flatten_names(node, limits) if isinstance(node, dict) else node
        for key, node in tree.items()
    }
    if isinstance(root[_MODEL_SECTION], OrderedMap):
        root[_MODEL_SECTION].attributes[MODEL_MARK] = {}
    return root


def _flatten_names(tree: dict[str, Any], limits: Limits) -> OrderedMap:
    """Return the arrays and other values of nested dicts under dotted keys."""
    flat, bytes_left = OrderedMap(), limits.max_header_bytes

    def walk(node: Any, name: str) -> None:
        """Add the values below a node under keys that begin with `name`, the key of the node."""
        nonlocal bytes_left
        bytes_left -= len(name)
        if bytes_left < 0:
            raise LimitExceeded("the names of its arrays need too much memory")
        if isinstance(node, dict):
            for key, child in node.items():
                walk(child, f"{name}.{key}" if name else key)
        elif name in flat:
            raise CorruptFile(f"two arrays have the name {printable(name)!r}")
        else:
            flat[name] = node

    walk(tree, "")
    return flat


class _Reader(Cursor):
    """Reads the values of a file in order, without the bytes of arrays."""

    def __init__(self, source: Source, limits: Limits) -> None:
        """Start at the first byte of `source`."""
        super().__init__(source, limits, is_header=False)
        self.unknown: list[str] = []
        """Notes on arrays with dtypes that torch does not have."""

    def read_value(self, depth: int) -> Any:
        """Return the next value: dicts for maps and lists, a TensorRef for an array.

        The first byte is the value itself (a small number), its kind and length, or only its kind
        (https://github.com/msgpack/msgpack/blob/master/spec.md).
        """
        self.charge(_VALUE_COST)
        check_limit("values are nested", depth, "deep", self.limits.max_depth)
        code = self.read_bytes(1)[0]
        if code in _CONSTANT_VALUES:
            return _CONSTANT_VALUES[code]
        if code <= 0x7F:  # 0 to 127
            return code
        if code >= 0xE0:  # -32 to -1
            return code - 256
        if code in _NUMBER_LAYOUTS:
            return self.read_numbers(_NUMBER_LAYOUTS[code])[0]
        if code <= 0x8F:  # short kinds: the low bits are the length
            return self._read_sized("map", code & 0x0F, depth)
        if code <= 0x9F:
            return self._read_sized("list", code & 0x0F, depth)
        if code <= 0xBF:
            return self._read_sized("text", code & 0x1F, depth)
        if 0xD4 <= code <= 0xD8:  # extensions of 1, 2, 4, 8 or 16 bytes
            return self._read_extension(1 << (code - 0xD4), depth)
        if code not in _SIZED_KINDS:
            raise self._damaged_error(f"byte {code:#x} does not begin a value")
        kind, length_layout = _SIZED_KINDS[code]
        (length,) = self.read_numbers(length_layout)
        return self._read_sized(kind, length, depth)

    def _read_sized(self, kind: str, length: int, depth: int) -> Any:
        """Return the text, bytes, list, map or extension of the stated length.

        A list becomes a dict with its positions as text keys. A map with chunks of an array becomes
        one array.
        """
        if kind in ("text", "bytes"):
            raw = self.read_bytes(length)
            return raw.decode("utf-8", "replace") if kind == "text" else raw
        if kind == "extension":
            return self._read_extension(length, depth)
        if kind == "list":
            return {str(number): self.read_value(depth + 1) for number in range(length)}
        entries: dict[str, Any] = {}
        for _ in range(length):
            key = self.read_value(depth + 1)
            if isinstance(key, (dict, TensorRef)) or str(key) in entries:
                raise self._damaged_error("a key is not text, or occurs twice")
            entries[str(key)] = self.read_value(depth + 1)
        return self._join_chunks(entries) if entries.get(_CHUNKED_MARK) is True else entries

    def _read_extension(self, length: int, depth: int) -> Any:
        """Return the array or complex number of an extension; of an unknown one, a text."""
        code = self.read_bytes(1)[0]
        end = self.position + length
        if code not in (*_ARRAY_EXTENSIONS, _COMPLEX_EXTENSION):
            self.skip(length)
            return f"extension {code}"
        if code == _COMPLEX_EXTENSION:
            parts = self.read_value(depth + 1)  # a list, which is read as a dict
            pair = tuple(parts.values()) if isinstance(parts, dict) else ()
            if len(pair) != 2 or not all(isinstance(part, (int, float)) for part in pair):
                raise self._damaged_error("a complex number does not have two numbers")
            value: Any = complex(*pair)
        else:
            value = self._read_array(depth)
        if self.position != end:
            raise self._damaged_error("an array does not have its stated length")
        return value

    def _read_array(self, depth: int) -> Any:
        """Return the array of an extension: its shape, dtype and bytes.

        With a dtype that torch does not have, return a note, which is also added to `unknown`.
        """
        if self.read_bytes(1) != b"\x93":  # a list of three
            raise self._damaged_error("an array does not consist of a shape, a type and bytes")
        shape = self._check_shape(self.read_value(depth + 1))
        dtype = self.read_value(depth + 1)
        kind, length_format = _SIZED_KINDS.get(self.read_bytes(1)[0], ("", ""))
        if kind != "bytes":
            raise self._damaged_error("an array has no bytes")
        (length,) = self.read_numbers(length_format)
        begin = self.skip(length)
        if dtype not in BY_NAME:
            note = f"array of type {printable(str(dtype))} is not a tensor"
            self.unknown.append(note)
            return note
        data = ByteRange(self.source, begin, length)
        return make_plain_tensor(str(begin), dtype, shape, data)  # the offset is the storage's key

    def _join_chunks(self, entry: dict[str, Any]) -> TensorRef:
        """Return the array for a dict of its shape and its chunks, which follow each other."""
        chunk_by_position = entry.get("chunks")
        chunks = list(chunk_by_position.values()) if isinstance(chunk_by_position, dict) else []
        if not chunks or not all(isinstance(chunk, TensorRef) for chunk in chunks):
            raise self._damaged_error("a chunked array has no chunks")
        if len({chunk.dtype for chunk in chunks}) > 1:
            raise self._damaged_error("a chunked array has chunks of different dtypes")
        data = join_ranges([chunk.data for chunk in chunks])
        shape = self._check_shape(entry.get("shape"))
        return make_plain_tensor(str(self.position), chunks[0].dtype, shape, data)

    def _check_shape(self, sizes: Any) -> tuple[int, ...]:
        """Return the shape in a list of sizes, which `read_value` returns as a dict."""
        shape = tuple(sizes.values()) if isinstance(sizes, dict) else None
        if shape is None or not all(type(size) is int and size >= 0 for size in shape):
            raise self._damaged_error("an array has no shape")
        check_limit("an array has", len(shape), "dimensions", self.limits.max_dimensions)
        return shape

    def _damaged_error(self, fact: str) -> CheckpointError:
        """Return the error for an invalid value, which ends at the current position."""
        return CorruptFile(f"{fact}, at {self.position:,}")
