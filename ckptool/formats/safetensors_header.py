"""Parse, check and write the header of a safetensors file, and its metadata."""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

from ckptool.core.model import OrderedMap, TensorRef
from ckptool.dtypes import BY_SAFETENSORS
from ckptool.errors import CorruptFile, NotRepresentable, TruncatedFile
from ckptool.files import ByteRange, Source
from ckptool.files.source import SHARED
from ckptool.formats.base import check_limit
from ckptool.formats.transfers import find_last_copy, salvage_command, text_transfer_error
from ckptool.limits import Limits
from ckptool.words import printable

METADATA = "__metadata__"
LENGTH = struct.Struct("<Q")
MAX_BYTES = 100_000_000
"""The limit of the reference reader (`MAX_HEADER_SIZE`)."""
_BITS_BY_CODE = {
    **{code: 8 * dtype.itemsize for code, dtype in BY_SAFETENSORS.items()},
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}
"""Bits per element of the shape in the header."""
_MAX_UINT64 = (1 << 64) - 1
_LONG_NUMBER = re.compile(r"[0-9]{21}")


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of the header; `start` and `stop` count from the first byte after the header."""

    name: str
    code: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """A valid header: the tensors cover the rest of the file exactly."""

    entries: tuple[HeaderEntry, ...]
    """In the order of the header."""
    metadata: Mapping[str, str]
    body: ByteRange
    """The bytes of the tensors."""
    unused: tuple[tuple[int, int], ...] = ()
    """The ranges without tensors in the body of a file that is being salvaged."""


def read_header(source: Source, limits: Limits, *, salvages: bool = False) -> Header:
    """Return the checked header of a file; with `salvages`, tensors may be truncated.

    With `salvages`, bytes may also belong to no tensor, and the last copy of a restarted download
    is read.

    Raises:
        TruncatedFile: the header or a tensor reaches past the end.
        LimitExceeded: the header or a shape is longer than `limits` allows.
        CorruptFile: another rule of the format is broken.
    """
    (length,) = LENGTH.unpack(source.read(0, LENGTH.size))
    check_limit("the header has", length, "bytes", limits.max_header_bytes)
    begin = LENGTH.size + length
    if begin > source.size:
        raise TruncatedFile(
            f"the header has {length:,} bytes, but the file ends {begin - source.size:,} "
            "bytes before its end",
            hint="download or copy the file again: it was truncated",
        )
    raw = source.read(LENGTH.size, length)
    if salvages:
        if fault := text_transfer_error(source):  # its tensors have moved, and are not intact
            raise fault
        begin += find_last_copy(source, LENGTH.pack(length) + raw)
    return _parse_header(
        raw, ByteRange(source, begin, source.size - begin), limits, salvages=salvages
    )


def _parse_header(raw: bytes, body: ByteRange, limits: Limits, *, salvages: bool) -> Header:
    """Return the checked header in `raw`, over the tensor data in `body`.

    The tensors must cover `body` exactly; with `salvages`, they only must not overlap.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptFile(
            f"the header is not UTF-8 at byte {LENGTH.size + error.start:,}"
        ) from error
    document = parse_json(text)
    if not isinstance(document, dict):
        raise CorruptFile("the header is not a JSON object")
    raw_metadata = document.pop(METADATA, None)
    metadata = {} if raw_metadata is None else require_string_map(raw_metadata, METADATA)
    if "\\u" in text:  # only an escape can be an invalid character: the text itself is UTF-8
        _check_text(document, metadata)
    entries = tuple(_parse_entry(name, fields, limits) for name, fields in document.items())
    if salvages:
        return Header(entries, metadata, body, tuple(_find_unused(entries, body.length)))
    try:
        check_tiling(entries, body.length)
    except CorruptFile as error:
        with suppress(CorruptFile):  # overlapping tensors: no advice, they cannot be salvaged
            tuple(_find_unused(entries, body.length))
            error.advise(f"download the file again, or run {salvage_command(body.source.name)}")
        raise
    return Header(entries, metadata, body)


def _find_unused(entries: Iterable[HeaderEntry], length: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of the ranges that belong to no tensor, in a body of `length` bytes.

    Raises:
        CorruptFile: two tensors overlap.
    """
    end, previous = 0, None
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        if entry.start < end:
            raise _tensor_error(
                entry.name, f"begins at {entry.start:,}, but {_describe(previous)} ends at {end:,}"
            )
        gap_end = min(entry.start, length)  # a tensor may begin after the end of a truncated body
        if end < gap_end:
            yield end, gap_end
        end, previous = entry.stop, entry
    if end < length:
        yield end, length


def parse_json(text: str, subject: str = "the header") -> Any:
    """Parse a JSON document, without Python's extensions and repeated keys.

    Raises:
        CorruptFile: it is invalid; `subject` is its name in the message.
    """
    # Python rejects numbers of more than 4,300 digits with its own message. Our parser of integers
    # is slower, so it is only used for such a text.
    parse_int = _parse_integer if _LONG_NUMBER.search(text) else None
    try:
        return json.loads(
            text,
            object_pairs_hook=_reject_duplicates,
            parse_constant=_reject_constant,
            parse_int=parse_int,
        )
    except RecursionError as error:
        raise CorruptFile(f"{subject} is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise CorruptFile(f"{subject} is not JSON ({error})") from error
    except CorruptFile as error:
        raise CorruptFile(f"{subject} {error.message}") from error


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict; refuse a repeated key."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        repeated, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise CorruptFile(f"has the key '{printable(repeated)}' twice")
    return fields


def _reject_constant(word: str) -> NoReturn:
    """Refuse `NaN` and `Infinity`, which Python accepts."""
    raise CorruptFile(f"is not JSON (it contains {word})")


def _parse_integer(digits: str) -> int:
    """Return an integer; refuse more digits than any size has (20, those of 2**64)."""
    if len(digits) > len(str(_MAX_UINT64)):
        raise CorruptFile(f"has a number of {len(digits):,} digits")
    return int(digits)


def _check_text(document: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Refuse escapes of single surrogates, which other readers reject."""
    for text in (*document, *metadata, *metadata.values()):
        if not is_unicode(text):
            raise CorruptFile(f"the header contains {text!a}, which is not valid Unicode")


def is_unicode(text: str) -> bool:
    """Return whether a text has no single surrogates, which JSON allows but UTF-8 does not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def require_string_map(fields: Any, subject: str) -> dict[str, str]:
    """Return a JSON object, checked to have only strings.

    Raises:
        CorruptFile: it is invalid; `subject` is its name in the message.
    """
    if not isinstance(fields, dict) or not all(isinstance(value, str) for value in fields.values()):
        raise CorruptFile(f"{subject} is not an object of strings")
    return fields


def _parse_entry(name: str, fields: Any, limits: Limits) -> HeaderEntry:
    """Return the checked entry of one tensor."""
    match fields:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [start, stop]}:
            pass
        case _:
            raise _tensor_error(name, "does not have a dtype, a shape and two data_offsets")
    bits = _BITS_BY_CODE.get(code)
    if bits is None:
        raise _tensor_error(name, f"has the unknown dtype '{printable(code)}'")
    subject = f"tensor '{printable(name)}' has"
    check_limit(subject, len(shape), "dimensions", limits.max_dimensions)
    for size in (*shape, start, stop):
        if type(size) is not int or not 0 <= size <= _MAX_UINT64:
            raise _tensor_error(name, f"has {size!r}, expected a count")
    count = _count_elements(name, shape)
    if (count * bits) % 8:
        raise _tensor_error(
            name, f"has {count:,} elements of {bits} bits, which is not a whole number of bytes"
        )
    if stop - start != count * bits // 8:
        raise _tensor_error(
            name,
            f"of {code} and shape {shape} needs {count * bits // 8:,} bytes, but its "
            f"data_offsets span {stop - start:,}",
        )
    return HeaderEntry(name, code, tuple(shape), start, stop)


def _count_elements(name: str, shape: Iterable[int]) -> int:
    """Count the elements of a shape, size by size.

    As in the reference reader, the sizes before a 0 may be too large.
    """
    count = 1
    for size in shape:
        count *= size
        if count > _MAX_UINT64:
            raise _tensor_error(name, "has more than 2**64 elements")
    return count


def _tensor_error(name: str, fact: str) -> CorruptFile:
    return CorruptFile(f"tensor '{printable(name)}' {fact}")


def check_tiling(entries: Iterable[HeaderEntry], length: int) -> None:
    """Refuse tensors that do not cover each of the `length` bytes after the header exactly once.

    Raises:
        CorruptFile: two overlap, or bytes belong to none; `TruncatedFile`: the file ends too early.
    """
    end, previous = 0, None
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        if entry.start != end:
            raise _tensor_error(
                entry.name, f"begins at {entry.start:,}, but {_describe(previous)} ends at {end:,}"
            )
        end, previous = entry.stop, entry
    if end > length:
        raise TruncatedFile(
            f"{_describe(previous)} ends at {end:,}, but the file has {length:,} bytes after its "
            f"header: {end - length:,} bytes are missing"
        )
    if end < length:
        raise CorruptFile(f"{length - end:,} bytes after {_describe(previous)} belong to no tensor")


def _describe(entry: HeaderEntry | None) -> str:
    """Return a noun phrase for a tensor; None means the header, which precedes the first one."""
    return f"tensor '{printable(entry.name)}'" if entry else "the header"


def encode_header(
    entries: Iterable[HeaderEntry],
    metadata: Mapping[str, str],
    *,
    file: str,
    congruent: int | None = None,
) -> bytes:
    """Return length and JSON, padded with spaces so that the tensors begin at a multiple of 8.

    If `congruent` is a multiple of 8, they begin at an offset congruent to it modulo `SHARED`, so
    that the file system can share their blocks with a file that has them at `congruent`.

    Raises:
        NotRepresentable: it is longer than readers accept.
    """
    text = encode_header_json(entries, metadata)
    text += b" " * (-len(text) % LENGTH.size)
    if congruent is not None and congruent % LENGTH.size == 0:
        text += b" " * ((congruent - LENGTH.size - len(text)) % SHARED)
    if len(text) > MAX_BYTES:
        raise NotRepresentable(
            f"the header would have {len(text):,} bytes, more than the {MAX_BYTES:,} that "
            "safetensors allows",
            file=file,
        )
    return LENGTH.pack(len(text)) + text


def encode_header_json(entries: Iterable[HeaderEntry], metadata: Mapping[str, str]) -> bytes:
    """Return the JSON of a header, without the length before it and the padding after it."""
    document: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    for entry in entries:
        document[entry.name] = {
            "dtype": entry.code,
            "shape": entry.shape,
            "data_offsets": (entry.start, entry.stop),
        }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


FORMAT = "format"
STATE_METADATA = "_metadata"
"""The entry with the `_metadata` of the state dict, as JSON."""
TIED_POSITIONS = "ckptool.tied"
"""The entry with the position of each tied key in the state dict, as JSON."""
RESERVED = frozenset({FORMAT, STATE_METADATA, TIED_POSITIONS})
"""Keys that are never tied names."""


def restore_state_dict(
    tensors: Mapping[str, TensorRef],
    metadata: Mapping[str, str],
    outer_ties: Mapping[str, str] = MappingProxyType({}),
) -> tuple[OrderedMap, dict[str, str]]:
    """Return the state dict with its ties and `_metadata`, and the other entries of the header.

    An entry `tied: stored` of `metadata` (two keys) is a tie if `ckptool.tied` lists it, or if the
    header has no such list, as from other libraries. `outer_ties` are ties from elsewhere, for
    example from the index of shards.
    """
    tied_positions = _parse_object(metadata.get(TIED_POSITIONS))
    possible_ties = {
        tied: stored
        for tied, stored in metadata.items()
        if tied_positions is None or tied in tied_positions
    }
    ties = _find_ties(tensors, {**outer_ties, **possible_ties})
    order = _order_keys(list(tensors), list(ties), tied_positions or {})
    root = OrderedMap((name, tensors[ties.get(name, name)]) for name in order)
    other_entries = {
        key: text for key, text in metadata.items() if key not in ties and key != TIED_POSITIONS
    }
    versions = _parse_versions(metadata.get(STATE_METADATA))
    if versions is not None:
        root.attributes["_metadata"] = versions
        del other_entries[STATE_METADATA]
    return root, other_entries


def _find_ties(tensors: Collection[str], entries: Mapping[str, str]) -> dict[str, str]:
    """Return the entries that seem to tie a key without a tensor to one of the `tensors`."""
    return {
        tied: stored
        for tied, stored in entries.items()
        if tied not in RESERVED and tied not in tensors and stored in tensors
    }


def _order_keys(
    stored_keys: list[str], tied_keys: list[str], tied_positions: Mapping[str, Any]
) -> list[str]:
    """Return all keys, tied ones at their stated position, or at the end without a valid one."""
    total = len(stored_keys) + len(tied_keys)
    tied_key_by_position: dict[int, str] = {}
    for key in tied_keys:
        position = tied_positions.get(key)
        if type(position) is int and 0 <= position < total:
            tied_key_by_position.setdefault(position, key)
    placed = set(tied_key_by_position.values())
    other_keys = iter([*stored_keys, *(key for key in tied_keys if key not in placed)])
    return [
        tied_key_by_position[position] if position in tied_key_by_position else next(other_keys)
        for position in range(total)
    ]


def _parse_versions(text: str | None) -> OrderedMap | None:
    """Return the `_metadata` of a state dict (module path -> dict); None if it is not that."""
    versions = _parse_object(text)
    if versions is None or not all(isinstance(value, dict) for value in versions.values()):
        return None
    return OrderedMap(versions)


def _parse_object(text: str | None) -> dict[str, Any] | None:
    """Return the JSON object in an entry of the header; None for any other text.

    Anyone can write these entries, so that an invalid one is no error.
    """
    try:
        document = parse_json(text or "null")
    except CorruptFile:
        return None
    return document if isinstance(document, dict) else None


def make_metadata(
    ties: Mapping[str, str],
    names: Collection[str],
    versions: Any,
    other_entries: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Return the entries for the ties (`tied: stored`) of a state dict, and for its `_metadata`.

    `names` are all its tensors in order; `versions` comes from `extract_json_versions`. A reader
    takes an entry with two keys (`a: b`) for a tie, unless a list of ties lacks it. So the list is
    written, even if it is empty, if one of `other_entries` only looks like a tie.
    """
    entries = {STATE_METADATA: _encode_json(versions)} if versions else {}
    apparent_ties = _find_ties(set(names) - ties.keys(), other_entries)
    if ties or apparent_ties:
        tied_positions = {name: position for position, name in enumerate(names) if name in ties}
        entries |= {**ties, TIED_POSITIONS: _encode_json(tied_positions)}
    return entries


def _encode_json(value: Any) -> str:
    """Return compact JSON, in which only control characters and quotes are escaped."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def extract_json_versions(attributes: Mapping[Any, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the part of a state dict's `_metadata` that fits JSON, and the names of all else.

    `attributes` are those of the `OrderedDict`, where torch puts `_metadata` (module path -> dict).
    The names are those of other attributes, and `_metadata of 'PATH'`.
    """
    versions = attributes.get("_metadata")
    lost_names = [str(name) for name in attributes if name != "_metadata"]
    if versions is None:
        return {}, lost_names
    if not isinstance(versions, dict):
        return {}, [*lost_names, "_metadata"]
    kept = {
        module_path: version
        for module_path, version in versions.items()
        if isinstance(module_path, str) and isinstance(version, dict) and _is_plain(version)
    }
    lost_names.extend(f"_metadata of {path!r}" for path in versions if path not in kept)
    return kept, lost_names


def _is_plain(node: Any) -> bool:
    """Return whether a value survives JSON unchanged."""
    if isinstance(node, dict):
        return all(isinstance(key, str) and _is_plain(value) for key, value in node.items())
    if isinstance(node, list):
        return all(map(_is_plain, node))
    if isinstance(node, float):
        return math.isfinite(node)
    return node is None or isinstance(node, (bool, int, str))
