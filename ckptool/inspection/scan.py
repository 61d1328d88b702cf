"""What loading a file would run: every pickle in it, wherever it lies, watched and judged."""

from __future__ import annotations

import bz2
import lzma
import os
import re
import struct
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from glob import glob, has_magic
from typing import Any

from ckptool.errors import CheckpointError, LimitExceeded, TruncatedFile
from ckptool.files import ByteRange, MemorySource
from ckptool.files.inflated import InflatedSource, refuse_bomb
from ckptool.files.place import place_of
from ckptool.formats.archive import DEFLATED, REFUSED, STORED, zip_archive
from ckptool.formats.base import Record
from ckptool.formats.identify import MAGICS
from ckptool.formats.legacy_stream import COUNT, MAGIC_NUMBER
from ckptool.formats.npz import read_array_header
from ckptool.formats.torch_tar import BLOCK, is_tar, read_members
from ckptool.inspection.deeds import (
    CANNOT_TELL,
    DATA,
    NEEDS_CODE,
    RUNS,
    VERDICTS,
    Deed,
    Judge,
    worst,
)
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.symbolic.rebuild import is_storage_pid, parse_storage_pid
from ckptool.symbolic.watching import JOBLIB_ARRAY, Watcher

__all__ = ["Scan", "Stream", "files_below", "scan"]

_WINDOW = 1 << 20
_DEEPEST = 6
"""Archives in archives, and pickles in pickles."""
_MOST_INFLATED = 256 << 20
"""Bytes that a compressed file or record is inflated to; what is behind them is not known."""
_MOST_STREAMS = 1000
_MOST_SEARCHED = 64 << 20
_PROTOCOL = re.compile(rb"\x80[\x02-\x05]")
_HEADER_MARK = re.compile(rb"PK(?:\x03\x04|\x01\x02|\x05\x06)")
_LOCAL, _CENTRAL = struct.Struct("<6xHH8xI4xHH"), struct.Struct("<8xHH8xI4xH12xI")
"""Of the headers of a zip: flags, method, packed size, length of the name; of a local one, of its
extra field; of the directory's, the offset of the local one."""
_UNREAD = [
    (row.magic, row.what)
    for row in MAGICS
    if re.search(r"a (7z|RAR) archive|encrypted|compressed with (zstd|lz4)", row.what)
]
_HEAD = 46 + 1024
"""Bytes read of a header of a zip and its name; the rest of a longer name is not shown."""
_ZIP_END = 0x10000 + 22
"""Bytes in which the end record of a zip is looked for."""
_STORAGE_FOLDERS = ("data", "constants", "tensors")
_SCRIPT = re.compile(r"(^|[/ ])code/__torch__\b|(^|[/ ])code/[^/]+\.(py|ts)$")
"""Records of TorchScript's own language."""
_LAMBDA = re.compile(rb'"class_name"\s*:\s*"Lambda"|__lambda__')
_LEGACY_PICKLES = 5
_ZFILE = re.compile(rb"ZF[\s\da-fA-FxX_+]{19} ?")
"""What old joblib writes before a stream of zlib; it still reads it."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One pickle, or something else of a file that must be named."""

    where: str
    """The record and the archives around it; empty for the file itself."""
    offset: int
    verdict: str
    deeds: tuple[Deed, ...] = ()
    imports: tuple[str, ...] = ()
    """Classes and functions named beyond the allow list of `weights_only=True`."""
    fault: str = ""
    """Why it cannot be followed to its end."""
    told: int = 0
    """Calls that run something, with those that `deeds` has no room for."""

    def to_dict(self) -> dict[str, Any]:
        """As `ckptool.scan/1` has it."""
        return {
            "where": self.where,
            "offset": self.offset,
            "verdict": self.verdict,
            "calls": [deed._asdict() for deed in self.deeds],
            "calls_in_all": self.told,
            "imports": list(self.imports),
            "fault": self.fault or None,
        }


@dataclass(frozen=True, slots=True)
class Scan:
    """What loading a file would do."""

    file: str
    """As it was given."""
    verdict: str
    """The worst verdict of its streams: `data`, `needs code`, `cannot tell` or `runs`."""
    pickles: int
    """How many were followed, those in archives and in arguments included."""
    streams: tuple[Stream, ...]
    """Those of which there is something to say."""
    code: tuple[str, ...] = ()
    """Files of Python in it, or itself: named, and not judged."""
    notes: tuple[str, ...] = ()
    """Sentences on TorchScript, and on what is odd about a zip."""

    @property
    def skipped(self) -> bool:
        """Whether there is no pickle in it, and nothing else that might run."""
        return not self.pickles and not self.streams

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that would be imported, beyond the allow list."""
        names = (name for stream in self.streams for name in stream.imports)
        return tuple(dict.fromkeys(name.rpartition(".")[0] for name in names))

    @property
    def runs(self) -> tuple[Deed, ...]:
        """The calls that run something."""
        return tuple(d for stream in self.streams for d in stream.deeds if d.verdict == RUNS)

    def ok(self, *, strict: bool = False) -> bool:
        """Return whether the file may pass a gate; `strict` passes data alone."""
        return self.verdict == DATA or (self.verdict == NEEDS_CODE and not strict)

    def to_dict(self) -> dict[str, Any]:
        """As `ckptool.scan/1` has it."""
        return {
            "file": self.file,
            "verdict": self.verdict,
            "skipped": self.skipped,
            "pickles": self.pickles,
            "modules": list(self.modules),
            "streams": [stream.to_dict() for stream in self.streams],
            "code": list(self.code),
            "notes": list(self.notes),
        }


def scan(
    path: str | os.PathLike[str], *, limits: Limits = DEFAULT_LIMITS, hidden: bool = True
) -> Scan:
    """Find what loading a file would run: every call in every pickle in it, none carried out.

    The verdict is `data`, `needs code` (classes are imported and filled), `runs` (something else is
    called) or `cannot tell`. It follows from what is called with which arguments, not from a list
    of bad names.

    Args:
        path: A file of any kind. Of the files in a folder, `files_below` yields the paths.
        limits: Bounds for what the file may cost.
        hidden: Look in an odd zip for records that its directory does not name, too, which reads
            all of the file; what loads the file does not read them.

    Raises:
        FileMissing: the file does not exist.
        FileDenied: the system refuses to read the file.
        UnreadableFile: it is no regular file.
    """
    name = os.fsdecode(path)
    with closing(place_of(path).open(name)) as source:
        scanner = _Scanner(name, limits, hidden=hidden)
        scanner.look(ByteRange(source, 0, source.size), "", 0)
        verdict = worst(*(one.verdict for one in scanner.streams))
        notes, code = tuple(dict.fromkeys(scanner.notes)), tuple(scanner.code)
        return Scan(name, verdict, scanner.pickles, tuple(scanner.streams), code, notes)


def files_below(paths: Iterable[str | os.PathLike[str]]) -> Iterator[str]:
    """Yield the files that paths, folders and patterns lead to, each once.

    Links to files are followed, links to folders are not. A pattern that nothing matches is
    yielded as it is: whoever opens it says that there is no such file.
    """
    seen = set()
    for given in map(os.fsdecode, paths):
        pattern = not os.path.lexists(given) and has_magic(given)
        for path in (sorted(glob(given, recursive=True)) if pattern else ()) or (given,):
            for file in _inside(path) if os.path.isdir(path) else (path,):
                if file not in seen:
                    seen.add(file)
                    yield file


def _inside(folder: str) -> Iterator[str]:
    """Yield the files in a folder, and the folders that cannot be listed: opening one says why."""
    failed = list[OSError]()
    for here, folders, names in os.walk(folder, onerror=failed.append):
        folders[:] = sorted(set(folders) - {".git", "__pycache__"})
        for name in sorted(names):
            path = os.path.join(here, name)
            if os.path.isfile(path) or os.path.islink(path):
                yield path
    yield from (os.fsdecode(error.filename) for error in failed)


class _Scanner:
    """The pickles of one file, found and judged."""

    def __init__(self, file: str, limits: Limits, *, hidden: bool = True) -> None:
        self.file = file
        self.limits = limits
        self.hidden = hidden
        self.streams: list[Stream] = []
        self.notes: list[str] = []
        self.code: list[str] = []
        self.pickles = 0
        self.depth = 0
        self.judged: dict[bytes, tuple[str, tuple[Deed, ...]]] = {}

    def add(self, stream: Stream) -> None:
        if len(self.streams) < _MOST_STREAMS:
            self.streams.append(stream)
        elif VERDICTS.index(stream.verdict) > VERDICTS.index(self.streams[-1].verdict):
            self.streams[-1] = stream

    def unread(self, where: str, why: str) -> None:
        """Note something that may hold a pickle, and that is not read."""
        self.add(Stream(where, 0, CANNOT_TELL, fault=why))

    def look(self, data: ByteRange, where: str, depth: int) -> set[str]:
        """Find what there is in `data`, by its content alone; the keys of storages it names."""
        keys = set[str]()
        try:
            if depth > _DEEPEST:
                raise LimitExceeded(f"archives are nested deeper than {_DEEPEST}")
            head = data.read(0, min(BLOCK, data.length))
            keys = self._pickles(data, where)
            self._carrier(data, head, where, depth)
        except CheckpointError as error:
            self.unread(where, error.message)
        return keys

    def _carrier(self, data: ByteRange, head: bytes, where: str, depth: int) -> None:
        """Look into whatever `data` is an archive, an array or a compressed stream of."""
        packed = _inflater(head)
        is_raw = not isinstance(data.source, InflatedSource)  # whose end costs all of it
        tail = data.read(max(data.length - _ZIP_END, 0)) if is_raw else b""
        zfile = _ZFILE.match(head)
        if zfile:
            data, packed = data.slice(zfile.end(), data.length - zfile.end()), zlib.decompressobj
        if head.startswith(b"PK\x03\x04") or b"PK\x05\x06" in tail:
            self._zip(data, where, depth)
        if head.startswith(b"PK\x03\x04"):
            return
        if is_tar(head):
            if data.length != data.source.size:
                if data.length > _MOST_INFLATED:
                    raise LimitExceeded("a tar inside an archive is too large to be read")
                data = ByteRange(MemorySource(data.read(), self.file), 0, data.length)
            for name, member in read_members(data.source, self.limits).items():
                inner = _below(where, name)
                self.look(member, inner, depth + 1)
                if name in ("storages", "tensors", "pickle") or not where:
                    self._search(member, inner)
        elif head.startswith(b"\x93NUMPY"):
            header = read_array_header(Record(where or self.file, data))
            if re.search(r"O|object|\\", header.descr):
                is_object = header.descr.strip("|") == "O"
                self._pickles(data, where, start=header.length, must=is_object)
        elif packed is not None:
            try:
                raw, whole = _inflated(data, packed)
            except LimitExceeded:
                if head[:1] in (b"\x78", b"\x5d"):  # a mark of two bytes may stand by chance
                    return
                raise
            if not whole:
                self.unread(where, f"it inflates to more than {_MOST_INFLATED >> 20} MiB")
            source = MemorySource(raw, self.file)
            self.look(ByteRange(source, 0, source.size), _below(where, "inflated"), depth + 1)
        else:
            self._named(head, data, where)

    def _named(self, head: bytes, data: ByteRange, where: str) -> None:
        """Name what is not read, and code that is no pickle."""
        for magic, what in _UNREAD:
            if head.startswith(magic):
                self.unread(where, f"{what}: not read")
        is_config = head.lstrip()[:1] == b"{" or head.startswith(b"\x89HDF")
        if is_config and _LAMBDA.search(data.read(0, min(data.length, 16 << 20))):
            text = "keras.layers.Lambda: keras.models.load_model runs the code in it"
            self.add(Stream(where, 0, RUNS, (Deed(text, 0, "a Keras config", RUNS),), told=1))
        if (where or self.file).endswith(".py"):
            self.code.append(where or self.file)

    # Pickles

    def _pickles(
        self, data: ByteRange, where: str, *, start: int = 0, must: bool = False
    ) -> set[str]:
        """Judge pickles one behind the other; the keys of the storages that they name."""
        position, keys = start, set[str]()
        chunk, base = data.read(start, min(_WINDOW, data.length - start)), start
        roots, legacy = list[Any](), dict[str, int]()
        while position < data.length:
            watched = self._watched(chunk, position - base, base)
            rest = data.length - base
            if watched.short and len(chunk) < rest:
                refuse_bomb(data, self.limits.max_header_inflation)
                wanted = min(_WINDOW if position > base else len(chunk) * 8, data.length - position)
                if wanted > self.limits.max_pickle_bytes:
                    raise LimitExceeded("its pickle is longer than the limit allows")
                chunk, base = data.read(position, wanted), position
                continue
            judge = watched.judge
            is_one = watched.end is not None or _PROTOCOL.match(chunk, position - base) or must
            is_one = is_one or watched.limited
            if not is_one and not judge.seen:
                break
            self._note(watched, where, position)
            if watched.end is None:
                break
            storages = self._storages(watched.pids)
            keys |= storages.keys()
            position, must = base + watched.end, False
            legacy = storages or legacy
            roots.append(watched.root)
            if len(roots) == _LEGACY_PICKLES:
                if roots[0] == MAGIC_NUMBER:
                    instead = self._watched(chunk, position - base, base)
                    if instead.judge.seen:  # a pickle, where the storages should be
                        self._note(instead, where, position)
                    position += sum(COUNT.size + nbytes for nbytes in legacy.values())
                    roots, legacy = [], {}
                else:
                    del roots[0]
            if position - base > len(chunk) and position < data.length:
                chunk, base = data.read(position, min(_WINDOW, data.length - position)), position
        return keys

    def _storages(self, pids: Iterable[Any]) -> dict[str, int]:
        found: dict[str, int] = {}
        for pid in pids:
            with suppress(CheckpointError):
                if is_storage_pid(pid):
                    storage = parse_storage_pid(pid, self.file)
                    found.setdefault(storage.key, storage.nbytes)
        return found

    def _watched(self, chunk: bytes, start: int, base: int) -> _Watched:
        """Watch one pickle; as joblib reads it too, where it names joblib's arrays."""
        found = _Watched(self, chunk, start, base)
        if any(one.qualified == JOBLIB_ARRAY for one in found.machine.globals.values()):
            both = _Watched(self, chunk, start, base, as_joblib=True)
            for deed in found.judge.deeds:  # of pickle.load, which stops at the raw bytes
                if deed.verdict == RUNS:
                    both.judge.verdict = RUNS
                    both.judge.deeds.append(deed)
            return both
        return found

    def _note(self, watched: _Watched, where: str, offset: int) -> None:
        judge = watched.judge
        self.pickles += 1
        if watched.fault:
            judge.verdict = worst(judge.verdict, CANNOT_TELL)
        if judge.verdict != DATA:
            deeds = tuple(dict.fromkeys(judge.deeds))
            names = tuple(judge.names)
            self.add(Stream(where, offset, judge.verdict, deeds, names, watched.fault, judge.told))

    def _search(self, data: ByteRange, where: str) -> None:
        """Judge pickles that stand between raw bytes, as in the members of torch's tar."""
        raw = data.read(0, min(data.length, _MOST_SEARCHED))
        if data.length > len(raw):
            self.unread(where, f"only its first {len(raw):,} bytes are searched for pickles")
        reached, left = 0, 4 * len(raw) + _WINDOW
        for found in _PROTOCOL.finditer(raw):
            if found.start() < reached or left < 0:
                continue
            watched = self._watched(raw, found.start(), 0)
            left -= (watched.end or watched.machine_at) - found.start()
            if watched.end is not None or watched.judge.seen:
                self._note(watched, where, found.start())
                reached = watched.end or found.end()

    def nested(self, raw: bytes) -> tuple[str, tuple[Deed, ...]]:
        """Judge bytes that a pickle hands to a function: each run of bytes once."""
        known = self.judged.get(raw)
        if known is not None:
            return known
        if self.depth >= self.limits.max_nested_pickles or len(self.judged) > _MOST_STREAMS:
            return CANNOT_TELL, ()
        inner = _Scanner(self.file, self.limits)
        inner.depth, inner.judged = self.depth + 1, self.judged
        source = MemorySource(raw, self.file)
        inner.look(ByteRange(source, 0, source.size), "", 1)
        verdict = worst(*(one.verdict for one in inner.streams))
        deeds = tuple(deed for one in inner.streams for deed in one.deeds)[:_MOST_STREAMS]
        self.pickles += inner.pickles
        self.judged[raw] = verdict, deeds
        return verdict, deeds

    # Zips

    def _zip(self, data: ByteRange, where: str, depth: int) -> None:
        """Look into every record; where the zip is odd, into whatever its headers lead to."""
        try:
            archive = zip_archive(data, self.limits)
            is_odd = bool(archive.dead_bytes)
            records = [(_joined(archive.folder, r.name), r.data) for r in archive.records.values()]
            if archive.notes:  # records outside the folder
                is_odd = True
        except CheckpointError as error:
            if "one behind another" not in error.message:
                self.notes.append(_below(where, error.message))
            is_odd, records = True, list[tuple[str, ByteRange]]()
        if is_odd and self.hidden:
            records += self._by_headers(data, where)
        seen = set()
        named = set[str]()
        order = sorted(records, key=lambda record: not record[0].endswith(".pkl"))
        is_script = any(_SCRIPT.search(name) for name, _ in records)
        for name, record in order:
            place = (id(record.source), record.offset, record.length)
            if place in seen:
                continue
            seen.add(place)
            if name in named:
                continue
            keys = self.look(record, _below(where, name), depth + 1)
            if name.endswith(".pkl"):
                folder = name[: name.rfind("/") + 1]
                stored = (f"{folder}{part}/{key}" for part in _STORAGE_FOLDERS for key in keys)
                named.update(one for one in stored if not one.endswith(".pkl"))
        if is_script:
            self.code = [name for name in self.code if not _SCRIPT.search(name)]
            self.notes.append("it is a TorchScript: its code is not Python, and is not judged")

    def _by_headers(self, data: ByteRange, where: str) -> Iterator[tuple[str, ByteRange]]:
        """Yield the records that any header of a zip leads to, local or of the directory."""
        central, local = list[tuple[int, str, int, int, int]](), dict[int, tuple[str, int, int]]()
        sizes, ends, overlap = dict[int, int](), 0, b""
        locked = dict[str, None]()
        for start in range(0, data.length, _WINDOW):
            block = overlap + data.read(start, min(_WINDOW, data.length - start))
            at = start - len(overlap)
            for found in _HEADER_MARK.finditer(block):
                position = at + found.start()
                head = data.read(position, min(_HEAD, data.length - position))
                if found[0] == b"PK\x03\x04" and len(head) >= _LOCAL.size:
                    flags, method, sizes[position], name, extra = _LOCAL.unpack_from(head)
                    label = head[_LOCAL.size :][:name].decode("utf-8", "backslashreplace")
                    local[position] = (label, method, position + _LOCAL.size + name + extra)
                elif found[0] == b"PK\x01\x02" and len(head) >= _CENTRAL.size:
                    flags, method, packed, name, offset = _CENTRAL.unpack_from(head)
                    label = head[_CENTRAL.size :][:name].decode("utf-8", "backslashreplace")
                    central.append((position, label, method, offset, packed))
                else:
                    flags, label, ends = 0, "", ends + (found[0] == b"PK\x05\x06")
                if flags & REFUSED:
                    locked[label] = None
            overlap = block[-3:]
            if len(local) + len(central) > self.limits.max_records:
                raise LimitExceeded("its zip has more headers than the limit allows")
        for label in locked:
            self.unread(_below(where, label), "its flags say that it is encrypted, or a patch")
        ordered, labelled = sorted(local), dict[str, list[int]]()
        for header in ordered:
            labelled.setdefault(local[header][0], []).append(header)
        shift, wanted = min(ordered, default=0), dict[tuple[str, int, int, int], None]()
        for position, label, method, offset, packed in central:
            same = labelled.get(label, [])
            before = bisect_left(same, position)
            near = (
                same[max(before - 1, 0) : before]
                if ends > 1
                else {offset, offset + shift} & local.keys()
            )
            for header in near:
                wanted.setdefault((label, method, local[header][2], packed))
                sizes[header] = sizes[header] or packed
        for header, (label, method, begin) in local.items():
            wanted.setdefault((label, method, begin, sizes[header]))
        for label, method, begin, packed in wanted:
            index = bisect_left(ordered, begin)
            following = ordered[index] if index < len(ordered) else data.length
            length = packed if 0 < packed <= data.length - begin else following - begin
            if not 0 < length <= data.length - begin:
                continue
            part = data.slice(begin, length)
            if method == STORED:
                yield label, part
                continue
            make = {DEFLATED: lambda: zlib.decompressobj(-15), 12: bz2.BZ2Decompressor}.get(method)
            if make is None:
                self.unread(_below(where, label), f"it is compressed by method {method}: not read")
                continue
            with suppress(OSError, zlib.error, EOFError):
                raw, whole = _inflated(part, make)
                if not whole:
                    self.unread(_below(where, label), "it inflates to more than is read")
                yield label, ByteRange(MemorySource(raw, self.file), 0, len(raw))
                continue
            yield label, part


class _Watched:
    """One run of the watcher."""

    def __init__(
        self, scanner: _Scanner, chunk: bytes, start: int, base: int, *, as_joblib: bool = False
    ) -> None:
        self.judge = Judge(scanner.nested, base)
        self.machine = Watcher(
            chunk,
            file=scanner.file,
            limits=scanner.limits,
            observe=self.judge.observe,
            as_joblib=as_joblib,
        )
        self.pids = self.machine.pids
        self.root: Any = None
        self.end: int | None = None
        self.fault, self.short, self.limited = "", False, False
        self.machine_at = len(chunk)
        try:
            self.root, self.end = self.machine.run(start)
        except TruncatedFile as error:
            self.fault, self.short = error.message, True
        except CheckpointError as error:
            self.fault, self.limited = error.message, isinstance(error, LimitExceeded)
            self.short = self.machine.cut


def _below(where: str, name: str) -> str:
    return f"{where} > {name}" if where else name


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _inflater(head: bytes) -> Callable[[], Any] | None:
    """Return what makes a decompressor for bytes that begin so."""
    if head.startswith(b"\x1f\x8b"):
        return lambda: zlib.decompressobj(31)
    if head[:1] == b"\x78" and head[1:2] in (b"\x01", b"\x5e", b"\x9c", b"\xda"):
        return zlib.decompressobj
    if head.startswith(b"BZh"):
        return bz2.BZ2Decompressor
    if head.startswith((b"\xfd7zXZ\0", b"\x5d\0\0")):
        return lzma.LZMADecompressor
    return None


def _inflated(data: ByteRange, make: Callable[[], Any]) -> tuple[bytes, bool]:
    """Return what is inflated, the members of a stream one after the other, and whether it is all.

    Raises:
        CheckpointError: nothing can be inflated.
    """
    out, room = bytearray(), _MOST_INFLATED
    inflater, blocks, pending = make(), data.blocks(), b""
    try:
        while room > 0:
            block = pending or next(blocks, b"")
            if not block and getattr(inflater, "needs_input", True):
                break
            part = inflater.decompress(block, room)
            out += part
            room -= len(part)
            pending = getattr(inflater, "unconsumed_tail", b"")
            if inflater.eof:
                pending, inflater = inflater.unused_data, make()
    except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
        if not out:
            raise LimitExceeded(f"it cannot be inflated ({error})") from error
    return bytes(out), room > 0
