"""Read a model in several files with an index as one checkpoint."""

from __future__ import annotations

import errno
import ntpath
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import Any

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import OrderedMap, TensorRef, find_tensors
from ckptool.errors import CheckpointError, CorruptFile, FileBusy, FileMissing, UnsupportedFormat
from ckptool.files import FileSource, Source
from ckptool.files.journal import is_path_of
from ckptool.files.place import place_of
from ckptool.files.system import allow_open_files
from ckptool.files.temporary import has_journal, parse_journal_name
from ckptool.formats import identify
from ckptool.formats.base import (
    Format,
    Probe,
    Refusal,
    add_error_context,
    check_limit,
    combine_details,
)
from ckptool.formats.identify import Identification
from ckptool.formats.registry import JSON_SPACE, find_candidate_formats
from ckptool.formats.safetensors_header import (
    STATE_METADATA,
    TIED_POSITIONS,
    parse_json,
    require_string_map,
    restore_state_dict,
)
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.quotes import quote
from ckptool.words import are, counted, few, listed, printable, quoted, shell

_WEIGHT_MAP = "weight_map"
_QUOTED_WEIGHT_MAP = f'"{_WEIGHT_MAP}"'.encode()
_INDEX_NAME = re.compile(r".+\.index(\.[^.]+)?\.json", re.IGNORECASE)
"""Names of indexes: `model.safetensors.index.json`, `model.safetensors.index.fp16.json`."""
_INDEX_EXTENSION = re.compile(r"\.index(\.[^.]+)?\.json$", re.IGNORECASE)
NUMBERED = re.compile(r"(.*)-(\d{5,})-of-(\d{5,})(.*)")
"""The name of a shard: stem, number, count, extension."""


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """A valid index, not yet compared with its shards."""

    source: Source
    weight_map: Mapping[str, str]
    """File name by tensor, in the order of the index."""
    metadata: Mapping[str, Any]
    """`total_size` and free entries."""

    @property
    def path(self) -> str:
        """The index itself."""
        return self.source.name

    shards: tuple[str, ...]
    """The file names, each once, in the order of their first tensors."""

    def path_of(self, name: str) -> str:
        """Return the path of a file in the folder of the index."""
        return os.path.join(os.path.dirname(self.path), name)

    def find_unlisted_files(self) -> Iterator[str]:
        """Yield the names of the files next to the index that are of its set and not listed.

        A set is the files whose names differ only in the shard number.
        """
        listed_sets = {_parse_set(name) for name in self.shards} - {None}
        if not listed_sets:
            return
        listed_names, existing = set(self.shards), []
        with suppress(OSError):  # a folder that can be read but not listed
            existing = sorted(place_of(self.path).list_names(os.path.dirname(self.path)))
        for name in existing:
            if _parse_set(name) in listed_sets and name not in listed_names:
                yield name


def _parse_set(name: str) -> tuple[str, ...] | None:
    """Return stem, count and extension of a numbered shard, which its whole set has in common."""
    match = NUMBERED.fullmatch(name)
    return match.group(1, 3, 4) if match else None


def open_index(probe: Probe) -> ShardIndex | None:
    """Return the index in a file, or the only one in a folder; None for anything else.

    An index is recognized by its content, an object with a `weight_map`; in a folder, only files
    with the name of an index are checked.

    Raises:
        NotACheckpoint: the folder has several.
        CorruptFile: it is not JSON, has a name twice, or a shard that is not a plain file name.
        LimitExceeded: it is longer than `limits.max_json_bytes`.
    """
    if probe.source is not None:
        with add_error_context(probe.source.name):
            return _read_index(probe.source, probe.limits)
    with ExitStack() as opened:
        indexes: list[ShardIndex] = []
        # An index whose write was interrupted is only there as its journal.
        names = {parse_journal_name(name) or name for name in probe.entries}
        for name in sorted(filter(_INDEX_NAME.fullmatch, names)):
            path = os.path.join(probe.path, name)
            if not probe.place.is_file(path) and not has_journal(path):
                continue
            index_probe = Probe(path, probe.limits)
            opened.callback(index_probe.close)
            index = index_probe.compute_once(open_index)
            if index is not None:
                indexes.append(index)
        _refuse_several(probe, indexes)
        if not indexes:
            return None
        probe.on_close(opened.pop_all().close)  # the index stays open as long as `probe`
        return indexes[0]


def read_shard_names(path: str) -> tuple[str, ...]:
    """Return the files that an index lists before it is replaced; none if it is not an index."""
    with suppress(CheckpointError), closing(FileSource(path)) as source:
        index = _read_index(source, DEFAULT_LIMITS)
        return index.shards if index else ()
    return ()


def _refuse_several(probe: Probe, indexes: list[ShardIndex]) -> None:
    """Raise an error if the folder has several indexes, or a single file next to its shards.

    For example `model.safetensors` next to `model.safetensors.index.json`, or next to
    `model-00001-of-00002.safetensors` and its other shards.
    """
    checkpoint_names = []
    for name in (os.path.basename(index.path) for index in indexes):
        single_file = _INDEX_EXTENSION.sub("", name)
        checkpoint_names += [single_file, name] if single_file in probe.entries else [name]
    for single_file, first_shard in _find_complete_sets(probe.entries):  # with or without an index
        if single_file in probe.entries and single_file not in checkpoint_names:
            checkpoint_names += [single_file, first_shard]
    if len(checkpoint_names) > 1:
        description = f"a folder with several checkpoints: {few(checkpoint_names)}"
        hint = f"give one: ckptool list {shell(os.path.join(probe.path, checkpoint_names[0]))}"
        raise Identification(description, hint).to_error(probe.path)


def _find_complete_sets(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the name of the whole model and the first shard, for each set without a gap."""
    shards: dict[tuple[str, str, str], dict[int, str]] = {}
    for name in names:
        if match := NUMBERED.fullmatch(name):
            stem, number, count, extension = match.groups()
            shards.setdefault((stem, count, extension), {})[int(number)] = name
    for (stem, count, extension), numbered in sorted(shards.items()):
        if int(count) == len(numbered) and min(numbered) >= 1 and max(numbered) == len(numbered):
            yield f"{stem}{extension}", numbered[1]


def _read_index(source: Source, limits: Limits) -> ShardIndex | None:
    """Return the index in a file, which is a JSON object; None if the file is not an index.

    A file with another name than an index needs a `weight_map`: near its start if it is longer than
    `limits.max_json_bytes`, so that a long JSON file of another kind is not read.

    Raises:
        LimitExceeded: it is too long, or lists too many files on another machine.
    """
    head = source.read(0, min(512, source.size))
    if not head.lstrip(JSON_SPACE).startswith(b"{"):
        return None
    has_index_name = _INDEX_NAME.fullmatch(os.path.basename(source.name)) is not None
    may_be_index = has_index_name or _QUOTED_WEIGHT_MAP in head
    if source.size > limits.max_json_bytes and not may_be_index:
        return None
    check_limit("the index has", source.size, "bytes", limits.max_json_bytes)
    raw = source.read(0, source.size)
    if not has_index_name and _QUOTED_WEIGHT_MAP not in raw:
        return None
    index = _parse_index(raw, source)
    if source.is_far and index:
        subject = "the index is on another machine and has"
        check_limit(subject, len(index.shards), "files", limits.max_far_shards)
    return index


def _parse_index(raw: bytes, source: Source) -> ShardIndex | None:
    """Return the index in JSON text; None without a `weight_map`."""
    try:
        document = parse_json(raw.decode("utf-8"), "the index")
    except UnicodeDecodeError as error:
        raise CorruptFile(f"the index is not UTF-8 at byte {error.start:,}") from error
    if _WEIGHT_MAP not in document:
        return None
    weight_map = require_string_map(document[_WEIGHT_MAP], f"the index's {_WEIGHT_MAP}")
    shards = tuple(dict.fromkeys(weight_map.values()))  # each once, in the order of the index
    for name in shards:
        if not _is_plain_name(name):
            raise CorruptFile(
                f"the index has the shard {quoted(name)}, which is not a file name in its folder"
            )
    metadata = document.get("metadata")
    return ShardIndex(source, weight_map, metadata if isinstance(metadata, dict) else {}, shards)


def _is_plain_name(name: str) -> bool:
    """Return whether a name can only be a file in the folder of the index, on any system.

    On Windows a drive without a slash, as in `C:name`, would lead elsewhere.
    """
    if name in ("", ".", "..") or any(mark in name for mark in "/\\\0"):
        return False
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return not ntpath.splitdrive(name)[0]


def _join_shards(index: ShardIndex, shards: Mapping[str, Checkpoint]) -> OrderedMap:
    """Return the state dict of all shards (by file name), in the order of the index.

    A file of the set that the index does not list is an error. Ties within a shard are kept. Tied
    keys that safetensors cannot store are restored from the headers of the shards, or from the
    index, where huggingface_hub writes them. `_metadata` is merged from all shards.
    """
    for name in index.find_unlisted_files():
        raise CorruptFile(
            f"the index does not list {name!r}, which is next to it and belongs to the same set",
            hint=f"check it with ckptool list {index.path_of(name)}, and move it away if it does "
            "not belong",
        )
    _check_roots(index, {file: shards[file].root for file in index.shards})
    file_by_key, stored_key_by_tied_key = _map_keys(shards)
    _check_key_shards(index, shards, file_by_key)
    entries = {name: shards[file].root[name] for name, file in index.weight_map.items()}
    for name, file in file_by_key.items():  # values that the index does not list
        entries.setdefault(name, shards[file].root[name])
    tie_entries: dict[str, str] = {}  # of the index: they may list ties, as a header does
    if all(shard.format == "safetensors" for shard in shards.values()):
        tie_entries = {
            key: text
            for key, text in index.metadata.items()
            if isinstance(text, str) and key != STATE_METADATA
        }
    # A key that is tied in one shard may have a tensor of its own in another, which is used.
    shard_ties = {
        tied: stored for tied, stored in stored_key_by_tied_key.items() if tied not in file_by_key
    }
    root, _other_entries = restore_state_dict(entries, tie_entries, shard_ties)
    root.attributes = _merge_attributes(shards.values())
    return root


def _check_roots(index: ShardIndex, root_by_file: Mapping[str, Any]) -> None:
    """Refuse a shard that has none of the tensors that the index lists for it."""
    matched_files = {
        file
        for key, file in index.weight_map.items()
        if isinstance(root_by_file[file], dict) and key in root_by_file[file]
    }
    for file, root in root_by_file.items():
        if file in matched_files:
            continue
        if isinstance(root, dict):
            content = few(list(map(str, root)))
        else:
            content = f"a {type(root).__name__}"
        raise CorruptFile(
            f"the shard {file!r} has none of the tensors that the index lists for it, "
            f"but {content}",
            hint="each shard must be a part of one flat state dict: ckptool info "
            f"{index.path_of(file)}",
        )


def _map_keys(shards: Mapping[str, Checkpoint]) -> tuple[dict[Any, str], dict[str, str]]:
    """Return the file name of each stored key, and the stored key of each tied key.

    Only safetensors has tied keys that are not stored: its storages have the key that is.
    """
    file_by_key: dict[Any, str] = {}
    stored_key_by_tied_key: dict[str, str] = {}
    for file, shard in shards.items():
        for name, node in shard.root.items():
            stored_key = node.storage.key if shard.format == "safetensors" else name
            if stored_key != name:
                stored_key_by_tied_key[name] = stored_key
            elif file_by_key.setdefault(name, file) != file:
                raise CorruptFile(
                    f"tensor '{printable(str(name))}' is in two shards, "
                    f"{file_by_key[name]!r} and {file!r}",
                    hint="the shards are from different checkpoints, or from different saves; "
                    "copy those of one save",
                )
    return file_by_key, stored_key_by_tied_key


def _check_key_shards(
    index: ShardIndex, shards: Mapping[str, Checkpoint], file_by_key: Mapping[Any, str]
) -> None:
    """Refuse a tensor that is not in the shard that the index lists.

    A tied key that is not stored only needs an entry in its shard, and the index need not list
    values that are no tensors.
    """
    for name in dict.fromkeys((*index.weight_map, *file_by_key)):
        stated, actual = index.weight_map.get(name), file_by_key.get(name)
        if stated == actual:
            continue
        if actual is None and stated is not None and name in shards[stated].root:
            continue  # a tied key
        if stated is None and actual and not isinstance(shards[actual].root[name], TensorRef):
            continue  # a value
        raise CorruptFile(
            f"tensor {quoted(str(name))} is in {actual or 'no shard'}, but the index lists "
            f"it in {stated or 'none'}",
            hint="index and shards are from different saves; copy or download them again together",
        )


def _merge_attributes(shards: Iterable[Checkpoint]) -> dict[Any, Any]:
    """Return the attributes of all shards' roots, such as `_metadata`.

    Dicts are merged. Of different values for one key, the value of the first shard is used.
    """
    all_attributes: dict[Any, Any] = {}
    for shard in shards:
        if not isinstance(shard.root, OrderedMap):
            continue
        for key, value in shard.root.attributes.items():
            earlier = all_attributes.setdefault(key, value)
            if earlier is not value and isinstance(earlier, dict) and isinstance(value, dict):
                merged = type(earlier)(earlier)  # a copy: `earlier` belongs to a shard
                merged.update((name, value[name]) for name in value if name not in earlier)
                all_attributes[key] = merged
    return all_attributes


_DERIVED_ENTRIES = frozenset({"total_size", "total_parameters", TIED_POSITIONS})
"""Entries of an index that follow from the tensors."""


def make_checkpoint(
    index: ShardIndex, shards: Mapping[str, Checkpoint], format: str, path: str
) -> Checkpoint:
    """Return the checkpoint of all shards, given by file name, with their details merged.

    Phrases that do not apply to all shards name their files. Entries of the index and of the
    headers that are not kept are listed in `left_behind`.

    Raises:
        CorruptFile: a key is in two shards, in no shard, in another shard than the index lists, or
            not in the index; or the index does not list a file of the set.
    """
    with add_error_context(index.path):
        root = _join_shards(index, shards)
    shard_details = [shard.details for shard in shards.values()]
    header, differing_keys = _merge_headers(details.header for details in shard_details)
    writers = ", ".join(dict.fromkeys(filter(None, (details.writer for details in shard_details))))
    count = f"in {counted(len(shard_details), 'shard')}"
    byteorders = {details.byteorder for details in shard_details}
    protocols = {details.protocol for details in shard_details}
    # A tied key may be only in the metadata of the index; `root` has its tensor.
    index_only_keys = [
        key for key in index.metadata if key not in _DERIVED_ENTRIES and key not in root
    ]
    details_by_file = {file: shard.details for file, shard in shards.items()}
    return combine_details(
        list(shards.values()),
        Checkpoint(root, format, path),
        writer=f"{writers}, {count}" if writers else count,
        folder="",  # each shard has its own
        # An index without shards has no byte order: "little" is the default of `Details`.
        byteorder=byteorders.pop() if len(byteorders) == 1 else "mixed" if byteorders else "little",
        protocol=protocols.pop() if len(protocols) == 1 else None,
        notes=(
            *(() if index.weight_map else ("the index lists no tensors",)),
            *check_total_size(index, root),
            *_merge_phrases({file: each.notes for file, each in details_by_file.items()}),
        ),
        left_behind=(
            *_phrase_entries("the header that differ between the shards", differing_keys),
            *_phrase_entries("the index", index_only_keys),
            *_merge_phrases({file: each.left_behind for file, each in details_by_file.items()}),
        ),
        unreferenced=tuple(
            _merge_phrases({file: each.unreferenced for file, each in details_by_file.items()})
        ),
        header=header,
    )


def _phrase_entries(owner: str, keys: Sequence[str]) -> Iterator[str]:
    """Yield a phrase that lists entries of the header or index, if there are any."""
    if keys:
        yield f"entries of {owner}: {listed(keys)}"


def _merge_headers(headers: Iterable[Mapping[str, str]]) -> tuple[dict[str, str], list[str]]:
    """Return the entries that agree in all shards, and the names of those that differ."""
    merged: dict[str, str] = {}
    conflicting: dict[str, None] = {}
    for header in headers:
        for key, text in header.items():
            if merged.setdefault(key, text) != text:
                conflicting[key] = None
    return {key: text for key, text in merged.items() if key not in conflicting}, list(conflicting)


def _merge_phrases(phrases_by_file: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Yield each phrase once, after the names of its shards unless it applies to all."""
    files_by_phrase: dict[str, list[str]] = {}
    for file, phrases in phrases_by_file.items():
        for phrase in phrases:
            files_by_phrase.setdefault(phrase, []).append(file)
    for phrase, files in files_by_phrase.items():
        yield phrase if len(files) == len(phrases_by_file) else f"{listed(files, 3)}: {phrase}"


def check_total_size(index: ShardIndex, root: OrderedMap) -> Iterator[str]:
    """Yield a note if the `total_size` of the index, if any, is a wrong number of bytes.

    Libraries write one of three: that of all keys, that with tied tensors counted once, or that of
    the storages.
    """
    stated = index.metadata.get("total_size")
    tensors = [value for value in root.values() if isinstance(value, TensorRef)]
    distinct_tensors = {tensor.place or id(tensor): tensor for tensor in tensors}
    storages = {id(tensor.storage): tensor.storage for tensor in find_tensors(root)}
    all_bytes = sum(tensor.nbytes for tensor in tensors)
    distinct_bytes = sum(tensor.nbytes for tensor in distinct_tensors.values())
    storage_bytes = sum(storage.nbytes for storage in storages.values() if storage is not None)
    if stated not in (None, all_bytes, distinct_bytes, storage_bytes):
        number = f"{stated:,}" if isinstance(stated, (int, float)) else quoted(str(stated))
        yield f"the index states {number} bytes of tensors, but they have {distinct_bytes:,}"


class Sharded(Format):
    """The formats `safetensors-sharded` and `torch-sharded`, which differ in their shards."""

    flat = True
    refusal = Refusal(
        "shards",
        "it is an index of shards: the tensors are in several files",
        quote("operand", ord("{"), call="torch.load of the index"),
        "from_pretrained of transformers or diffusers",
    )

    def __init__(self, name: str, shard_formats: tuple[str, ...], shard_ending: str) -> None:
        """Represent shards that each have one of `shard_formats`; new ones get `shard_ending`.

        Only shards written by torch have objects (not only tensors) and a CRC-32 of each storage.
        """
        self.name = name
        self.shard_formats = shard_formats
        self.shard_ending = shard_ending
        self.by_torch = "torch-zip" in shard_formats
        self.hands_on_crc = self.by_torch
        self.tensors_only = not self.by_torch

    def recognize(self, probe: Probe) -> bool:
        """Return True for an index of shards of these formats, or a folder with such an index.

        The first shard decides, or the name of an index without shards.

        Raises:
            UnsupportedFormat: the first shard has a format that cannot be a shard.
        """
        index = probe.compute_once(open_index)
        if index is None:
            return False
        if not index.shards:  # both formats are asked: the name decides which one it is
            is_safetensors = ".safetensors." in os.path.basename(index.path).lower()
            return is_safetensors == ("safetensors" in self.shard_formats)
        shard, shard_format = _open_shard(index, index.shards[0], probe.limits)
        shard.close()
        supported = (*SAFETENSORS_SHARDED.shard_formats, *TORCH_SHARDED.shard_formats)
        if shard_format.name not in supported:
            raise _wrong_kind_error(shard.path, shard_format, supported)
        return shard_format.name in self.shard_formats

    def read(self, probe: Probe) -> Checkpoint:
        """Return one state dict of all shards, in the order of the index; only headers are read.

        The shards stay open. An index that changes before all are open is refused.
        """
        index = probe.compute_once(open_index)
        if index is None:
            raise CorruptFile("this is not an index of shards")
        allow_open_files(len(index.shards))
        # Far files are requested ahead, several at a time.
        place_of(index.path).expect([index.path_of(name) for name in index.shards])
        with ExitStack() as on_error:
            shards: dict[str, Checkpoint] = {}
            for name in index.shards:
                shards[name] = self._read_shard(index, name, probe.limits)
                on_error.callback(shards[name].close)
            _check_index_unchanged(index)
            checkpoint = make_checkpoint(index, shards, self.name, index.path)
            on_error.pop_all()
        details = replace(checkpoint.details, size=checkpoint.details.size + index.source.size)
        return replace(checkpoint, details=details, sources=(*checkpoint.sources, index.source))

    def _read_shard(self, index: ShardIndex, name: str, limits: Limits) -> Checkpoint:
        """Return the checkpoint of one shard, which must have one of `shard_formats`."""
        shard, shard_format = _open_shard(index, name, limits)
        with ExitStack() as on_error, add_error_context(shard.path):
            on_error.callback(shard.close)
            if shard_format.name not in self.shard_formats:
                raise _wrong_kind_error(shard.path, shard_format, self.shard_formats)
            checkpoint = shard_format.read(shard)
            on_error.pop_all()  # the checkpoint closes it
            return checkpoint


SAFETENSORS_SHARDED = Sharded("safetensors-sharded", ("safetensors",), ".safetensors")
TORCH_SHARDED = Sharded("torch-sharded", ("torch-zip", "torch-legacy"), ".bin")


def _wrong_kind_error(
    path: str, shard_format: Format, expected: tuple[str, ...]
) -> UnsupportedFormat:
    """Return the error for a shard whose format is not one of `expected`."""
    return UnsupportedFormat(
        f"is a {shard_format.name} file, expected a {' or '.join(expected)} shard",
        file=path,
        hint="all shards of a checkpoint must have one format and each a flat state dict",
    )


def _open_shard(index: ShardIndex, name: str, limits: Limits) -> tuple[Probe, Format]:
    """Return the open probe of a shard, and its format, which is not an index of shards itself."""
    try:
        shard = Probe(index.path_of(name), limits)
    except FileMissing as error:
        raise _missing_error(index) from error
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EMFILE:
            needed_files = allow_open_files(len(index.shards))
            error.advise(f"allow more open files: ulimit -n {needed_files}")
        raise
    with ExitStack() as on_error, add_error_context(shard.path):
        on_error.callback(shard.close)
        for candidate in find_candidate_formats(shard):
            if not isinstance(candidate, Sharded) and candidate.recognize(shard):
                on_error.pop_all()  # the caller closes the shard
                return shard, candidate
        raise identify.unrecognized_error(shard)


def _check_index_unchanged(index: ShardIndex) -> None:
    """Refuse the shards if the index was replaced since it was opened.

    Some of them may belong to the new index.
    """
    fd = index.source.fd()
    if has_journal(index.path) or (fd is not None and not is_path_of(index.path, fd)):
        raise FileBusy(
            "is being rewritten with all its shards",
            file=index.path,
            hint="try again when it has finished",
        )


def _missing_error(index: ShardIndex) -> FileMissing:
    """Return the error for an index without some of its shards."""
    place = place_of(index.path)
    missing = [name for name in index.shards if not place.is_file(index.path_of(name))]
    fact = f"{len(missing)} of {counted(len(index.shards), 'shard')} {are(len(missing))} missing"
    return FileMissing(
        f"{fact}: the folder of the index does not have {listed(map(repr, missing))}",
        file=index.path,
        hint="copy or download the missing shards; open one shard with ckptool list SHARD",
    )
