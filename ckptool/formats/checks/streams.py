"""Formats that are read from front to back: what stands behind the end, and what nobody reads.

None of them has a checksum. Of a legacy stream the magic number, the version, the facts about the
writer's machine and the count before each storage are held against what they must be; of a tar the
header of each member, and that what pads it is zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptool.checkpoint import Checkpoint
from ckptool.errors import CheckpointError, CorruptFile
from ckptool.files import ByteRange, FileSource
from ckptool.formats.legacy_stream import (
    MAGIC,
    MAGIC_BYTES,
    VERSION,
    LegacyStream,
    NestedStreams,
    unpickle_record,
)
from ckptool.formats.problems import Findings, Problem
from ckptool.formats.safetensors_header import LENGTH
from ckptool.formats.tar_members import BLOCK, read_members
from ckptool.limits import Limits
from ckptool.symbolic import unpickle
from ckptool.words import counted

__all__ = ["legacy_findings", "pickle_findings", "safetensors_findings", "tar_findings"]

_MOST_BEHIND = 100
"""Streams that are read behind the first: a few hundred bytes are one."""
_SIZES = {"short": 2, "int": 4, "long": 4}
"""What torch has always written as `type_sizes`: sizes of Python's `struct`, not of the machine."""
_PART = 1 << 20


def legacy_findings(checkpoint: Checkpoint, source: FileSource, limits: Limits) -> Findings:
    """What follows the stream, and what its third pickle says of the writer's machine."""
    data = ByteRange(source, 0, source.size)
    problems = tuple(_machine_faults(data, limits))
    end = source.size - checkpoint.details.dead_bytes
    return Findings(problems) + _behind(data, end, limits, MAGIC_BYTES)


def pickle_findings(checkpoint: Checkpoint, source: FileSource, limits: Limits) -> Findings:
    """What follows the pickle."""
    data = ByteRange(source, 0, source.size)
    return _behind(data, source.size - checkpoint.details.dead_bytes, limits, 0)


def _machine_faults(data: ByteRange, limits: Limits) -> Iterator[Problem]:
    """What is wrong with the pickle between version and object, which every torch skips."""
    magic = MAGIC.match(data.read(0, min(MAGIC_BYTES, data.length)))
    if magic is None:
        return
    start = unpickle_record(data, magic.end(), limits).end
    facts = unpickle_record(data, start, limits).root
    if not _is_machine(facts):
        yield Problem(
            "header", "", f"the facts about the writer's machine at offset {start:,} are damaged"
        )


def _is_machine(facts: Any) -> bool:
    """Whether it is what torch writes there, as far as it is there."""
    if not isinstance(facts, dict) or not facts.keys() <= {
        "protocol_version", "little_endian", "type_sizes",
    }:  # fmt: skip
        return False
    sizes = facts.get("type_sizes", _SIZES)
    return (
        facts.get("protocol_version", VERSION) == VERSION
        and isinstance(facts.get("little_endian", True), bool)
        and isinstance(sizes, dict)
        and sizes.items() <= _SIZES.items()
    )


def _behind(data: ByteRange, end: int, limits: Limits, magic: int) -> Findings:
    """What stands behind the first object: more of its kind are no fault, anything else is one."""
    position, more = end, 0
    try:
        while position < data.length and more < _MOST_BEHIND:
            position, more = _following(data, position, limits, magic), more + 1
    except CheckpointError:
        rest = data.length - position
        where = f"behind its end at offset {position:,}"
        return Findings((Problem("trailing", "", f"{counted(rest, 'byte')} {where} are not read"),))
    if not more:
        return Findings()
    what = "torch.save stream" if magic else "pickle"
    least = "" if position == data.length else "at least "
    return Findings(
        notes=(f"{least}{counted(more, f'more {what}')} behind the first, of which one is read",)
    )


def _following(data: ByteRange, position: int, limits: Limits, magic: int) -> int:
    """Where the object ends that begins at `position`.

    Raises:
        CheckpointError: none does.
    """
    rest = data.slice(position, data.length - position)
    if not magic:
        nested = NestedStreams(data.source.name, limits, rest.length)
        found = unpickle(rest, nested=nested.load, limits=limits)
        return position + found.end
    if not MAGIC.match(rest.read(0, min(magic, rest.length))):
        raise CorruptFile("no stream follows", file=data.source.name)
    return position + LegacyStream(rest, limits).end


def tar_findings(checkpoint: Checkpoint, source: FileSource, limits: Limits) -> Findings:
    """What no member accounts for, and what stands behind the content of those that count."""
    problems = []
    if checkpoint.details.dead_bytes:
        dead = checkpoint.details.dead_bytes
        text = f"{counted(dead, 'byte')} in its members {'is' if dead == 1 else 'are'} not read"
        problems.append(Problem("trailing", "", text))
    members = read_members(source, limits)
    end = 0
    for name, member in members.items():
        stop = member.offset + member.length
        padded = -(-stop // BLOCK) * BLOCK
        if padded > source.size:
            problems.append(Problem("truncated", name, "its last block is cut short"))
            return Findings(tuple(problems))
        if source.read(stop, padded - stop).strip(b"\0"):
            problems.append(Problem("padding", name, "what fills its last block is not zero"))
        end = max(end, padded)
    if not _is_zero(ByteRange(source, end, source.size - end)):
        rest = counted(source.size - end, "byte")
        problems.append(Problem("trailing", "", f"{rest} behind its last member are not zero"))
    return Findings(tuple(problems))


def _is_zero(data: ByteRange) -> bool:
    return not any(block.strip(b"\0") for block in data.blocks(_PART))


def safetensors_findings(source: FileSource) -> Findings:
    """What the format's README asks of a header, and no reader does."""
    (length,) = LENGTH.unpack(source.read(0, LENGTH.size))
    text = source.read(LENGTH.size, length)
    problems = []
    if not text.startswith(b"{"):
        problems.append(Problem("header", "", "its header does not begin with {, as it must"))
    if text.rstrip(b" ")[-1:] != b"}":
        problems.append(
            Problem("padding", "", "its header is padded with something else than spaces")
        )
    note = f"its tensors begin at {LENGTH.size + length:,}, which is no multiple of 8"
    return Findings(tuple(problems), () if length % LENGTH.size == 0 else (note,))
