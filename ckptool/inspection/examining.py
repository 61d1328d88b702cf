"""One checkpoint looked at from all sides: structure, checksums, content, if asked for values."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

from ckptool._lazy import Result
from ckptool.core.checkpoint import Checkpoint
from ckptool.core.finding import Finding
from ckptool.core.model import Path, TensorRef
from ckptool.core.tree import distinct, name_of
from ckptool.errors import (
    CheckpointError,
    CorruptFile,
    FileDenied,
    FileMissing,
    LimitExceeded,
    NotACheckpoint,
    TruncatedFile,
    UnreadableFile,
    UnsupportedFormat,
    without_query,
)
from ckptool.files import ByteRange, InflatedSource, Source
from ckptool.files.checksums import crc32cs, crc32s
from ckptool.files.source import BLOCK, Progress
from ckptool.formats import checks, read_probe
from ckptool.formats.base import Checksum, Findings, Probe
from ckptool.formats.distributed.dcp_safetensors import DCP_SAFETENSORS, part_files
from ckptool.formats.distributed.megatron import MEGATRON, rank_files as megatron_rank_files
from ckptool.formats.distributed.ranks import FSDP_RANKS, rank_files
from ckptool.formats.distributed.xla import XLA_FSDP, rank_files as xla_rank_files, tensor_files
from ckptool.formats.distributed.zero import DEEPSPEED, step_files
from ckptool.formats.model_folder import of_model_file
from ckptool.formats.sharded import open_index
from ckptool.inspection.blockers import missing_weights
from ckptool.inspection.manifest import HashedTensor, hashed_tensors
from ckptool.inspection.reading import Meter, RepeatedBytes
from ckptool.inspection.unwritten import unwritten
from ckptool.inspection.values import documented
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.tensors.bytewise import is_floating, nonfinite
from ckptool.words import are, counted, listed

_SETS = (
    (DCP_SAFETENSORS, part_files),
    (FSDP_RANKS, rank_files),
    (DEEPSPEED, step_files),
    (XLA_FSDP, xla_rank_files),
    (MEGATRON, megatron_rank_files),
)
"""Formats of several files that open by themselves, with what finds these."""


_HUB = re.compile(r".*-([0-9a-f]{8,64})\.(?:pth?|th|pkl)")
_BLOB = re.compile(r"([0-9a-f]{64})")

_Wrong = tuple[Checksum, int]
"""A checksum that the bytes do not have, and the one that they have."""


def examine(
    path: str | os.PathLike[str],
    *,
    values: bool = False,
    hashes: bool = False,
    progress: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> tuple[Verdict, tuple[HashedTensor, ...] | None]:
    """Return the verdict on a checkpoint, and with `hashes` the content hash of every tensor.

    `values` looks for NaN and infinities as well. `progress` is told of each part of the work anew.

    Raises:
        FileMissing: there is no such file.
        FileDenied: the system does not let us read it, or a shard.
        FileBusy: another process is editing it.
        UnsupportedFormat: a checkpoint of a kind that is not read.
        UnreadableFile: it changed meanwhile, or the disk refuses.
    """
    look = _Look(Verdict(os.fsdecode(path)), limits, progress, values, hashes)
    try:
        probe = Probe(path, limits)
    except CorruptFile as error:  # of the journal of an edit that was cut short
        look.blame(error)
        return look.verdict, None
    with ExitStack() as opened:
        opened.callback(probe.close)
        try:
            if probe.is_folder:
                probe = of_model_file(probe)
                opened.callback(probe.close)
                look.verdict = Verdict(probe.path)
            index = probe.ask(open_index)
            if index is not None:
                shards = {name: index.beside(name) for name in index.shards}
                look.at_set(probe, index.path, shards)
            elif find := next((find for known, find in _SETS if known.recognize(probe)), None):
                files = find(probe)
                top = os.path.commonpath(list(map(os.path.dirname, files)))
                shards = {os.path.relpath(one, top or "."): one for one in files}
                look.at_set(probe, probe.path, shards)
            else:
                look.at_file(probe)
                for one in tensor_files(probe):
                    look.at_shard(one, os.path.basename(one))
        except CheckpointError as error:
            look.blame(error)
        except PermissionError as error:
            raise FileDenied("the system does not let us read it", file=path) from error
    return replace(look.verdict, file=without_query(look.verdict.file)), look.hashed


@dataclass
class _Look:
    """What has been found so far of the file, or set of files, that is looked at."""

    verdict: Verdict
    limits: Limits
    progress: Progress | None
    values: bool = False
    hashes: bool = False
    is_shard: bool = False
    """Whether it is one file of a set, which is looked at as a whole too."""
    hashed: tuple[HashedTensor, ...] | None = None

    def at_file(self, probe: Probe) -> None:
        """Look at one file, or the files of an unzipped one."""
        found = checks.structure(probe)
        self.take(found)
        self.at_name(probe)
        wrong = self.sum_up(found.checksums)
        try:
            checkpoint = read_probe(probe)
        except CheckpointError as error:
            self.add(problems=_damaged(wrong, None))
            self.blame(error, contradicted=bool(self.verdict.problems))
            return
        self.at_content(checkpoint, probe, wrong)

    def at_name(self, probe: Probe) -> None:
        """Compare the file with the SHA-256 in its name, or in that of the file it links to.

        `torch.hub` names files `resnet18-5c106cde.pth`; digits alone may be a date, and letters
        alone a word. The cache of `huggingface_hub` links to blobs whose name is all of the hash.
        """
        own = os.path.basename(probe.path)
        blobs = (own, os.path.basename(os.path.realpath(probe.path)))
        blob = next(filter(None, map(_BLOB.fullmatch, blobs)), None)
        named = blob or _HUB.fullmatch(own)
        if named is None or probe.source is None:
            return
        if blob is None and (named[1].isdigit() or named[1].isalpha()):
            return
        size, digest = probe.source.size, hashlib.sha256()
        meter = Meter(self.progress, size)
        for block in ByteRange(probe.source, 0, size).blocks(BLOCK):
            digest.update(block)
            meter.told(len(block))
        found = digest.hexdigest()[: len(named[1])]
        if found == named[1]:
            return
        if blob is not None:
            where = "its name" if blob[1] == own else "the name of the file it links to"
            text = f"its SHA-256 is {found}, expected {blob[1]} ({where})"
            hint = "delete the file and download it again"
            self.add(problems=(Finding("name", text, hint=hint),))
        else:
            text = f"its SHA-256 begins with {found}, not with {named[1]}, as its name has it"
            hint = "torch.hub names files so: download it again, unless it was changed on purpose"
            self.add(problems=(Finding("name", text, hint=hint),))

    def at_set(self, probe: Probe, path: str, shards: Mapping[str, str]) -> None:
        """Look at each shard of an index, or each rank's file, then at what they are together."""
        self.verdict = replace(self.verdict, file=path, shards=len(shards))
        faulty = {path for name, path in shards.items() if self.at_shard(path, name)}
        try:
            checkpoint = read_probe(probe)
        except CheckpointError as error:
            if error.file not in faulty:
                self.blame(error, contradicted=True)
            return
        self.at_content(checkpoint, probe, [])

    def at_shard(self, path: str, name: str) -> bool:
        """Look at a shard by itself, as far as it is there; whether anything is wrong with it."""
        if not os.path.isfile(path):
            return False
        with closing(Probe(path, self.limits)) as probe:
            if probe.ask(open_index) is not None:
                return False
            look = _Look(Verdict(path), self.limits, self.progress, is_shard=True)
            try:
                look.at_file(probe)
            except UnsupportedFormat:
                return False
        found = look.verdict
        self.add(
            problems=tuple(
                replace(one, where=(f"{name}: {one.place}" if one.place else name,))
                for one in found.problems
            ),
            notes=tuple(f"{name}: {note}" for note in found.notes),
            records=found.records,
            summed=found.summed,
            checked=found.checked,
        )
        return not found.ok

    def at_content(
        self, checkpoint: Checkpoint | None, probe: Probe, wrong: Sequence[_Wrong]
    ) -> None:
        """Look at what has been read.

        Raises:
            UnreadableFile: a file changed meanwhile.
        """
        if checkpoint is None:
            raise UnreadableFile(
                "changed while it was read",
                file=self.verdict.file,
                hint="try again when nothing writes to the file any more",
            )
        with checkpoint:
            self.add(problems=_damaged(wrong, checkpoint))
            self.take(checks.content(checkpoint, probe))
            part = None if self.is_shard else missing_weights(checkpoint)
            if part is not None:
                self.add(notes=(f"{part.text}; {part.hint}",))
            if not self.is_shard and (text := unwritten(checkpoint)):
                self.add(notes=(text,))
            tensors = list(checkpoint.tensors())
            self.verdict = replace(
                self.verdict,
                format=checkpoint.format,
                size=checkpoint.details.size,
                tensors=len(tensors),
                content=sum(tensor.nbytes for _, tensor in distinct(tensors)),
                values=self.values,
            )
            if self.values:
                self.at_values(tensors)
            if self.hashes:
                meter = Meter(self.progress, self.verdict.content)
                self.hashed = hashed_tensors(checkpoint, self.limits, meter.told)
            for source in checkpoint.sources:
                source.check_unchanged()

    def at_values(self, tensors: Sequence[tuple[Path, TensorRef]]) -> None:
        """Look for NaN and infinities in every tensor, or in what it is made of."""
        floating = [(path, _numbers(tensor)) for path, tensor in distinct(tensors)]
        meter = Meter(self.progress, sum(part.nbytes for _, parts in floating for part in parts))
        repeated = RepeatedBytes(self.limits)
        for path, parts in floating:
            nan = infinite = 0
            for part in parts:
                repeated.add(path, part.unrepeated)
                found = nonfinite(part, meter.told)
                nan, infinite = nan + found[0], infinite + found[1]
            elements = sum(part.numel for part in parts)
            for kind, word, count in (("nan", "NaN", nan), ("inf", "infinite", infinite)):
                if count:
                    text = f"{count:,} of {counted(elements, 'element')} {are(count)} {word}"
                    self.add(problems=(Finding(kind, text, (name_of(path),)),))

    def add(self, **more: Any) -> None:
        """Add to problems, notes and counts of the verdict."""
        sums = {name: getattr(self.verdict, name) + count for name, count in more.items()}
        self.verdict = replace(self.verdict, **sums)

    def take(self, found: Findings) -> None:
        """Take what a check of the format found."""
        self.add(problems=found.problems, notes=found.notes, records=found.records)

    def blame(self, error: CheckpointError, *, contradicted: bool = False) -> None:
        """Take an error as a problem; where other things are wrong, also that a kind is unknown.

        Raises:
            CheckpointError: the error itself, where it says nothing about the file.
        """
        kinds = {**_KINDS, **_CONTRADICTIONS} if contradicted else _KINDS
        kind = next((word for known, word in kinds.items() if isinstance(error, known)), None)
        if kind is None:
            raise error
        text = error.message
        if error.file is not None and text.startswith(f"{error.file} is "):
            text = "it" + text.removeprefix(error.file)
        self.add(problems=(Finding(kind, text, hint=error.hint),))

    def sum_up(self, checksums: Sequence[Checksum]) -> list[_Wrong]:
        """Compute checksums; those that are not what they should be."""
        meter = Meter(self.progress, sum(one.data.length for one in checksums))
        sums = crc32cs if any(one.castagnoli for one in checksums) else crc32s
        found = sums([one.data for one in checksums], meter.told)
        wrong = []
        for one, crc in zip(checksums, found, strict=True):
            if isinstance(crc, CorruptFile):
                self.add(problems=(Finding("checksum", crc.message, (one.place,)),))
            elif crc != one.crc32:
                wrong.append((one, crc))
            elif not _ends_well(one.data.source):
                text = "its compressed bytes have no end mark, or more behind it"
                self.add(problems=(Finding("corrupt", text, (one.place,)),))
        self.add(summed=len(checksums), checked=meter.total)
        return wrong


def _ends_well(source: Source) -> bool:
    """Return True if a record is not compressed, or its compressed data ends correctly."""
    try:
        return not isinstance(source, InflatedSource) or source.ends_well()
    except CorruptFile:
        return False


def _numbers(tensor: TensorRef) -> list[TensorRef]:
    """Return the floating-point arrays that a tensor is made of, usually the tensor itself."""
    parts = [tensor] if tensor.has_content else tensor.tensors_inside()
    return [part for part in parts if part.has_content and is_floating(part.dtype)]


def _damaged(wrong: Sequence[_Wrong], checkpoint: Checkpoint | None) -> tuple[Finding, ...]:
    """Return the records whose checksum is wrong, with the tensors in them."""
    if not wrong:
        return ()
    names: dict[tuple[int, int], list[str]] = {}
    for path, tensor in checkpoint.tensors() if checkpoint is not None else ():
        if tensor.storage is not None and tensor.storage.data is not None:
            data = tensor.storage.data
            names.setdefault((id(data.source), data.offset), []).append(name_of(path))
    problems = []
    for checksum, found in wrong:
        data, stated = checksum.data, checksum.crc32
        kind = "CRC-32C" if checksum.castagnoli else "CRC-32"
        text = f"its bytes are not those that were written: {kind} {found:08x}, not {stated:08x}"
        inside = names.get((id(data.source), data.offset))
        text += f"; in it {are(len(inside))} {listed(inside, 3)}" if inside else ""
        problems.append(Finding("checksum", text, (checksum.place,)))
    return tuple(problems)


NOT_ONE = "not-a-checkpoint"
"""The kind of problem of a file that is something else."""

_KINDS: dict[type[CheckpointError], str] = {
    TruncatedFile: "truncated",
    CorruptFile: "corrupt",
    LimitExceeded: "limit",
    NotACheckpoint: NOT_ONE,
}
"""The errors that are problems of a file, with the kind of each; the first that fits."""
_CONTRADICTIONS: dict[type[CheckpointError], str] = {
    FileMissing: "missing-shard",
    UnsupportedFormat: "corrupt",
}
"""Those that are where other facts say that the file should be there, and of another kind."""


@dataclass(frozen=True, slots=True, repr=False)
class Verdict(Result):
    """What was found of one checkpoint; `format` is empty where it could not be opened.

    `size` are bytes on disk, `records` those of an archive, `summed` those whose CRC-32 was
    computed and compared, `checked` the bytes compared with a CRC-32 or with a manifest.
    """

    file: str
    """As it was given."""
    format: str = ""
    problems: tuple[Finding, ...] = ()
    """What is wrong, in the order of the file; empty: nothing was found."""
    notes: tuple[str, ...] = ()
    """Sentences on what could not be checked, and what is worth knowing."""
    size: int = 0
    shards: int = 0
    """Files of tensors, where there are several."""
    records: int = 0
    summed: int = 0
    tensors: int = 0
    """Names of tensors, tied ones each."""
    content: int = 0
    """Bytes that the tensors' elements take, of ties once."""
    checked: int = 0
    values: bool = False
    """Whether the values were looked at."""
    manifest: bool = False
    """Whether a manifest was held against it."""

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return the file's entry of `ckptool.verify/1`."""
        return {
            "file": self.file,
            "format": self.format or None,
            "ok": self.ok,
            **documented(self, "file", "format", "summed", "content", "checked"),
            "records_checked": self.summed,
            "bytes_checked": self.checked,
        }
