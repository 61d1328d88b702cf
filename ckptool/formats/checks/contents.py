"""Check the bytes that readers skip inside torch files, safetensors files and streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.finding import Finding
from ckptool.core.model import Global, Opaque, StorageRef, TensorRef
from ckptool.core.tree import walk_everything
from ckptool.errors import CheckpointError, CorruptFile, UnsupportedFormat
from ckptool.files import ByteRange, Source
from ckptool.formats.archive import open_archive
from ckptool.formats.base import Archive, Checksum, Findings, Probe
from ckptool.formats.checks.zip_headers import find_header_problems
from ckptool.formats.legacy_stream import (
    MACHINE_DESCRIPTION,
    MAGIC,
    MAGIC_BYTES,
    LegacyStream,
    unpickle_outer,
    unpickle_record,
)
from ckptool.formats.registry import find_folder_formats
from ckptool.formats.safetensors_header import LENGTH
from ckptool.formats.safetensors_library import find_disagreement
from ckptool.formats.sharded import check_total_size, open_index
from ckptool.formats.torch_tar import BLOCK, read_members
from ckptool.formats.torch_zip import (
    PICKLE,
    ZipContents,
    find_misplaced,
    find_refusals,
    parse_alignment,
    read_zip_contents,
)
from ckptool.limits import Limits
from ckptool.symbolic.calls import RECOGNIZED
from ckptool.words import are, counted, listed, printable

_BARE_PICKLES = ("torch-legacy", "torch-tar", "pickle")
"""Formats whose pickles have no checksum."""


def check_structure(probe: Probe) -> Findings:
    """Return the findings on a file that may not be readable: zip headers and checksums."""
    folder_format = next(
        (candidate for candidate in find_folder_formats(probe) if candidate.recognize(probe)), None
    )
    return _check_archive(probe) if folder_format is None else folder_format.collect_findings(probe)


def check_content(checkpoint: Checkpoint, probe: Probe) -> Findings:
    """Return the findings on a readable file, from the checks of its format.

    They are about the pickle, bytes that no reader uses, and content that torch or the library
    reads differently. For other formats there are only those about the pickle.

    Raises:
        CheckpointError: the file has changed since it was read.
    """
    details, problems, limits = checkpoint.details, list[Finding](), probe.limits
    has_checksum = checkpoint.format not in _BARE_PICKLES and not probe.is_folder
    if not has_checksum:  # a checksum already shows damage of the pickle
        problems += _find_pickle_problems(checkpoint)
    if not details.framed:
        text = (
            "a frame of the pickle does not end where stated: pickle reads past its end, or "
            "allocates all memory"
        )
        problems.append(Finding("pickle", text))
    findings = Findings(tuple(problems), notes=details.unreferenced)
    match checkpoint.format:
        case "torch-zip":
            contents = probe.compute_once(read_zip_contents)
            findings += Findings(notes=details.left_behind)
            return findings + _check_torch_zip(contents, unzipped=probe.is_folder)
        case "fsdp-ranks":
            return findings + Findings(notes=details.left_behind)
        case "safetensors-sharded" | "torch-sharded" if index := probe.compute_once(open_index):
            texts = check_total_size(index, checkpoint.root)
            return findings + Findings(tuple(Finding("total-size", text) for text in texts))
    if probe.source is None:
        return findings
    data = ByteRange(probe.source, 0, probe.source.size)
    end = data.length - details.dead_bytes  # of the object that is read
    match checkpoint.format:
        case "torch-legacy":
            findings += Findings(tuple(_find_machine_problems(data, limits)))
            return findings + _check_trailing(data, end, limits, magic_length=MAGIC_BYTES)
        case "pickle":
            return findings + _check_trailing(data, end, limits, magic_length=0)
        case "torch-tar":
            return findings + _check_tar(checkpoint, probe.source, limits)
        case "safetensors":
            difference = find_disagreement(probe.source, limits)
            if difference is not None:
                findings += Findings((Finding("library", difference),))
            return findings + _check_safetensors(probe.source)
    return findings


_KNOWN_FUNCTIONS = frozenset(
    {*RECOGNIZED, "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"}
)
_KNOWN_NAMES = frozenset(
    name
    for name in (qualified.rpartition(".")[2] for qualified in _KNOWN_FUNCTIONS)
    if name.startswith(("_re", "enc"))
)
"""Names that no other module has: `_rebuild_tensor_v2`, `_reconstruct`, `encode`."""
_KNOWN_MODULES = frozenset(
    {"torch._utils", "torch._tensor", "_codecs", "numpy.core.multiarray", "numpy._core.multiarray"}
)
_ARRAY_CLASSES = frozenset({"ndarray", "matrix", "memmap", "recarray"})


def _find_pickle_problems(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield findings on a memo or stack that no pickler leaves, and on impossible calls.

    Damage may be the cause. A function is reported once.
    """
    if not checkpoint.details.tidy:
        text = "the pickle leaves gaps in its memo or objects on its stack, which no pickler does"
        yield Finding("pickle", text)
    reported: set[str] = set()
    for node in walk_everything(checkpoint.root):
        for name, phrase in _find_odd_calls(node):
            if name not in reported:
                reported.add(name)
                yield Finding("pickle", f"the pickle calls {printable(name)} {phrase}")


def _find_odd_calls(node: Any) -> Iterator[tuple[str, str]]:
    """Yield functions that no pickler calls in this way, each with a phrase on the call.

    The phrase completes "the pickle calls NAME ...". Damage in a pickle without a checksum may
    change a name or an argument: then a function has an unknown name in a known module, or a known
    name elsewhere, or arguments that do not fit.
    """
    if isinstance(node, TensorRef) and isinstance(node.hooks, Opaque):
        yield node.hooks.class_name, "where every tensor has an OrderedDict"
    if not isinstance(node, Opaque) or node.maker == "persid":
        return
    if not isinstance(node.func, Global):
        if not isinstance(node.func, Opaque):
            yield f"an object of type {type(node.func).__name__}", "as if it were a function"
        return
    qualified_name, module, name = node.func.qualified, node.func.module, node.func.name
    args = node.args if isinstance(node.args, tuple) else ()
    has_storage = any(isinstance(arg, StorageRef) for arg in args)
    if qualified_name in _KNOWN_FUNCTIONS:
        # Valid calls of encode have become bytes, and those with a storage tensors.
        if name == "encode" or has_storage or any(isinstance(arg, TensorRef) for arg in args):
            yield qualified_name, "with arguments that it does not accept"
        elif name == "_reconstruct" and not (
            _are_array_classes(args[:1]) and _is_array_state(node.state)
        ):
            yield qualified_name, "for an object that is not an array"
    elif name in _KNOWN_NAMES or module in _KNOWN_MODULES:
        yield qualified_name, "(no such function)"
    elif has_storage:
        yield qualified_name, "on an unknown storage"
    elif qualified_name == "numpy.dtype" and not _is_dtype_call(args, node.state):
        yield qualified_name, "for a type with a state that numpy does not write"


def _is_array_state(state: Any) -> bool:
    """Return whether this is a pickled array's state: version, shape, dtype, order, content."""
    match state:
        case (1, tuple(), dtype, bool() | int(), _):
            return _is_dtype(dtype)
    return False


def _are_array_classes(classes: Sequence[Any]) -> bool:
    """Return whether all can be classes of arrays: numpy's own, or derived elsewhere."""
    return all(
        isinstance(cls, Global)
        and (
            cls.module.startswith("numpy.")
            # numpy.ndarray and my.Array are possible; numpy.Array and my.ndarray are damaged.
            or (cls.module == "numpy") is (cls.name in _ARRAY_CLASSES)
        )
        for cls in classes
    )


def _is_dtype(node: Any) -> bool:
    """Return whether a node is a numpy dtype, by its old class or one of the new ones."""
    if not isinstance(node, Opaque):
        return False
    return node.class_name == "numpy.dtype" or node.class_name.startswith("numpy.dtypes.")


def _is_dtype_call(args: tuple[Any, ...], state: Any) -> bool:
    """Return whether a call makes a numpy.dtype: code and two flags, then version and its items."""
    match args, state:
        case (str(), bool() | int(), bool() | int()), (int() as version, *items):
            return len(items) == version + 4  # each version has one more: 3 has 7 items
        case (str(), bool() | int(), bool() | int()), None:
            return True
    return False


_MAX_TRAILING_OBJECTS = 100
"""Streams that are read behind the first: a few hundred bytes are one."""
_BLOCK_BYTES = 1 << 20


def _find_machine_problems(data: ByteRange, limits: Limits) -> Iterator[Finding]:
    """Yield a finding if the facts about the writer's machine, which torch skips, are damaged.

    They are the third object of the stream, after the magic number and the version.
    """
    magic = MAGIC.match(data.read(0, min(MAGIC_BYTES, data.length)))
    if magic is None:
        return
    start = unpickle_record(data, magic.end(), limits).end  # after the version
    facts = unpickle_record(data, start, limits).root
    if not _are_machine_facts(facts):
        yield Finding(
            "header", f"the facts about the writer's machine at offset {start:,} are damaged"
        )


def _are_machine_facts(facts: Any) -> bool:
    """Return whether these are the facts that torch always writes; some may be missing."""
    if not isinstance(facts, dict) or not isinstance(facts.get("little_endian", True), bool):
        return False
    # Only the byte order depends on the machine.
    return {**facts, "little_endian": True}.items() <= MACHINE_DESCRIPTION.items()


def _check_trailing(data: ByteRange, end: int, limits: Limits, magic_length: int) -> Findings:
    """Return the findings on the bytes after the first object, which ends at `end`.

    More objects are a note, other bytes a problem; only the first of many objects are looked at.
    `magic_length` is that of the magic number of a torch.save stream, 0 for pickles.
    """
    position, object_count = end, 0
    try:
        while position < data.length and object_count < _MAX_TRAILING_OBJECTS:
            position = _skip_object(data, position, limits, magic_length)
            object_count += 1
    except CheckpointError:
        unread = data.length - position
        where = f"at offset {position:,}, after its end,"
        return Findings((Finding("trailing", f"{counted(unread, 'byte')} {where} are not read"),))
    if not object_count:
        return Findings()
    kind = "torch.save stream" if magic_length else "pickle"
    at_least = "" if position == data.length else "at least "
    objects = counted(object_count, f"more {kind}")
    return Findings(notes=(f"{at_least}{objects} after the first; only the first is read",))


def _skip_object(data: ByteRange, position: int, limits: Limits, magic_length: int) -> int:
    """Return the end of the pickle at `position`; with a `magic_length`, of the legacy stream.

    A stream begins with a magic number of at most this length.

    Raises:
        CheckpointError: no object begins there.
    """
    tail = data.slice(position, data.length - position)
    if not magic_length:
        return position + unpickle_outer(tail, limits).end
    if not MAGIC.match(tail.read(0, min(magic_length, tail.length))):
        raise CorruptFile("no other stream", file=data.source.name)
    return position + LegacyStream(tail, limits).end


def _check_tar(checkpoint: Checkpoint, source: Source, limits: Limits) -> Findings:
    """Return the findings on unread bytes of a tar, and on padding that is not zero."""
    problems = []
    if checkpoint.details.dead_bytes:
        dead = checkpoint.details.dead_bytes
        text = f"{counted(dead, 'byte')} in its members {are(dead)} not read"
        problems.append(Finding("trailing", text))
    members = read_members(source, limits)
    end = 0
    for name, member in members.items():
        stop = member.offset + member.length
        padded = -(-stop // BLOCK) * BLOCK
        if padded > source.size:
            problems.append(Finding("truncated", "its last block is truncated", (name,)))
            return Findings(tuple(problems))
        if source.read(stop, padded - stop).strip(b"\0"):
            problems.append(
                Finding("padding", "the padding of its last block is not zero", (name,))
            )
        end = max(end, padded)
    if any(
        block.strip(b"\0")
        for block in ByteRange(source, end, source.size - end).iterate_blocks(_BLOCK_BYTES)
    ):
        trailing = counted(source.size - end, "byte")
        problems.append(Finding("trailing", f"{trailing} after its last member are not zero"))
    return Findings(tuple(problems))


def _check_safetensors(source: Source) -> Findings:
    """Return the findings on header rules of the format that no reader enforces."""
    (length,) = LENGTH.unpack(source.read(0, LENGTH.size))
    text = source.read(LENGTH.size, length)
    problems = []
    if not text.startswith(b"{"):
        problems.append(Finding("header", 'the header does not begin with "{"'))
    if text.rstrip(b" ")[-1:] != b"}":
        problems.append(Finding("padding", "the padding of the header is not spaces"))
    note = f"tensors begin at {LENGTH.size + length:,}, which is not a multiple of 8"
    return Findings(tuple(problems), () if length % LENGTH.size == 0 else (note,))


def _check_archive(probe: Probe) -> Findings:
    """Return the findings on the headers of a zip, and its checksums; none for a folder.

    Errors of the reader are reported when the file is opened.
    """
    if probe.source is None:
        return Findings()
    data = ByteRange(probe.source, 0, probe.source.size)
    try:
        archive = probe.compute_once(open_archive)
    except UnsupportedFormat:  # damage may have changed the method or a flag
        return Findings(find_header_problems(data, only_unsupported=True))
    except CheckpointError:
        return Findings()
    if not archive.sources:  # it is not a zip
        return Findings()
    stated = [record for record in archive.records.values() if record.crc32 is not None]
    foreign = tuple(Finding("foreign", text) for text in archive.notes)
    return Findings(
        (*find_header_problems(data), *foreign),
        tuple(_describe_gaps(archive, len(archive.records) - len(stated))),
        tuple(
            Checksum(_record_path(archive, record.name), record.data, record.crc32 or 0)
            for record in stated
        ),
        len(archive.records),
    )


def _record_path(archive: Archive, name: str) -> str:
    return f"{archive.folder}/{name}" if archive.folder else name


def _describe_gaps(archive: Archive, unstated: int) -> Iterator[str]:
    """Yield notes on records without a CRC-32, and on unused bytes between the records."""
    if unstated:
        yield f"no CRC-32 for {counted(unstated, 'record')}, so their bytes cannot be checked"
    if archive.dead_bytes:
        yield (
            f"{counted(archive.dead_bytes, 'byte')} between the records are unused, as after "
            "an in-place edit"
        )


def _check_torch_zip(contents: ZipContents, *, unzipped: bool) -> Findings:
    """Return the findings on a readable zip that torch rejects or reads differently.

    An unzipped one is read by ckptool only, so only its pickle is checked.
    """
    archive, problems = contents.storages.archive, list[Finding]()
    record = archive.find(PICKLE)
    if record is not None and (trailing := record.data.length - contents.unpickled.end):
        text = f"{counted(trailing, 'byte')} after the end of the pickle are not read"
        problems.append(Finding("trailing", text, (_record_path(archive, record.name),)))
    if not unzipped:
        problems += [
            # An empty name means the whole archive.
            Finding(kind, f"{text}: torch rejects it", (name and _record_path(archive, name),))
            for kind, name, text in find_refusals(archive, contents)
        ]
        problems += _find_compressed(contents)
        problems += _find_misplaced(archive, contents)
    return Findings(tuple(problems))


def _find_compressed(contents: ZipContents) -> Iterator[Finding]:
    """Yield a finding on compressed storages."""
    keys = [key for key, storage in contents.storages.by_key.items() if storage.compressed]
    if keys:
        yield Finding(
            "compressed",
            f"{counted(len(keys), 'storage')} compressed ({listed(keys, 3)}): "
            "torch.load(mmap=True) reads them as garbage; rewrite the file to store them "
            "uncompressed",
        )


def _find_misplaced(archive: Archive, contents: ZipContents) -> Iterator[Finding]:
    """Yield a finding if torch computes wrong offsets because of `.format_version`.

    From version 1 on, torch computes them from the order of storages and their alignment. In a file
    on another machine they are unknown: its local headers have not been read.
    """
    is_far = any(source.is_far for source in archive.sources)
    if contents.small_records.get(".format_version", "") < "1" or is_far:
        return
    alignment = parse_alignment(contents.small_records.get(".storage_alignment"))
    if alignment is None:
        yield Finding(
            "offsets",
            "it should be a number, the alignment from which torch computes the offsets of "
            "storages",
            (_record_path(archive, ".storage_alignment"),),
        )
        return
    storages = contents.storages.by_key
    candidates = (
        archive.find(f"data/{key}") for key, storage in storages.items() if storage.data is not None
    )
    used = [record for record in candidates if record is not None and not record.compressed]
    elsewhere = find_misplaced(archive, used, alignment)
    if elsewhere:
        yield Finding(
            "offsets",
            "torch computes the offsets of storages because of the record .format_version, "
            f"but {len(elsewhere):,} of {counted(len(used), 'storage')} are elsewhere: "
            "torch.load(map_location='meta') and readers that compute offsets get wrong "
            "ones; rewrite the file to fix it",
            (_record_path(archive, elsewhere[0].name),),
        )
