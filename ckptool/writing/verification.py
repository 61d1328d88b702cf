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
from ckptool.files.checksums import compute_crc32, compute_crc32s
from ckptool.files.source import Progress, Stated
from ckptool.files.strided import swap_blocks
from ckptool.files.threads import run_in_order
from ckptool.formats import load_format, open_checkpoint
from ckptool.formats.archive import read_zip
from ckptool.formats.base import NewFile
from ckptool.formats.safetensors_library import find_disagreement
from ckptool.formats.torch_zip import TORCH_ZIP, read_contents
from ckptool.limits import DEFAULT_LIMITS
from ckptool.symbolic.encoder import Encoded, encode
from ckptool.words import printable

_MIN_THREADED_BYTES = 1 << 20
"""The minimum bytes of a run for its own thread."""
_SAMPLE_BYTES = 4096
"""Bytes at both ends of a run that are compared even if its checksum is right."""
_BLOCK_BYTES = 256 << 10
"""Bytes read at a time for a checksum, so that they are still in the cache."""
_TREE_EXTENSIONS = (".pkl", ".json")
"""The extensions of the records with the tree."""


@contextmanager
def check_sources_meanwhile(checkpoint: Checkpoint, format: str) -> Iterator[Callable[[], None]]:
    """Check the bytes that a file of `format` copies from the sources, in a thread.

    The block gets a function that waits for the thread and raises its error. Little data, or a
    source that only one thread can read, is checked before the block. Inputs of a cast or a mean
    are checked when they are computed. A CRC-32 that is copied from zip to zip is checked by later
    readers.

    Raises:
        CorruptFile: if a record is damaged.
        UnreadableFile: if the system cannot read it.
    """
    records = _find_records_to_check(checkpoint, format)
    threaded: list[Stated] = []
    unthreaded = records
    if sum(data.length for _, data, _ in records) >= _MIN_THREADED_BYTES:
        threaded, unthreaded = [], []
        for record in records:
            _, data, _ = record
            (threaded if data.source.is_shared else unthreaded).append(record)
    _check_records(unthreaded, has_ended=lambda: False)
    if not threaded:
        yield lambda: None
        return
    from concurrent.futures import ThreadPoolExecutor  # as in `_compare`

    with ThreadPoolExecutor(1) as pool:
        has_ended = Event()
        checking = pool.submit(_check_records, threaded, has_ended.is_set)
        try:
            yield checking.result
        finally:
            has_ended.set()


def _check_records(records: list[Stated], has_ended: Callable[[], bool]) -> None:
    """Compare the CRC-32 of records with the stated one; stop once `has_ended` returns True.

    Raises:
        CorruptFile: if a record is damaged.
    """

    def stop_if_ended(_: int) -> None:
        """Stop the check if the write has ended."""
        if has_ended():
            raise InterruptedError("the checksums are no longer needed")

    actual_crcs = compute_crc32s([data for _, data, _ in records], stop_if_ended)
    for (name, data, stated), crc32 in zip(records, actual_crcs, strict=True):
        if isinstance(crc32, CorruptFile):
            raise crc32
        if crc32 != stated:
            raise CorruptFile(
                f"record {name!r} is damaged: CRC-32 is {crc32:08x}, expected {stated:08x}",
                file=data.source.name,
                hint="download it again or use another copy; ckptool verify lists the damaged "
                "records, ckptool convert --exclude leaves them out",
            )


def _find_records_to_check(checkpoint: Checkpoint, format: str) -> list[Stated]:
    """Return the records of local sources to check before a file of `format` is written from them.

    They are the records of the tree, and those with tensor data that is copied without their
    CRC-32, so that later readers could not detect damage.
    """
    keeps_crc = load_format(format).hands_on_crc
    copied_offsets: dict[int, list[int]] = {}  # by the id() of a source
    for node in walk_everything(checkpoint.root):
        storage = node.storage if isinstance(node, (TensorRef, StorageRef)) else None
        # The stated CRC-32 is of the whole storage, even if only a part of it is written.
        data = None if storage is None else storage.whole or storage.data
        if storage is None or data is None or not data.length:
            continue
        is_copied_verbatim = storage.byteorder == "little" and not storage.compressed
        if not (keeps_crc and is_copied_verbatim and storage.crc32 is not None):
            for origin in _find_origins(data):
                copied_offsets.setdefault(id(origin.source), []).append(origin.offset)
    for offsets in copied_offsets.values():
        offsets.sort()

    def is_copied(data: ByteRange) -> bool:
        """Return True if one of the copied ranges begins in `data`."""
        offsets = copied_offsets.get(id(data.source), [])
        first = bisect_left(offsets, data.offset)
        return first < len(offsets) and offsets[first] < data.offset + data.length

    return [
        (name, data, crc32)
        for source in checkpoint.sources
        if not source.is_far  # remote bytes are checked while they are copied
        for name, data, crc32 in source.stated
        if name.endswith(_TREE_EXTENSIONS) or is_copied(data)
    ]


def _find_origins(data: ByteRange) -> Iterator[ByteRange]:
    """Yield the ranges of files that a range is composed of, in any order."""
    pending = [data]
    while pending:
        part = pending.pop()
        if part.source.rearranges:
            pending.extend(part.source.made_of)
        else:
            yield part


@dataclass(frozen=True, slots=True)
class _Run:
    """A range of the new file, and its expected bytes."""

    name: str
    """The tensor or storage, for messages."""
    written: ByteRange
    """The range in the new file."""
    expected: Callable[[], Iterator[bytes]]
    """Returns the expected bytes, read or computed from the source."""
    crc32: int | None = None
    """The expected CRC-32, if a source states it."""
    data: ByteRange | None = None
    """The expected bytes as one range of a source, if they are one."""


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
        written = open_checkpoint(path, source=FileSource(path))
    except CheckpointError as error:
        raise _verification_error(f"it cannot be read back ({error.message})") from error
    with written:
        is_tensors_only = load_format(written.format).tensors_only
        iterate_runs = _iterate_tensor_runs if is_tensors_only else _iterate_storage_runs
        runs = list(iterate_runs(expected, written))
        _compare_runs(runs, streamed, progress)
        if is_tensors_only and (text := find_disagreement(written.sources[0], DEFAULT_LIMITS)):
            raise _verification_error(text)


def verify_file(file: NewFile, output: FileOutput, progress: Progress | None) -> None:
    """Compare a written file with its expected content: a checkpoint, or the members of an archive.

    A file without such content, for example an index, is not checked.

    Raises:
        WriteError, CorruptFile: as in `verify`.
    """
    if file.members:  # torch.save files inside this one
        with closing(FileSource(output.name)) as source:
            runs: list[_Run] = []
            for member in file.members:
                data = ByteRange(source, member.offset, member.length)
                try:
                    contents = read_contents(read_zip(data, DEFAULT_LIMITS), DEFAULT_LIMITS)
                except CheckpointError as error:
                    raise _verification_error(
                        f"it cannot be read back ({error.message})"
                    ) from error
                written = replace(
                    member.checkpoint, root=contents.unpickled.root, format=TORCH_ZIP.name
                )
                runs.extend(_iterate_storage_runs(member.checkpoint, written))
            _compare_runs(runs, output.streamed, progress)
    if file.checkpoint is not None:
        verify(file.checkpoint, output.name, output.streamed, progress)


def _verification_error(fact: str) -> WriteError:
    """Return the error for a file that differs from its expected content."""
    return WriteError(
        f"verification failed, so nothing was kept: {fact}",
        hint="try again; if it fails again, suspect the disk or the memory",
    )


def _compare_runs(
    runs: list[_Run], streamed: Mapping[int, Streamed], progress: Progress | None
) -> None:
    """Compare all runs, and report the progress in bytes.

    Raises:
        WriteError: for the first run that differs.
    """
    total = sum(run.written.length for run in runs)
    done = 0
    for run, matches in _check_runs(runs, streamed):
        if not matches:
            raise _verification_error(
                f"the bytes of {printable(run.name)} differ from what was written"
            )
        done += run.written.length
        if progress is not None:
            progress(done, total)


def _check_runs(runs: list[_Run], streamed: Mapping[int, Streamed]) -> Iterator[tuple[_Run, bool]]:
    """Yield each run with True if it is correct; large ones with a known checksum in threads.

    Runs with a known checksum are read once, the others are compared byte by byte. The threads
    read only the new file. The expected bytes may be inflated or computed from a source that keeps
    a position, so only this thread reads them.
    """
    threaded: list[tuple[_Run, int]] = []
    unthreaded: list[tuple[_Run, int | None]] = []
    for run in runs:
        crc = _find_expected_crc(run, streamed)
        is_large = run.written.length >= _MIN_THREADED_BYTES
        if crc is not None and is_large and run.written.source.is_shared:
            threaded.append((run, crc))
        else:
            unthreaded.append((run, crc))

    def compute_run(run_and_crc: tuple[_Run, int]) -> int:
        """Return the CRC-32 of a run in the new file, to be compared with the expected one."""
        run, _expected_crc = run_and_crc
        return compute_crc32(run.written.iterate_blocks(_BLOCK_BYTES))

    # The results have no variable: the traceback of an error would keep their threads.
    for (run, crc), actual_crc in zip(threaded, run_in_order(compute_run, threaded), strict=True):
        yield run, _has_checksum(run, crc, actual_crc)
    for run, expected_crc in unthreaded:
        if expected_crc is None:
            yield run, _is_equal(run)
        else:
            actual_crc = compute_run((run, expected_crc))
            yield run, _has_checksum(run, expected_crc, actual_crc)


def _find_expected_crc(run: _Run, streamed: Mapping[int, Streamed]) -> int | None:
    """Return the CRC-32 that the run should have; None: its bytes must be compared.

    A source states it, or it was computed while the run was written (`streamed`, by offset).
    """
    if run.crc32 is not None:
        return run.crc32
    streamed_run = streamed.get(run.written.offset)
    if streamed_run is None or streamed_run.length != run.written.length:
        return None
    # With a streamed checksum, only both ends are compared with the source: its bytes must be one
    # range, and more than the ends.
    if run.data is None or run.written.length <= _SAMPLE_BYTES:
        return None
    return streamed_run.crc32


def _has_checksum(run: _Run, expected: int, actual: int) -> bool:
    """Return True if the CRC-32 `actual` in the new file is the expected one.

    A checksum that was computed during the write does not show that the right tensor was written,
    so both ends are compared as well.

    Raises:
        CorruptFile: if the source itself does not have the CRC-32 that it states.
    """
    if run.crc32 is None:  # the checksum was computed during the write
        return actual == expected and run.data is not None and _has_same_ends(run.written, run.data)
    if actual != expected:
        _check_source(run)
    return actual == expected


def _is_equal(run: _Run) -> bool:
    """Return True if the bytes of a run are the expected ones, and as many."""
    position = 0
    for block in run.expected():
        if run.written.read(position, len(block)) != block:
            return False
        position += len(block)
    return position == run.written.length


def _check_source(run: _Run) -> None:
    """Find out whether the source is damaged, after the new file differs from it in a run.

    Raises:
        CorruptFile: if the bytes of the source do not have the CRC-32 that its file states.
    """
    if compute_crc32(run.expected()) != run.crc32:
        raise CorruptFile(
            f"{printable(run.name)} is damaged: its CRC-32 differs from the one in the "
            "zip directory",
            file=run.data.source.name if run.data else None,
            hint="add --no-verify to copy it anyway",
        )


def _has_same_ends(written: ByteRange, expected: ByteRange) -> bool:
    """Return True if the first and last bytes of two ranges are equal."""
    length = min(_SAMPLE_BYTES, written.length)
    starts = (0, written.length - length)
    return all(written.read(start, length) == expected.read(start, length) for start in starts)


def _iterate_storage_runs(expected: Checkpoint, written: Checkpoint) -> Iterator[_Run]:
    """Yield the run of every storage in the new file, after comparing the pickles of both trees.

    Raises:
        WriteError: if the pickles differ.
    """
    legacy = load_format(written.format).legacy
    expected_pickle, written_pickle = (
        encode(checkpoint.root, legacy=legacy) for checkpoint in (expected, written)
    )
    if expected_pickle.data != written_pickle.data or len(expected_pickle.storages) != len(
        written_pickle.storages
    ):
        raise _verification_error("its keys, values or objects differ from what was written")
    for index, storage in enumerate(written_pickle.storages):
        if storage.data is not None:
            yield _make_storage_run(expected_pickle, index, storage.data, storage.byteorder)


def _make_storage_run(expected: Encoded, index: int, written: ByteRange, byteorder: str) -> _Run:
    """Return the run of one storage in the new file, `written`, which has this `byteorder`.

    The expected bytes are those of the storage `index` in the source, swapped if its byte order
    differs.

    Raises:
        WriteError: if the sizes differ.
    """
    storage = expected.storages[index]
    name = f"storage {storage.key!r}"
    data = storage.data
    if data is None or data.length != written.length:
        expected_size = 0 if data is None else data.length
        raise _verification_error(
            f"{name} has {written.length:,} bytes, expected {expected_size:,}"
        )
    if storage.byteorder != byteorder:
        swap = BY_NAME[expected.dtypes[index]].swap_size
        return _Run(name, written, lambda: swap_blocks(data.iterate_blocks(), swap))
    plain_crc = None if storage.compressed else storage.crc32
    return _Run(name, written, data.iterate_blocks, plain_crc, data)


def _iterate_tensor_runs(expected: Checkpoint, written_file: Checkpoint) -> Iterator[_Run]:
    """Yield the run of every tensor of a flat state dict; a run of tied keys once.

    Raises:
        WriteError: if keys, dtypes or shapes differ.
    """
    expected_tensors, written_tensors = (
        {path[-1]: tensor for path, tensor in checkpoint.tensors() if len(path) == 1}
        for checkpoint in (expected, written_file)
    )
    if list(expected_tensors) != list(written_tensors):
        raise _verification_error("its keys or their order differ from what was written")
    seen_offsets: set[int] = set()
    for name, tensor in expected_tensors.items():
        written = written_tensors[name]
        if (tensor.dtype, tensor.shape) != (written.dtype, written.shape):
            raise _verification_error(
                f"{printable(name)} has a different dtype or shape than what was written"
            )
        if written.nbytes and written.data.offset not in seen_offsets:
            seen_offsets.add(written.data.offset)
            yield _make_tensor_run(name, tensor, written.data)


def _make_tensor_run(name: str, tensor: TensorRef, written: ByteRange) -> _Run:
    """Return the run of one tensor in the new file, `written`, with the bytes of the source.

    The CRC-32 of a storage is only that of a tensor that fills it.
    """
    storage = tensor.storage
    if storage is None or not tensor.is_verbatim:
        return _Run(name, written, tensor.content)
    is_whole = tensor.nbytes == storage.nbytes and not storage.compressed
    return _Run(name, written, tensor.content, storage.crc32 if is_whole else None, tensor.data)
