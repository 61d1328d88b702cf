"""The calls that loading a file would run: every pickle in it, traced and judged."""

from __future__ import annotations

import bz2
import lzma
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from glob import glob, has_magic
from typing import Any, NamedTuple

from ckptool._lazy import Result
from ckptool.core.values import to_document
from ckptool.dtypes import BY_NAME
from ckptool.errors import CheckpointError, LimitExceeded, TruncatedFile, without_query
from ckptool.files import ByteRange, MemorySource
from ckptool.files.inflated import InflatedSource, refuse_bomb
from ckptool.files.place import is_address, place_of
from ckptool.formats.archive import DEFLATED, STORED, UNSUPPORTED_FLAGS, ZipSeries, read_zip
from ckptool.formats.base import Record
from ckptool.formats.foreign.npz import read_array_header
from ckptool.formats.identify import MAGICS
from ckptool.formats.legacy_stream import COUNT_STRUCT, MAGIC_NUMBER
from ckptool.formats.safetensors_header import read_header
from ckptool.formats.torch_tar import BLOCK, is_tar, read_members
from ckptool.inspection.scan_calls import (
    CANNOT_TELL,
    DATA,
    NEEDS_CODE,
    RUNS,
    Judge,
    SuspectCall,
    worst_verdict,
)
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.symbolic.rebuild import is_storage_pid, parse_storage_class, parse_storage_pid
from ckptool.symbolic.watching import JOBLIB_ARRAY

_WINDOW_BYTES = 1 << 20
"""Bytes of a file that are read at a time."""
_MAX_DEPTH = 6
"""Most levels of archives in archives, and of pickles in pickles."""
_MAX_INFLATED_BYTES = 256 << 20
"""Most bytes to decompress from a file or record. Later bytes are unknown."""
_MAX_CONFIG_BYTES = 16 << 20
"""Bytes of a file in which to look for the config of a Keras model."""
_INFLATE_STEP_BYTES = 1 << 11
"""Bytes that are decompressed at a time."""
_MAX_STREAMS = 1000
"""The largest number of reported streams, and of judged nested pickles."""
_PROTOCOL = re.compile(rb"\x80[\x02-\x05]")
_ZIP_SIGNATURE = re.compile(rb"PK(?:\x03\x04|\x01\x02|\x05\x06)")
_LOCAL_HEADER, _CENTRAL_HEADER = struct.Struct("<6xHH8xI4xHH"), struct.Struct("<8xHH8xI4xH12xI")
"""Of the headers of a zip: flags, method, packed size, length of the name; of a local one, of its
extra field; of the directory's, the offset of the local one."""
_HEADER_BYTES = _CENTRAL_HEADER.size + 1024
"""Bytes read of a header and its name. The rest of a longer name is not shown."""
_ZIP_END_BYTES = 0x10000 + 22
"""Bytes at the end in which to look for the end record of a zip."""
_UNSUPPORTED = [
    (row.magic, row.what)
    for row in MAGICS
    if re.search(r"a (7z|RAR) archive|encrypted|compressed with (zstd|lz4)", row.what)
]
"""The magic and description of files that may contain a pickle but cannot be read."""
_STORAGE_FOLDERS = ("data", "constants", "tensors")
_TORCHSCRIPT_RECORD = re.compile(r"(^|[/ ])code/__torch__\b|(^|[/ ])code/[^/]+\.(py|ts)$")
"""Records of TorchScript's own language."""
_KERAS_LAMBDA = re.compile(rb'"class_name"\s*:\s*"Lambda"|__lambda__')
_N_LEGACY_PICKLES = 5
"""The pickles of a legacy stream: magic number, protocol, system, object, storage keys."""
_INFLATER_BY_START: dict[bytes, Callable[[], Any]] = {
    rb"(?=\x1f\x8b|\x78[\x01\x5e\x9c\xda])": partial(zlib.decompressobj, 47),
    rb"ZF[\s\da-fA-FxX_+]{19} ?": zlib.decompressobj,  # of old joblib
    rb"(?=BZh)": bz2.BZ2Decompressor,
    rb"(?=\xfd7zXZ\0|\x5d\0\0)": lzma.LZMADecompressor,
}
"""The decompressor of a stream, by its first bytes or the bytes before it."""
_INFLATER_BY_METHOD: dict[int, Callable[[], Any]] = {
    DEFLATED: partial(zlib.decompressobj, -15),
    12: bz2.BZ2Decompressor,
}
"""The decompressor of a zip record, by its method."""


_TrailingBytes = Callable[[ByteRange, Any, int], int]
"""Returns the number of bytes between a pickle and the next one: from the data, the object of the
pickle, and the position after it."""


def _storage_bytes_after_pickle(data: ByteRange, record: Any, position: int) -> int:
    """Return the bytes after a pickle in the member `storages` of torch's tar of 2017.

    `record` is the object of the pickle. A tuple that ends with a storage class is followed by the
    number of elements and the elements. Any other object, for example the number of storages, is
    followed by the next pickle.
    """
    if not (isinstance(record, tuple) and record):
        return 0
    numel = int.from_bytes(data.read(position, COUNT_STRUCT.size), "little")
    dtype, *_ = parse_storage_class(record[-1], data.source.name)
    return COUNT_STRUCT.size + numel * BY_NAME[dtype].itemsize


def _tensor_bytes_after_pickle(data: ByteRange, record: Any, position: int) -> int:
    """Return the bytes after a pickle in the member `tensors` of torch's tar of 2017.

    A tuple is followed by integers of 8 bytes: number of dimensions, sizes, strides, offset. Only
    the first 4 bytes of the number count.
    """
    if not isinstance(record, tuple):
        return 0
    dimensions = int.from_bytes(data.read(position, 4), "little")
    return 8 * (1 + dimensions + dimensions + 1)


_TRAILING_BYTES_BY_TAR_MEMBER: dict[str, _TrailingBytes] = {
    "storages": _storage_bytes_after_pickle,
    "tensors": _tensor_bytes_after_pickle,
    "pickle": lambda *_: 0,
}


@dataclass(frozen=True, slots=True)
class Stream:
    """One pickle, or another part of a file that must be reported."""

    where: str
    """The record and its enclosing archives; empty for the file itself."""
    offset: int
    verdict: str
    calls: tuple[SuspectCall, ...] = ()
    imports: tuple[str, ...] = ()
    """Classes and functions that are not on the allow list of `weights_only=True`."""
    fault: str = ""
    """Why it cannot be traced to its end."""
    told: int = 0
    """The number of calls that run something, including calls that are not listed."""

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of `ckptool.scan/1`."""
        return {
            "where": self.where,
            "offset": self.offset,
            "verdict": self.verdict,
            "calls": [call._asdict() for call in self.calls],
            "calls_in_all": self.told,  # also those that are not listed in `calls`
            "imports": list(self.imports),
            "fault": self.fault or None,
        }


@dataclass(frozen=True, slots=True, repr=False)
class Scan(Result):
    """The effects of loading a file."""

    file: str
    """The given path."""
    verdict: str
    """The worst verdict of its streams: `data`, `needs code`, `cannot tell` or `runs`."""
    pickles: int
    """The number of traced pickles, also in archives and arguments."""
    streams: tuple[Stream, ...]
    """The pickles with findings."""
    code: tuple[str, ...] = ()
    """Python files in it, or itself: listed, but not checked."""
    notes: tuple[str, ...] = ()
    """Notes on TorchScript, and on inconsistent zips."""

    @property
    def skipped(self) -> bool:
        """True if it has no pickle, and nothing else that may run."""
        return not self.pickles and not self.streams

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that would be imported, except those on the allow list."""
        # `imports` of a stream has only names that are not on the list.
        names = (name for stream in self.streams for name in stream.imports)
        return tuple(dict.fromkeys(name.rpartition(".")[0] for name in names))

    @property
    def runs(self) -> tuple[SuspectCall, ...]:
        """The calls that run something."""
        calls = (call for stream in self.streams for call in stream.calls)
        return tuple(call for call in calls if call.verdict == RUNS)

    def ok(self, *, strict: bool = False) -> bool:
        """Return True if the verdict is `data`, or `needs code` unless `strict`."""
        return self.verdict == DATA or (self.verdict == NEEDS_CODE and not strict)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of `ckptool.scan/1`."""
        return {
            "file": self.file,
            "verdict": self.verdict,
            "skipped": self.skipped,
            "modules": list(self.modules),
            **to_document(self, "file", "verdict"),  # all fields but these two
        }


def scan(
    path: str | os.PathLike[str], *, limits: Limits = DEFAULT_LIMITS, hidden: bool = True
) -> Scan:
    """Find every call that loading a file would run, without running it.

    The verdict is `data`, `needs code` (loading imports classes), `runs` (something else is
    called) or `cannot tell`. It follows from what is called, not from a list of bad names.

    Args:
        path: A file of any kind. Of the files in a folder, `find_files` yields the paths.
        limits: Limits for hostile files.
        hidden: Also look for records that are missing from the directory of an inconsistent zip.

    Raises:
        FileMissing, FileDenied, UnreadableFile: the file cannot be read, or is not a regular file.
    """
    name = os.fsdecode(path)
    with closing(place_of(path).open(name)) as source:
        scanner = _Scanner(name, limits, hidden=hidden)
        scanner.scan_content(ByteRange(source, 0, source.size), "", 0)
        notes, code = tuple(dict.fromkeys(scanner.notes)), tuple(scanner.code)
        streams = tuple(scanner.streams)
        return Scan(without_query(name), scanner.verdict, scanner.pickles, streams, code, notes)


def find_files(paths: Iterable[str | os.PathLike[str]]) -> Iterator[str]:
    """Yield the files of paths, folders and patterns, each once.

    Links to files are followed, links to folders are not. A pattern that matches nothing is
    yielded unchanged: opening it raises the error.
    """
    seen = set()
    for given_path in map(os.fsdecode, paths):
        matches = []
        if has_magic(given_path) and not os.path.lexists(given_path):
            matches = sorted(glob(given_path, recursive=True))
        for path in matches or [given_path]:
            for file in _walk_files(path) if place_of(path).is_folder(path) else [path]:
                if file not in seen:
                    seen.add(file)
                    yield file


def _walk_files(folder: str) -> Iterator[str]:
    """Yield the files below a folder, and unreadable folders: opening them raises the error."""
    if is_address(folder):
        place = place_of(folder)
        top = place.normalize_path(folder).rstrip("/")
        for path in (f"{top}/{name}" for name in sorted(place.list_names(folder))):
            yield from _walk_files(path) if place.is_folder(path) else (path,)
        return
    failed = list[OSError]()
    for current, folders, names in os.walk(folder, onerror=failed.append):
        folders[:] = sorted(set(folders) - {".git", "__pycache__"})
        for name in sorted(names):
            path = os.path.join(current, name)
            if os.path.isfile(path) or os.path.islink(path):
                yield path
    yield from (os.fsdecode(error.filename) for error in failed)


class _ZipHeader(NamedTuple):
    """The fields of a local header of a zip, or of a central one in its directory."""

    flags: int
    method: int
    packed: int
    """Bytes of the compressed record."""
    name: str
    data_offset: int | None
    """Bytes from a local header to its record; None for a central header."""
    local_position: int
    """The position of the local header that a central header states."""


def _parse_zip_header(head: bytes) -> _ZipHeader | None:
    """Return the fields of a header; None for an end record or a truncated header."""
    layout = {b"PK\x03\x04": _LOCAL_HEADER, b"PK\x01\x02": _CENTRAL_HEADER}.get(head[:4])
    if layout is None or len(head) < layout.size:
        return None
    flags, method, packed, name_length, last_field = layout.unpack_from(head)
    name = head[layout.size :][:name_length].decode("utf-8", "backslashreplace")
    if layout is _LOCAL_HEADER:
        extra_length = last_field
        data_offset = layout.size + name_length + extra_length
        return _ZipHeader(flags, method, packed, name, data_offset, local_position=0)
    return _ZipHeader(flags, method, packed, name, None, local_position=last_field)


class _Window:
    """The bytes of some data that are in memory."""

    def __init__(self, data: ByteRange, start: int) -> None:
        """Begin with no bytes, at `start`."""
        self.data = data
        self.start = start
        self.chunk = b""

    @property
    def stop(self) -> int:
        """The position after the bytes in memory."""
        return self.start + len(self.chunk)

    def read(self, position: int, length: int) -> None:
        """Replace the bytes with those from `position`, up to `length` of them."""
        self.start = position
        self.chunk = self.data.read(position, min(length, self.data.length - position))


class _Scanner:
    """Finds and judges the pickles of one file."""

    def __init__(self, file: str, limits: Limits, *, hidden: bool = True) -> None:
        """Start without findings; `hidden` as in `scan`."""
        self.file = file
        self.limits = limits
        self.finds_hidden_records = hidden
        self.streams: dict[Stream, None] = {}
        """The streams to report, in the order of the file."""
        self.notes: list[str] = []
        self.code: list[str] = []
        """The names of Python files."""
        self.pickles = 0
        """The number of traced pickles."""
        self.depth = 0
        """The number of pickles around this one, for bytes in an argument of a call."""
        self.judged: dict[bytes, tuple[str, tuple[SuspectCall, ...]]] = {}
        """By bytes in arguments: their verdict and calls."""

    @property
    def verdict(self) -> str:
        return worst_verdict(*(stream.verdict for stream in self.streams))

    def add_stream(self, stream: Stream) -> None:
        """Add a stream; in a full list, it replaces the last one if its verdict is worse.

        So the worst verdict of the list is that of the whole file.
        """
        if len(self.streams) >= _MAX_STREAMS:
            last = next(reversed(self.streams))
            if worst_verdict(stream.verdict, last.verdict) == last.verdict:
                return
            del self.streams[last]
        self.streams[stream] = None

    def report_unread(self, where: str, why: str) -> None:
        """Report data that may contain a pickle but is not read."""
        self.add_stream(Stream(where, 0, CANNOT_TELL, fault=why))

    def wrap_memory(self, raw: bytes) -> ByteRange:
        """Return bytes as the content of a file in memory."""
        return ByteRange(MemorySource(raw, self.file), 0, len(raw))

    def scan_content(
        self, data: ByteRange, where: str, depth: int, trailing_bytes: _TrailingBytes | None = None
    ) -> set[str]:
        """Scan `data` as pickles and as a container; return the keys of the storages it refers to.

        Data that cannot be read is reported as a stream.
        """
        keys = set[str]()
        try:
            if depth > _MAX_DEPTH:
                raise LimitExceeded(f"archives are nested more than {_MAX_DEPTH} levels deep")
            keys = self._scan_pickles(data, where, trailing_bytes=trailing_bytes)
            self._scan_container(data, where, depth)
        except CheckpointError as error:
            self.report_unread(where, error.message)
        return keys

    def _scan_container(self, data: ByteRange, where: str, depth: int) -> None:
        """Scan the content of an archive, an array, a compressed stream or a Keras config.

        Several kinds may apply, because a file can begin like one and contain another. A file that
        begins as a zip has no other kind. A Python file is only listed.
        """
        head = data.read(0, min(BLOCK, data.length))
        tail = b""
        if not isinstance(data.source, InflatedSource):  # else this would decompress all of it
            tail = data.read(max(data.length - _ZIP_END_BYTES, 0))
        is_zip = head.startswith(b"PK\x03\x04")
        if is_zip or b"PK\x05\x06" in tail:
            self._scan_zip(data, where, depth)
        if is_zip:
            return
        if is_tar(head):
            self._scan_tar(data, where, depth)
        elif head.startswith(b"\x93NUMPY"):
            header = read_array_header(Record(where or self.file, data))
            # An array of objects is a pickle. A backslash in the dtype may hide the letter O.
            if re.search(r"O|object|\\", header.descr):
                self._scan_pickles(data, where, header.length)
        for pattern, make_inflater in _INFLATER_BY_START.items():
            if match := re.match(pattern, head):
                packed = data.slice(match.end(), data.length - match.end())
                # Of zlib (78) and raw LZMA (5D), a few bytes may match by chance.
                is_certain = head[:1] not in b"\x78\x5d"
                inflated = self._inflate(packed, make_inflater, where, is_certain=is_certain)
                self.scan_content(inflated, _join_names(where, "inflated"), depth + 1)
        for magic, description in _UNSUPPORTED:
            if head.startswith(magic):
                self.report_unread(where, f"{description} is not supported")
        may_have_config = head.lstrip()[:1] == b"{" or head.startswith(b"\x89HDF")
        if may_have_config and _KERAS_LAMBDA.search(
            data.read(0, min(data.length, _MAX_CONFIG_BYTES))
        ):
            text = "keras.layers.Lambda: keras.models.load_model runs the code in it"
            call = SuspectCall(text, 0, "a Keras config", RUNS)
            self.add_stream(Stream(where, 0, RUNS, (call,), told=1))  # one call in all
        if (where or self.file).endswith(".py"):
            self.code.append(where or self.file)

    def _scan_tar(self, data: ByteRange, where: str, depth: int) -> None:
        """Scan the members of a tar; one inside an archive is first read into memory."""
        if data.length != data.source.size:  # `read_members` reads a whole source
            if data.length > _MAX_INFLATED_BYTES:
                raise LimitExceeded("a tar inside an archive is too large to read")
            data = self.wrap_memory(data.read())
        for name, member in read_members(data.source, self.limits).items():
            trailing_bytes = _TRAILING_BYTES_BY_TAR_MEMBER.get(name)
            self.scan_content(member, _join_names(where, name), depth + 1, trailing_bytes)

    # Pickles

    def _scan_pickles(
        self,
        data: ByteRange,
        where: str,
        start: int = 0,
        trailing_bytes: _TrailingBytes | None = None,
    ) -> set[str]:
        """Judge consecutive pickles, and return the keys of the storages that they refer to.

        `trailing_bytes` returns the number of bytes after a pickle; no other bytes are allowed.
        Bytes that are not a pickle end the search. After the five pickles of a legacy stream, the
        bytes of its storages are skipped, unless a pickle is in their place.
        """
        position, keys = start, set[str]()
        # The length of a safetensors header may look like the start of a pickle.
        is_safetensors = start == 0 and _is_safetensors(data, self.limits)
        window = _Window(data, start)
        roots, storage_sizes = list[Any](), dict[str, int]()
        while position < data.length:
            judge = self._trace_complete_pickle(window, position)
            if judge is None:  # it does not end within the limit
                if is_safetensors:  # and is no pickle
                    break
                raise LimitExceeded("its pickle is longer than the limit")
            # It ends properly, or has a call or a known name before a fault.
            is_pickle = judge.end is not None or bool(judge.evidence_count)
            if not is_safetensors:
                is_pickle |= judge.failed is LimitExceeded
                is_pickle |= bool(_PROTOCOL.match(window.chunk, position - window.start))
            if not is_pickle:
                break
            self._add_traced(judge, where, position)
            if judge.end is None:
                break
            storages = self._find_storages(judge)
            keys |= storages.keys()
            position = window.start + judge.end
            if trailing_bytes is not None:
                position += trailing_bytes(data, judge.root, position)
            roots = [*roots, judge.root][-_N_LEGACY_PICKLES:]
            storage_sizes = storages or storage_sizes  # the last pickle only lists their keys
            if len(roots) == _N_LEGACY_PICKLES and roots[0] == MAGIC_NUMBER:
                extra = self._trace_pickle(window.chunk, position - window.start, window.start)
                if extra.evidence_count:  # a pickle in place of the storages: torch would run it
                    self._add_traced(extra, where, position)
                position += sum(COUNT_STRUCT.size + nbytes for nbytes in storage_sizes.values())
                roots, storage_sizes = [], {}
        if trailing_bytes is not None and position != data.length:
            self.report_unread(where, f"the data at byte {position:,} is not a pickle")
        return keys

    def _find_storages(self, judge: Judge) -> dict[str, int]:
        """Return the sizes of the storages that a pickle refers to: key -> bytes.

        Invalid persistent ids are left out.
        """
        sizes: dict[str, int] = {}
        for pid in filter(is_storage_pid, judge.pids):
            with suppress(CheckpointError):
                storage = parse_storage_pid(pid, self.file)
                sizes.setdefault(storage.key, storage.nbytes)
        return sizes

    def _trace_complete_pickle(self, window: _Window, position: int) -> Judge | None:
        """Trace the pickle at `position`, in a larger window if that cuts it off.

        None if a larger window exceeds the limit for pickles.
        """
        data = window.data
        if position >= window.stop:
            window.read(position, _WINDOW_BYTES)
        while True:
            judge = self._trace_pickle(window.chunk, position - window.start, window.start)
            # A fault after a line that ends with the window may come from the missing rest of it.
            is_cut_off = judge.failed is TruncatedFile or (judge.failed and judge.has_cut_line)
            if not is_cut_off or window.stop >= data.length:
                return judge
            refuse_bomb(data, self.limits.max_header_inflation)
            # First a window that begins with the pickle, then larger ones.
            length = _WINDOW_BYTES if position > window.start else len(window.chunk) * 8
            if min(length, data.length - position) > self.limits.max_pickle_bytes:
                return None
            window.read(position, length)

    def _trace_pickle(self, chunk: bytes, start: int, base: int) -> Judge:
        """Trace the pickle at `start` of `chunk`, and return its judge.

        `base` is the position of `chunk` in the data. A pickle with joblib arrays is traced also as
        joblib reads it, which skips the raw bytes of the arrays. The result is that of joblib, with
        the calls that pickle.load would run.
        """
        make_judge = partial(
            Judge, chunk, self.judge_nested, base, file=self.file, limits=self.limits
        )
        judge = make_judge().watch(start)
        if JOBLIB_ARRAY not in judge.names:
            return judge
        joblib_judge = make_judge(as_joblib=True).watch(start)
        if judge.verdict == RUNS:
            joblib_judge.verdict = RUNS
            joblib_judge.calls += [call for call in judge.calls if call.verdict == RUNS]
        return joblib_judge

    def _add_traced(self, judge: Judge, where: str, offset: int) -> None:
        """Count a traced pickle, and add it to the streams unless it is only data."""
        self.pickles += 1
        verdict = worst_verdict(judge.verdict, CANNOT_TELL if judge.failed else DATA)
        if verdict != DATA:
            calls, names = tuple(dict.fromkeys(judge.calls)), tuple(judge.names)
            self.add_stream(
                Stream(where, offset, verdict, calls, names, judge.fault, judge.run_count)
            )

    def judge_nested(self, raw: bytes) -> tuple[str, tuple[SuspectCall, ...]]:
        """Return the verdict and calls of bytes that a pickle passes to a function, each once.

        Beyond the limits on depth and number, the verdict is `cannot tell`.
        """
        if raw not in self.judged:
            if self.depth >= self.limits.max_nested_pickles or len(self.judged) > _MAX_STREAMS:
                return CANNOT_TELL, ()
            inner = _Scanner(self.file, self.limits)
            inner.depth, inner.judged = self.depth + 1, self.judged  # shared by all levels
            inner.scan_content(self.wrap_memory(raw), "", 1)
            calls = tuple(call for stream in inner.streams for call in stream.calls)[:_MAX_STREAMS]
            self.pickles += inner.pickles
            self.judged[raw] = inner.verdict, calls
        return self.judged[raw]

    # Zips

    def _scan_zip(self, data: ByteRange, where: str, depth: int) -> None:
        """Scan the records of a zip; if it is inconsistent, also those only headers point to.

        Pickles come first: the storages that they refer to are tensor data, and are not scanned. An
        error of the zip reader becomes a note, except for a series of zips.
        """
        records, is_inconsistent = list[tuple[str, ByteRange]](), True
        try:
            archive = read_zip(data, self.limits)
            prefix = f"{archive.folder}/" if archive.folder else ""
            records = [(prefix + entry.name, entry.data) for entry in archive.records.values()]
            is_inconsistent = bool(archive.dead_bytes or archive.notes)
        except ZipSeries:
            pass  # The headers lead to the records of all its archives.
        except CheckpointError as error:
            self.notes.append(_join_names(where, error.message))
        if is_inconsistent and self.finds_hidden_records:
            records += self._find_records_by_headers(data, where)
        records.sort(key=lambda record: not record[0].endswith(".pkl"))
        seen_ranges, storage_paths = set[tuple[int, ...]](), set[str]()
        for name, record in records:
            data_range = id(record.source), record.offset, record.length
            if data_range in seen_ranges or name in storage_paths:
                continue
            seen_ranges.add(data_range)
            storage_keys = self.scan_content(record, _join_names(where, name), depth + 1)
            if name.endswith(".pkl"):
                folder = name[: name.rfind("/") + 1]
                paths = (
                    f"{folder}{part}/{key}" for part in _STORAGE_FOLDERS for key in storage_keys
                )
                storage_paths.update(path for path in paths if not path.endswith(".pkl"))
        if any(_TORCHSCRIPT_RECORD.search(name) for name, _ in records):
            self.code = [name for name in self.code if not _TORCHSCRIPT_RECORD.search(name)]
            self.notes.append("TorchScript code is not Python and is not checked")

    def _find_records_by_headers(
        self, data: ByteRange, where: str
    ) -> Iterator[tuple[str, ByteRange]]:
        """Yield name and bytes of the records that any zip header points to, local or central.

        A compressed record is yielded as stored and inflated, because a header may lie about that.

        Headers of both kinds may contradict each other, and programs follow different ones. So each
        name, compression method and largest size that a header states is tried. Without a valid
        size, a record ends at the next header.
        """
        header_positions = list[int]()
        data_starts = dict[int, int]()
        last_header_by_name = dict[str, int]()
        packed_sizes = dict[tuple[int, str, int], int]()
        """Bytes of a record by the position of its local header, name and method."""
        for position, head in self._find_headers(data):
            header_positions.append(position)
            header = _parse_zip_header(head)
            if header is None:
                continue
            if header.data_offset is not None:
                data_starts[position] = position + header.data_offset
                last_header_by_name[header.name] = position
                local_positions = {position}
            else:
                # A central header belongs to the last local header with its name, or to the one
                # that it states: a position in the file, or relative to the first local header.
                local_positions = {
                    last_header_by_name.get(header.name, -1),
                    header.local_position,
                    header.local_position + next(iter(data_starts), 0),
                } & data_starts.keys()
            for local_position in local_positions:
                record = local_position, header.name, header.method
                packed_sizes[record] = max(packed_sizes.get(record, 0), header.packed)
            if header.flags & UNSUPPORTED_FLAGS:
                text = "its flags mark it as encrypted or a patch"
                self.report_unread(_join_names(where, header.name), text)
            if len(header_positions) > self.limits.max_records:
                raise LimitExceeded("its zip has more headers than the limit")
        next_header = dict(zip(header_positions, [*header_positions[1:], data.length], strict=True))
        for (local_position, name, method), packed in packed_sizes.items():
            begin = data_starts[local_position]
            available = data.length - begin
            length = packed if 0 < packed <= available else next_header[local_position] - begin
            if not 0 < length <= available:
                continue
            stored = data.slice(begin, length)
            yield name, stored
            record_name = _join_names(where, name)
            if method in _INFLATER_BY_METHOD:
                yield name, self._inflate(stored, _INFLATER_BY_METHOD[method], record_name)
            elif method != STORED:
                self.report_unread(record_name, f"compression method {method} is not supported")

    def _find_headers(self, data: ByteRange) -> Iterator[tuple[int, bytes]]:
        """Yield the position and the bytes of everything that looks like a zip header."""
        for start in range(0, data.length, _WINDOW_BYTES):
            # With 3 bytes of the next window, for a signature of 4 bytes that begins in this one.
            block = data.read(start, min(_WINDOW_BYTES + 3, data.length - start))
            for match in _ZIP_SIGNATURE.finditer(block):
                position = start + match.start()
                yield position, data.read(position, min(_HEADER_BYTES, data.length - position))

    def _inflate(
        self,
        data: ByteRange,
        make_inflater: Callable[[], Any],
        where: str,
        *,
        is_certain: bool = True,
    ) -> ByteRange:
        """Return the decompressed bytes of all members of a stream, up to a limit or a fault.

        The steps are shorter than those of any reader, which may have read a pickle before it
        meets a fault. A fault is only reported if `is_certain`: other bytes may look like a stream
        by chance.
        """
        inflated = bytearray()
        member_end = -1  # of the last complete member, in `inflated`
        is_between_members = False
        inflater, blocks = make_inflater(), data.iterate_blocks(_INFLATE_STEP_BYTES)
        pending = b""  # compressed bytes that were read, but not decompressed
        try:
            while len(inflated) < _MAX_INFLATED_BYTES:
                block = pending or next(blocks, b"")
                # bz2 and lzma may still have output; zlib leaves its input in `unconsumed_tail`.
                if not block and getattr(inflater, "needs_input", True):
                    break
                if is_between_members:
                    block = block.lstrip(b"\0")  # padding
                    if not block:
                        pending = b""
                        continue
                    is_between_members = False
                inflated += inflater.decompress(block, _INFLATE_STEP_BYTES)
                pending = getattr(inflater, "unconsumed_tail", b"")
                if inflater.eof:
                    pending, member_end = inflater.unused_data, len(inflated)
                    inflater, is_between_members = make_inflater(), True
            else:
                self.report_unread(
                    where, f"it decompresses to more than {_MAX_INFLATED_BYTES >> 20} MiB"
                )
        except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
            # At the end of a member, the fault is in bytes after the stream, which do not matter.
            if is_certain and len(inflated) != member_end:
                self.report_unread(where, f"it cannot be fully decompressed ({error})")
        return self.wrap_memory(bytes(inflated))


def _is_safetensors(data: ByteRange, limits: Limits) -> bool:
    """Return True if a file that begins like a pickle opens as safetensors.

    The length of a header begins with the bytes 80 02 to 80 05 once in some two thousand files.
    """
    source = data.source
    if data.length != source.size or not _PROTOCOL.match(data.read(0, min(2, data.length))):
        return False
    with suppress(CheckpointError):
        read_header(source, limits)
        return True
    return False


def _join_names(where: str, name: str) -> str:
    """Return the name of a record inside the archive `where`: `a.zip > data.pkl`."""
    return f"{where} > {name}" if where else name
