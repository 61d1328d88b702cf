"""Check sources while they are copied, and read a file back before it gets its final name."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from threading import Event

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import StorageRef, TensorRef
from ckptool.core.tree import walk_everything
from ckptool.dtypes import BY_NAME
from ckptool.errors import CheckpointError, CorruptFile, WriteError
from ckptool.files import ByteRange, FileSource
from ckptool.files.atomic import FileOutput, Streamed
from ckptool.files.checksums import crc32_of, crc32s
from ckptool.files.source import Progress, Stated
from ckptool.files.strided import swapped
from ckptool.files.threads import in_order
from ckptool.formats import load_format, open_checkpoint
from ckptool.formats.archive import read_zip
from ckptool.formats.base import NewFile
from ckptool.formats.safetensors_library import find_disagreement
from ckptool.formats.torch_zip import TORCH_ZIP, read_contents
from ckptool.limits import DEFAULT_LIMITS
from ckptool.symbolic.encoder import Encoded, encode
from ckptool.words import printable

_LARGE = 1 << 20
"""The minimum bytes of a run for its own thread."""
_SAMPLE = 4096
"""Bytes at both ends that are computed again if a checksum of everything is known."""
_PART = 256 << 10
"""Bytes read at a time for a checksum, so that they are still in the cache."""
_HEADERS = (".pkl", ".json")
"""The extensions of the records with the tree."""


@contextmanager
def source_check(checkpoint: Checkpoint, format: str) -> Iterator[Callable[[], None]]:
    """Check the bytes that a file of `format` copies from the sources, in parallel threads.

    The block gets a function that waits for the threads and raises their errors. Inputs of a cast
    or a mean are checked when they are computed. A CRC-32 that is copied from zip to zip is checked
    by later readers.

    Raises:
        CorruptFile: if a record is damaged.
        UnreadableFile: if the system cannot read it.
    """
    records = _records_to_check(checkpoint, format)
    large = sum(data.length for _, data, _ in records) >= _LARGE
    apart = [one for one in records if large and one[1].source.is_shared]
    _check([one for one in records if not (large and one[1].source.is_shared)], lambda: False)
    if not apart:
        yield lambda: None
        return
    from concurrent.futures import ThreadPoolExecutor  # as in `_compare`

    with ThreadPoolExecutor(1) as pool:
        ended = Event()
        checking = pool.submit(_check, apart, ended.is_set)
        try:
            yield checking.result
        finally:
            ended.set()


def _check(records: list[Stated], has_ended: Callable[[], bool]) -> None:
    def told(_: int) -> None:
        if has_ended():
            raise InterruptedError("the checksums are no longer needed")

    found = crc32s([data for _, data, _ in records], told)
    for (name, data, stated), crc32 in zip(records, found, strict=True):
        if isinstance(crc32, CorruptFile):
            raise crc32
        if crc32 != stated:
            raise CorruptFile(
                f"record {name!r} is damaged: CRC-32 is {crc32:08x}, expected {stated:08x}",
                file=data.source.name,
                hint="download it again or use another copy; ckptool verify lists the damaged "
                "records, ckptool convert --exclude leaves them out",
            )


def _records_to_check(checkpoint: Checkpoint, format: str) -> list[Stated]:
    """Return the records that are copied into a file of `format` without their CRC-32."""
    handed_on = load_format(format).hands_on_crc
    starts: dict[int, list[int]] = {}
    for node in walk_everything(checkpoint.root):
        storage = node.storage if isinstance(node, (TensorRef, StorageRef)) else None
        data = None if storage is None else storage.whole or storage.data
        if storage is None or data is None or not data.length:
            continue
        plain = storage.byteorder == "little" and not storage.compressed
        if not (handed_on and plain and storage.crc32 is not None):
            for one in _origins(data):
                starts.setdefault(id(one.source), []).append(one.offset)
    for known in starts.values():
        known.sort()

    def is_read(data: ByteRange) -> bool:
        known = starts.get(id(data.source), [])
        first = bisect_left(known, data.offset)
        return first < len(known) and known[first] < data.offset + data.length

    return [
        (name, data, crc32)
        for source in checkpoint.sources
        if not source.is_far  # remote bytes are checked while they are copied
        for name, data, crc32 in source.stated
        if name.endswith(_HEADERS) or is_read(data)
    ]


def _origins(data: ByteRange) -> Iterator[ByteRange]:
    """Yield the ranges that a range is composed of, in any order."""
    todo = [data]
    while todo:
        one = todo.pop()
        if one.source.rearranges:
            todo.extend(one.source.made_of)
        else:
            yield one


@dataclass(frozen=True, slots=True)
class _Run:
    """A range of the new file, and its expected bytes."""

    name: str
    found: ByteRange
    expected: Callable[[], Iterator[bytes]]
    crc32: int | None = None
    """The expected CRC-32, if a source states it."""
    data: ByteRange | None = None
    """The expected bytes, as one range."""


def verify(
    expected: Checkpoint,
    path: str,
    streamed: Mapping[int, Streamed],
    progress: Progress | None = None,
) -> None:
    """Read the file at `path` and compare it with the checkpoint that it was written from.

    The pickle of the tree must be the same byte for byte (for safetensors: keys, dtypes and shapes,
    also as read by the library `safetensors` if it is installed). The bytes of every tensor must
    match, by CRC-32 if the directory of the source states one, or if they were streamed
    (`streamed`: by offset) and a sample of both ends matches; else byte by byte.

    Raises:
        WriteError: if something differs; the message shows it.
        CorruptFile: if the bytes of a source do not match its own directory.
    """
    try:
        found = open_checkpoint(path, source=FileSource(path))
    except CheckpointError as error:
        raise _wrong(f"it cannot be read back ({error.message})") from error
    with found:
        flat = load_format(found.format).tensors_only
        runs = list((_tensor_runs if flat else _storage_runs)(expected, found))
        _compare(runs, streamed, progress)
        if flat and (text := find_disagreement(found.sources[0], DEFAULT_LIMITS)):
            raise _wrong(text)


def verify_file(file: NewFile, output: FileOutput, progress: Progress | None) -> None:
    """Compare a written file with its expected content; an index is not checked.

    Raises:
        WriteError, CorruptFile: as in `verify`.
    """
    if file.members:  # files of torch.save's in this one
        with closing(FileSource(output.name)) as source:
            runs: list[_Run] = []
            for one in file.members:
                data = ByteRange(source, one.offset, one.length)
                try:
                    contents = read_contents(read_zip(data, DEFAULT_LIMITS), DEFAULT_LIMITS)
                except CheckpointError as error:
                    raise _wrong(f"it cannot be read back ({error.message})") from error
                found = replace(one.checkpoint, root=contents.unpickled.root, format=TORCH_ZIP.name)
                runs.extend(_storage_runs(one.checkpoint, found))
            _compare(runs, output.streamed, progress)
    if file.checkpoint is not None:
        verify(file.checkpoint, output.name, output.streamed, progress)


def _wrong(fact: str) -> WriteError:
    return WriteError(
        f"verification failed, so nothing was kept: {fact}",
        hint="try again; if it fails again, suspect the disk or the memory",
    )


def _compare(runs: list[_Run], streamed: Mapping[int, Streamed], progress: Progress | None) -> None:
    total = sum(run.found.length for run in runs)
    done = 0
    for run, matches in _verdicts(runs, streamed):
        if not matches:
            raise _wrong(f"the bytes of {printable(run.name)} differ from what was written")
        done += run.found.length
        if progress is not None:
            progress(done, total)


def _verdicts(runs: list[_Run], streamed: Mapping[int, Streamed]) -> Iterator[tuple[_Run, bool]]:
    """Yield whether each run is correct, large ones with a known checksum first.

    The threads read only the new file. The expected bytes may be inflated or computed from a source
    that keeps a position, so only this thread reads them.
    """
    apart: list[tuple[_Run, int]] = []
    here: list[tuple[_Run, int | None]] = []
    for run in runs:
        crc = _checksum(run, streamed)
        if crc is not None and run.found.length >= _LARGE and run.found.source.is_shared:
            apart.append((run, crc))
        else:
            here.append((run, crc))

    def summed(one: tuple[_Run, int]) -> int:
        return crc32_of(one[0].found.blocks(_PART))

    # The results have no variable: the traceback of an error would keep their threads.
    for (run, crc), has in zip(apart, in_order(summed, apart), strict=True):
        yield run, _has_checksum(run, crc, has)
    for run, wanted in here:
        if wanted is None:
            yield run, _is_equal(run)
        else:
            yield run, _has_checksum(run, wanted, crc32_of(run.found.blocks(_PART)))


def _checksum(run: _Run, streamed: Mapping[int, Streamed]) -> int | None:
    """Return the CRC-32 that the run should have; None: its bytes must be compared."""
    if run.crc32 is not None:
        return run.crc32
    there = streamed.get(run.found.offset)
    if there is None or there.length != run.found.length:
        return None
    return None if run.data is None or run.found.length <= _SAMPLE else there.crc32


def _has_checksum(run: _Run, wanted: int, found: int) -> bool:
    """Return True if the CRC-32 `found` in the new file is the expected one."""
    if run.crc32 is None:
        return found == wanted and run.data is not None and _ends_match(run.found, run.data)
    if found != wanted:
        _check_source(run)
    return found == wanted


def _is_equal(run: _Run) -> bool:
    """Return True if the bytes are equal."""
    position = 0
    for block in run.expected():
        if run.found.read(position, len(block)) != block:
            return False
        position += len(block)
    return position == run.found.length


def _check_source(run: _Run) -> None:
    """Distinguish a source that does not match its directory from a failed copy.

    Raises:
        CorruptFile: if the source is damaged.
    """
    if crc32_of(run.expected()) != run.crc32:
        raise CorruptFile(
            f"{printable(run.name)} is damaged: its CRC-32 differs from the one in the "
            "zip directory",
            file=run.data.source.name if run.data else None,
            hint="add --no-verify to copy it anyway",
        )


def _ends_match(found: ByteRange, wanted: ByteRange) -> bool:
    """Return True if both ends are those of the right tensor, which a checksum does not show."""
    length = min(_SAMPLE, found.length)
    starts = (0, found.length - length)
    return all(found.read(start, length) == wanted.read(start, length) for start in starts)


def _storage_runs(expected: Checkpoint, found: Checkpoint) -> Iterator[_Run]:
    """Yield every storage of two trees with equal pickles."""
    legacy = load_format(found.format).legacy
    want, have = (encode(one.root, legacy=legacy) for one in (expected, found))
    if want.data != have.data or len(want.storages) != len(have.storages):
        raise _wrong("its keys, values or objects differ from what was written")
    for index, storage in enumerate(have.storages):
        if storage.data is not None:
            yield _storage_run(want, index, storage.data, storage.byteorder)


def _storage_run(want: Encoded, index: int, found: ByteRange, byteorder: str) -> _Run:
    storage = want.storages[index]
    name = f"storage {storage.key!r}"
    data = storage.data
    if data is None or data.length != found.length:
        wanted = 0 if data is None else data.length
        raise _wrong(f"{name} has {found.length:,} bytes, expected {wanted:,}")
    if storage.byteorder != byteorder:
        swap = BY_NAME[want.dtypes[index]].swap_size
        return _Run(name, found, lambda: swapped(data.blocks(), swap))
    plain_crc = None if storage.compressed else storage.crc32
    return _Run(name, found, data.blocks, plain_crc, data)


def _tensor_runs(expected: Checkpoint, found: Checkpoint) -> Iterator[_Run]:
    """Yield every tensor of a flat state dict, by key."""
    want, have = (
        {path[-1]: tensor for path, tensor in one.tensors() if len(path) == 1}
        for one in (expected, found)
    )
    if list(want) != list(have):
        raise _wrong("its keys or their order differ from what was written")
    seen: set[int] = set()
    for name, tensor in want.items():
        there = have[name]
        if (tensor.dtype, tensor.shape) != (there.dtype, there.shape):
            raise _wrong(f"{printable(name)} has a different dtype or shape than what was written")
        if there.nbytes and there.data.offset not in seen:
            seen.add(there.data.offset)
            yield _tensor_run(name, tensor, there.data)


def _tensor_run(name: str, tensor: TensorRef, found: ByteRange) -> _Run:
    storage = tensor.storage
    if storage is None or not tensor.is_verbatim:
        return _Run(name, found, tensor.content)
    whole = tensor.nbytes == storage.nbytes and not storage.compressed
    return _Run(name, found, tensor.content, storage.crc32 if whole else None, tensor.data)
