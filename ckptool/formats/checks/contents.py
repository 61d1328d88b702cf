"""What readers pass over inside torch files, safetensors files and streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.finding import Finding
from ckptool.core.model import Global, Opaque, StorageRef, TensorRef
from ckptool.core.tree import everything
from ckptool.errors import CheckpointError, CorruptFile, UnsupportedFormat
from ckptool.files import ByteRange, Source
from ckptool.formats.archive import open_archive
from ckptool.formats.base import Archive, Checksum, Findings, Probe
from ckptool.formats.checks.zip_headers import header_problems
from ckptool.formats.legacy_stream import (
    MACHINE,
    MAGIC,
    MAGIC_BYTES,
    LegacyStream,
    unpickle_outer,
    unpickle_record,
)
from ckptool.formats.registry import folder_formats
from ckptool.formats.safetensors_header import LENGTH
from ckptool.formats.safetensors_library import disagreement
from ckptool.formats.sharded import open_index, total_size_notes
from ckptool.formats.torch_tar import BLOCK, read_members
from ckptool.formats.torch_zip import (
    PICKLE,
    ZipContents,
    alignment_of,
    contents_of,
    misplaced,
    refusals,
)
from ckptool.limits import Limits
from ckptool.symbolic.calls import RECOGNIZED
from ckptool.words import are, counted, listed, printable

_BARE_PICKLES = ("torch-legacy", "torch-tar", "pickle")
"""Formats whose pickles have no checksum."""


def structure(probe: Probe) -> Findings:
    """Return what can be said of a file that may not be readable: zip headers and checksums."""
    folder = next((known for known in folder_formats(probe) if known.recognize(probe)), None)
    return _archive_findings(probe) if folder is None else folder.findings(probe)


def content(checkpoint: Checkpoint, probe: Probe) -> Findings:
    """Return what can be said of a file that has been read.

    Raises:
        CheckpointError: the file is not what it was when it was read.
    """
    details, problems, limits = checkpoint.details, list[Finding](), probe.limits
    if checkpoint.format in _BARE_PICKLES or probe.is_folder:
        problems += _pickle_problems(checkpoint)
    if not details.framed:
        text = (
            "a frame of the pickle does not end where stated: pickle reads past its end, or "
            "allocates all memory"
        )
        problems.append(Finding("pickle", text))
    found = Findings(tuple(problems), details.unreferenced)
    match checkpoint.format:
        case "torch-zip":
            contents = probe.ask(contents_of)
            found += Findings(notes=details.left_behind)
            return found + _torch_zip_findings(contents, unzipped=probe.is_folder)
        case "fsdp-ranks":
            return found + Findings(notes=details.left_behind)
        case "safetensors-sharded" | "torch-sharded" if index := probe.ask(open_index):
            texts = total_size_notes(index, checkpoint.root)
            return found + Findings(tuple(Finding("total-size", text) for text in texts))
    if probe.source is None:
        return found
    data = ByteRange(probe.source, 0, probe.source.size)
    end = data.length - details.dead_bytes
    match checkpoint.format:
        case "torch-legacy":
            found += Findings(tuple(_machine_faults(data, limits)))
            return found + _check_trailing(data, end, limits, MAGIC_BYTES)
        case "pickle":
            return found + _check_trailing(data, end, limits, 0)
        case "torch-tar":
            return found + _tar_findings(checkpoint, probe.source, limits)
        case "safetensors":
            differs = disagreement(probe.source, limits)
            if differs is not None:
                found += Findings((Finding("library", differs),))
            return found + _safetensors_findings(probe.source)
    return found


_KNOWN = frozenset(
    {*RECOGNIZED, "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"}
)
_NAMES = frozenset(
    own for own in (name.rpartition(".")[2] for name in _KNOWN) if own.startswith(("_re", "enc"))
)
_MODULES = frozenset(
    {"torch._utils", "torch._tensor", "_codecs", "numpy.core.multiarray", "numpy._core.multiarray"}
)
_ARRAYS = frozenset({"ndarray", "matrix", "memmap", "recarray"})


def _pickle_problems(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield what no pickler can have written, each function once."""
    if not checkpoint.details.tidy:
        text = "the pickle leaves gaps in its memo or objects on its stack, which no pickler does"
        yield Finding("pickle", text)
    told: set[str] = set()
    for node in everything(checkpoint.root):
        for name, fact in _find_odd_calls(node):
            if name not in told:
                told.add(name)
                yield Finding("pickle", f"the pickle calls {printable(name)} {fact}")


def _find_odd_calls(node: Any) -> Iterator[tuple[str, str]]:
    """Functions that were called otherwise than anybody does, and how."""
    if isinstance(node, TensorRef) and isinstance(node.hooks, Opaque):
        yield node.hooks.class_name, "where every tensor has an OrderedDict"
    if not isinstance(node, Opaque) or node.maker == "persid":
        return
    if not isinstance(node.func, Global):
        if not isinstance(node.func, Opaque):
            yield f"an object of type {type(node.func).__name__}", "as if it were a function"
        return
    name, module, own = node.func.qualified, node.func.module, node.func.name
    args = node.args if isinstance(node.args, tuple) else ()
    if name in _KNOWN:
        if own == "encode" or any(isinstance(arg, (StorageRef, TensorRef)) for arg in args):
            yield name, "with arguments that it does not accept"
        elif own == "_reconstruct" and not (_is_array(args[:1]) and _is_array_state(node.state)):
            yield name, "for an object that is not an array"
    elif own in _NAMES or module in _MODULES:
        yield name, "(no such function)"
    elif any(isinstance(arg, StorageRef) for arg in args):
        yield name, "on an unknown storage"
    elif name == "numpy.dtype" and not _is_dtype_made(args, node.state):
        yield name, "for a type with a state that numpy does not write"


def _is_array_state(state: Any) -> bool:
    """Return whether it is a `numpy.ndarray`'s state: version, shape, dtype, order, content."""
    match state:
        case (1, tuple(), dtype, bool() | int(), _):
            return _is_dtype(dtype)
    return False


def _is_array(classes: Sequence[Any]) -> bool:
    """Return whether it can be a class of arrays: numpy's own, or one derived from it elsewhere."""
    return all(
        isinstance(one, Global)
        and (one.module.startswith("numpy.") or (one.module == "numpy") is (one.name in _ARRAYS))
        for one in classes
    )


def _is_dtype(node: Any) -> bool:
    """Return whether it is an element type of numpy's, by its old class or one of the new ones."""
    if not isinstance(node, Opaque):
        return False
    return node.class_name == "numpy.dtype" or node.class_name.startswith("numpy.dtypes.")


def _is_dtype_made(args: tuple[Any, ...], state: Any) -> bool:
    """Return whether it makes a `numpy.dtype`: a code, two flags, and the items of the version."""
    match args, state:
        case (str(), bool() | int(), bool() | int()), (int() as version, *items):
            return len(items) == version + 4
        case (str(), bool() | int(), bool() | int()), None:
            return True
    return False


_MOST_BEHIND = 100
"""Streams that are read behind the first: a few hundred bytes are one."""
_PART = 1 << 20


def _machine_faults(data: ByteRange, limits: Limits) -> Iterator[Finding]:
    """Yield what is wrong with the pickle between version and object, which every torch skips."""
    magic = MAGIC.match(data.read(0, min(MAGIC_BYTES, data.length)))
    if magic is None:
        return
    start = unpickle_record(data, magic.end(), limits).end
    facts = unpickle_record(data, start, limits).root
    if not _is_machine(facts):
        yield Finding(
            "header", f"the facts about the writer's machine at offset {start:,} are damaged"
        )


def _is_machine(facts: Any) -> bool:
    """Return whether it is what torch writes there, as far as it is there."""
    order = facts.get("little_endian", True) if isinstance(facts, dict) else None
    return isinstance(order, bool) and {**facts, "little_endian": True}.items() <= MACHINE.items()


def _check_trailing(data: ByteRange, end: int, limits: Limits, magic: int) -> Findings:
    """Check what stands behind the first object: more of its kind, and nothing else."""
    position, more = end, 0
    try:
        while position < data.length and more < _MOST_BEHIND:
            position, more = _skip_object(data, position, limits, magic), more + 1
    except CheckpointError:
        rest = data.length - position
        where = f"at offset {position:,}, after its end,"
        return Findings((Finding("trailing", f"{counted(rest, 'byte')} {where} are not read"),))
    if not more:
        return Findings()
    what = "torch.save stream" if magic else "pickle"
    least = "" if position == data.length else "at least "
    return Findings(
        notes=(f"{least}{counted(more, f'more {what}')} after the first; only the first is read",)
    )


def _skip_object(data: ByteRange, position: int, limits: Limits, magic: int) -> int:
    """Return where the object ends that begins at `position`.

    Raises:
        CheckpointError: none does.
    """
    rest = data.slice(position, data.length - position)
    if not magic:
        return position + unpickle_outer(rest, limits).end
    if not MAGIC.match(rest.read(0, min(magic, rest.length))):
        raise CorruptFile("no other stream", file=data.source.name)
    return position + LegacyStream(rest, limits).end


def _tar_findings(checkpoint: Checkpoint, source: Source, limits: Limits) -> Findings:
    """Return what no member accounts for, and what stands behind the content of members."""
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
    if any(block.strip(b"\0") for block in ByteRange(source, end, source.size - end).blocks(_PART)):
        rest = counted(source.size - end, "byte")
        problems.append(Finding("trailing", f"{rest} after its last member are not zero"))
    return Findings(tuple(problems))


def _safetensors_findings(source: Source) -> Findings:
    """Return what the format's README asks of a header, and no reader does."""
    (length,) = LENGTH.unpack(source.read(0, LENGTH.size))
    text = source.read(LENGTH.size, length)
    problems = []
    if not text.startswith(b"{"):
        problems.append(Finding("header", "the header does not begin with {"))
    if text.rstrip(b" ")[-1:] != b"}":
        problems.append(Finding("padding", "the padding of the header is not spaces"))
    note = f"tensors begin at {LENGTH.size + length:,}, which is not a multiple of 8"
    return Findings(tuple(problems), () if length % LENGTH.size == 0 else (note,))


def _archive_findings(probe: Probe) -> Findings:
    """Return what can be said of a zip before it is known what it holds; nothing of a folder.

    What the reader refuses is told by opening the file.
    """
    if probe.source is None:
        return Findings()
    whole = ByteRange(probe.source, 0, probe.source.size)
    try:
        archive = probe.ask(open_archive)
    except UnsupportedFormat:
        return Findings(header_problems(whole, refused=True))
    except CheckpointError:
        return Findings()
    if not archive.sources:
        return Findings()
    stated = [record for record in archive.records.values() if record.crc32 is not None]
    foreign = tuple(Finding("foreign", text) for text in archive.notes)
    return Findings(
        (*header_problems(whole), *foreign),
        tuple(_notes(archive, len(archive.records) - len(stated))),
        tuple(
            Checksum(_place(archive, record.name), record.data, record.crc32 or 0)
            for record in stated
        ),
        len(archive.records),
    )


def _place(archive: Archive, name: str) -> str:
    return f"{archive.folder}/{name}" if archive.folder else name


def _notes(archive: Archive, unstated: int) -> Iterator[str]:
    if unstated:
        yield f"no CRC-32 for {counted(unstated, 'record')}, so their bytes cannot be checked"
    if archive.dead_bytes:
        yield (
            f"{counted(archive.dead_bytes, 'byte')} between the records are unused, as after "
            "an in-place edit"
        )


def _torch_zip_findings(contents: ZipContents, *, unzipped: bool) -> Findings:
    """Return what torch refuses, or reads otherwise, of a zip that reads well."""
    archive, problems = contents.storages.archive, list[Finding]()
    record = archive.find(PICKLE)
    if record is not None and (rest := record.data.length - contents.unpickled.end):
        text = f"{counted(rest, 'byte')} after the end of the pickle are not read"
        problems.append(Finding("trailing", text, (_place(archive, record.name),)))
    if not unzipped:
        problems += [
            Finding(kind, f"{text}: torch rejects it", (record and _place(archive, record),))
            for kind, record, text in refusals(archive, contents)
        ]
        problems += _find_compressed(contents)
        problems += _find_misplaced(archive, contents)
    return Findings(tuple(problems))


def _find_compressed(contents: ZipContents) -> Iterator[Finding]:
    keys = [key for key, storage in contents.storages.by_key.items() if storage.compressed]
    if keys:
        yield Finding(
            "compressed",
            f"{counted(len(keys), 'storage')} compressed ({listed(keys, 3)}): "
            "torch.load(mmap=True) reads them as garbage; rewrite the file to store them "
            "uncompressed",
        )


def _find_misplaced(archive: Archive, contents: ZipContents) -> Iterator[Finding]:
    """Find where `.format_version` makes torch compute other offsets than those of the records."""
    is_far = any(source.is_far for source in archive.sources)  # no local header has been read
    if contents.facts.get(".format_version", "") < "1" or is_far:
        return
    alignment = alignment_of(contents.facts.get(".storage_alignment"))
    if alignment is None:
        yield Finding(
            "offsets",
            "it should be a number, the alignment from which torch computes the offsets of "
            "storages",
            (_place(archive, ".storage_alignment"),),
        )
        return
    storages = contents.storages.by_key
    found = (archive.find(f"data/{key}") for key, one in storages.items() if one.data is not None)
    used = [record for record in found if record is not None and not record.compressed]
    wrong = misplaced(archive, used, alignment)
    if wrong:
        yield Finding(
            "offsets",
            "torch computes the offsets of storages because of the record .format_version, "
            f"but {len(wrong):,} of {counted(len(used), 'storage')} are elsewhere: "
            "torch.load(map_location='meta') and readers that compute offsets get wrong "
            "ones; rewrite the file to fix it",
            (_place(archive, wrong[0].name),),
        )
