"""Checks of one or several checkpoints, or all in a folder, with or without a manifest.

A problem is a `Finding` in a `Verdict`, also if the file does not open. A file that cannot be
checked (missing, not permitted, an unsupported kind) is an error.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

from ckptool._lazy import Result
from ckptool.core.checkpoint import Checkpoint
from ckptool.core.finding import Finding
from ckptool.core.model import Path, TensorRef
from ckptool.core.reading import Meter, RepeatedBytes
from ckptool.core.tree import drop_ties, name_of
from ckptool.core.values import to_document
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
from ckptool.files.checksums import compute_crc32cs, compute_crc32s
from ckptool.files.source import BLOCK, Progress
from ckptool.formats import checks, read_probe
from ckptool.formats.base import Checksum, Findings, Probe
from ckptool.formats.distributed.dcp_safetensors import (
    DCP_SAFETENSORS,
    find_part_files,
)
from ckptool.formats.distributed.megatron import MEGATRON, find_rank_files as megatron_rank_files
from ckptool.formats.distributed.ranks import FSDP_RANKS, find_rank_files
from ckptool.formats.distributed.xla import (
    XLA_FSDP,
    find_rank_files as xla_rank_files,
    find_tensor_files,
)
from ckptool.formats.distributed.zero import DEEPSPEED, find_step_files
from ckptool.formats.model_folder import resolve_model_file
from ckptool.formats.sharded import open_index
from ckptool.inspection.blockers import detect_missing_weights
from ckptool.inspection.discovery import find_checkpoints, should_be_checkpoint
from ckptool.inspection.manifest import (
    HashedTensor,
    compare_tensors,
    hash_tensors,
    manifest_name,
    read_manifest,
    write_manifest,
)
from ckptool.inspection.unwritten import find_unwritten
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.tensors.bytewise import count_nonfinite_elements, is_floating
from ckptool.words import are, counted, listed

_FILE_FINDERS = (
    (DCP_SAFETENSORS, find_part_files),
    (FSDP_RANKS, find_rank_files),
    (DEEPSPEED, find_step_files),
    (XLA_FSDP, xla_rank_files),
    (MEGATRON, megatron_rank_files),
)
"""Formats of several independent files, with the function that finds the files."""


_HUB_FILE_NAME = re.compile(r".*-([0-9a-f]{8,64})\.(?:pth?|th|pkl)")
_BLOB_NAME = re.compile(r"([0-9a-f]{64})")

_Mismatch = tuple[Checksum, int]
"""The stored checksum, and the different one of the bytes."""


def examine(
    path: str | os.PathLike[str],
    *,
    values: bool = False,
    hashes: bool = False,
    progress: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> tuple[Verdict, tuple[HashedTensor, ...] | None]:
    """Return the verdict on a checkpoint, and with `hashes` the content hash of every tensor.

    `values` also looks for NaN and infinities. `progress` restarts for each part of the work.

    Raises:
        FileMissing: no such file.
        FileDenied: no permission to read the file or a shard.
        FileBusy: another process is editing it.
        UnsupportedFormat: ckptool does not read this kind of checkpoint.
        UnreadableFile: the file changed during the check, or a read failed.
    """
    check = _FileCheck(Verdict(os.fsdecode(path)), limits, progress, values, hashes)
    try:
        probe = Probe(path, limits)
    except CorruptFile as error:  # of the journal of an interrupted edit
        check.blame(error)
        return check.verdict, None
    with ExitStack() as stack:
        stack.callback(probe.close)
        try:
            if probe.is_folder:
                probe = resolve_model_file(probe)
                stack.callback(probe.close)
                check.verdict = Verdict(probe.path)
            check.check_all_files(probe)
        except CheckpointError as error:
            check.blame(error)  # raises it if it is not about the content of the file
        except PermissionError as error:
            raise FileDenied("permission denied", file=path) from error
    # The verdict is shown, and an address may contain secrets.
    return replace(check.verdict, file=without_query(check.verdict.file)), check.hashed


@dataclass
class _FileCheck:
    """A check of one file or set of files; the verdict collects its findings."""

    verdict: Verdict
    limits: Limits
    progress: Progress | None
    values: bool = False
    hashes: bool = False
    is_shard: bool = False
    """True for one file of a set, which is also checked as a set."""
    hashed: tuple[HashedTensor, ...] | None = None
    """The content hashes of the tensors, if they were requested and the file opened."""

    def check_all_files(self, probe: Probe) -> None:
        """Check one file, or each file of a set: shards with an index, or rank files."""
        index = probe.compute_once(open_index)
        if index is not None:
            self.check_set(probe, index.path, {name: index.path_of(name) for name in index.shards})
            return
        for format, find_files in _FILE_FINDERS:
            if format.recognize(probe):
                files = find_files(probe)
                top = os.path.commonpath([os.path.dirname(file) for file in files]) or "."
                shards = {os.path.relpath(file, top): file for file in files}
                self.check_set(probe, probe.path, shards)
                return
        self.check_file(probe)
        for file in find_tensor_files(probe):  # torch_xla may save each tensor in its own file
            self.check_shard(file, os.path.basename(file))

    def check_file(self, probe: Probe) -> None:
        """Check one file, or the files of an unzipped checkpoint.

        If it does not open, the error is a problem, next to those of the structure.
        """
        findings = checks.check_structure(probe)
        self.add_findings(findings)
        self.check_name(probe)
        mismatches = self.find_mismatches(findings.checksums)
        try:
            checkpoint = read_probe(probe)
        except CheckpointError as error:
            self.add(problems=_describe_damage(mismatches, checkpoint=None))
            # A problem found before shows that the file is meant as a checkpoint.
            self.blame(error, is_checkpoint=bool(self.verdict.problems))
            return
        self.check_content(checkpoint, probe, mismatches)

    def check_name(self, probe: Probe) -> None:
        """Compare the file with the SHA-256 in its name, or in the name of its link target.

        `torch.hub` names files `resnet18-5c106cde.pth`. Only digits may be a date, only letters a
        word. The cache of `huggingface_hub` links to blobs with the full hash as their name.
        """
        name = os.path.basename(probe.path)
        link_target = os.path.basename(os.path.realpath(probe.path))
        blob = _BLOB_NAME.fullmatch(name) or _BLOB_NAME.fullmatch(link_target)
        match = blob or _HUB_FILE_NAME.fullmatch(name)
        if match is None or probe.source is None:
            return
        expected = match[1]
        if blob is None and (expected.isdigit() or expected.isalpha()):
            return
        size, digest = probe.source.size, hashlib.sha256()
        meter = Meter(self.progress, size)
        for block in ByteRange(probe.source, 0, size).iterate_blocks(BLOCK):
            digest.update(block)
            meter.advance(len(block))
        actual = digest.hexdigest()[: len(expected)]
        if actual == expected:
            return
        if blob is not None:
            where = "from its name" if expected == name else "from the name of its link target"
            text = f"its SHA-256 is {actual}, expected {expected} ({where})"
            hint = "delete the file and download it again"
        else:
            text = f"its SHA-256 starts with {actual}, expected {expected} (from its name)"
            hint = "download it again from torch.hub, or rename it if you changed it"
        self.add(problems=(Finding("name", text, hint=hint),))

    def check_set(self, probe: Probe, path: str, path_by_shard: Mapping[str, str]) -> None:
        """Check each shard of an index, or each rank file, then the whole set.

        The set has the name `path`. An error in a shard that has problems already is not repeated.
        """
        self.verdict = replace(self.verdict, file=path, shards=len(path_by_shard))
        faulty = {file for name, file in path_by_shard.items() if self.check_shard(file, name)}
        try:
            checkpoint = read_probe(probe)
        except CheckpointError as error:
            if error.file not in faulty:
                self.blame(error, is_checkpoint=True)
            return
        self.check_content(checkpoint, probe, mismatches=[])  # `check_shard` reported them

    def check_shard(self, path: str, name: str) -> bool:
        """Check a shard if it exists, add its findings, and return True if it has problems.

        A shard that is an index, or of an unsupported format, is not checked.
        """
        if not os.path.isfile(path):
            return False
        with closing(Probe(path, self.limits)) as probe:
            if probe.compute_once(open_index) is not None:
                return False
            check = _FileCheck(Verdict(path), self.limits, self.progress, is_shard=True)
            try:
                check.check_file(probe)
            except UnsupportedFormat:
                return False
        verdict = check.verdict
        self.add(
            problems=tuple(
                replace(finding, where=(f"{name}: {finding.place}" if finding.place else name,))
                for finding in verdict.problems
            ),
            notes=tuple(f"{name}: {note}" for note in verdict.notes),
            records=verdict.records,
            summed=verdict.summed,
            checked=verdict.checked,
        )
        return not verdict.ok

    def check_content(
        self, checkpoint: Checkpoint | None, probe: Probe, mismatches: Sequence[_Mismatch]
    ) -> None:
        """Check the content of an open checkpoint, and add its format and sizes to the verdict.

        `mismatches` are the wrong checksums, whose tensors can be named now. A checkpoint is None
        if no reader recognizes the file any more.

        Raises:
            UnreadableFile: a file changed during the check.
        """
        if checkpoint is None:
            raise UnreadableFile(
                "changed while it was read",
                file=self.verdict.file,
                hint="try again when nothing writes to the file",
            )
        with checkpoint:
            self.add(problems=_describe_damage(mismatches, checkpoint))
            self.add_findings(checks.check_content(checkpoint, probe))
            missing = None if self.is_shard else detect_missing_weights(checkpoint)
            if missing is not None:
                self.add(notes=(f"{missing.text}; {missing.hint}",))
            if not self.is_shard and (text := find_unwritten(checkpoint)):
                self.add(notes=(text,))
            tensors = list(checkpoint.tensors())
            self.verdict = replace(
                self.verdict,
                format=checkpoint.format,
                size=checkpoint.details.size,
                tensors=len(tensors),
                content=sum(tensor.nbytes for _, tensor in drop_ties(tensors)),
                values=self.values,
            )
            if self.values:
                self.check_values(tensors)
            if self.hashes:
                meter = Meter(self.progress, self.verdict.content)
                self.hashed = hash_tensors(checkpoint, self.limits, meter.advance)
            for source in checkpoint.sources:
                source.check_unchanged()

    def check_values(self, tensors: Sequence[tuple[Path, TensorRef]]) -> None:
        """Look for NaN and infinities in every tensor and its parts."""
        floating = [(path, _list_floating_arrays(tensor)) for path, tensor in drop_ties(tensors)]
        meter = Meter(self.progress, sum(part.nbytes for _, parts in floating for part in parts))
        repeated = RepeatedBytes(self.limits)
        for path, parts in floating:
            nan = infinite = 0
            for part in parts:
                repeated.add(path, part.unrepeated)
                part_nan, part_infinite = count_nonfinite_elements(part, meter.advance)
                nan, infinite = nan + part_nan, infinite + part_infinite
            elements = sum(part.numel for part in parts)
            for kind, word, count in (("nan", "NaN", nan), ("inf", "infinite", infinite)):
                if count:
                    text = f"{count:,} of {counted(elements, 'element')} {are(count)} {word}"
                    self.add(problems=(Finding(kind, text, (name_of(path),)),))

    def add(self, **additions: Any) -> None:
        """Add to fields of the verdict, for example `problems=(finding,)` or `records=3`."""
        sums = {field: getattr(self.verdict, field) + added for field, added in additions.items()}
        self.verdict = replace(self.verdict, **sums)

    def add_findings(self, findings: Findings) -> None:
        """Add the findings of a format check."""
        self.add(problems=findings.problems, notes=findings.notes, records=findings.records)

    def blame(self, error: CheckpointError, *, is_checkpoint: bool = False) -> None:
        """Add an error about the content of the file as a problem.

        With `is_checkpoint`, an index lists the file, or its structure was recognized. Then a
        missing file and an unknown format are problems too.

        Raises:
            CheckpointError: the error itself, if it is not about the content of the file.
        """
        kind_by_error = _KIND_BY_ERROR
        if is_checkpoint:
            kind_by_error = {**_KIND_BY_ERROR, **_KIND_BY_ERROR_OF_CHECKPOINT}
        kind = next((kind for cls, kind in kind_by_error.items() if isinstance(error, cls)), None)
        if kind is None:
            raise error
        text = error.message
        if error.file is not None and text.startswith(f"{error.file} is "):
            text = "it" + text.removeprefix(error.file)  # the file is in the verdict
        self.add(problems=(Finding(kind, text, hint=error.hint),))

    def find_mismatches(self, checksums: Sequence[Checksum]) -> list[_Mismatch]:
        """Compute checksums, and return the mismatches.

        Records that cannot be decompressed, or have bytes after their end, are added as problems.
        """
        meter = Meter(self.progress, sum(checksum.data.length for checksum in checksums))
        # All checksums of a file are of one kind.
        has_crc32c = any(checksum.castagnoli for checksum in checksums)
        compute = compute_crc32cs if has_crc32c else compute_crc32s
        results = compute([checksum.data for checksum in checksums], meter.advance)
        mismatches = []
        for checksum, crc_or_error in zip(checksums, results, strict=True):
            if isinstance(crc_or_error, CorruptFile):
                self.add(problems=(Finding("checksum", crc_or_error.message, (checksum.place,)),))
            elif crc_or_error != checksum.crc32:
                mismatches.append((checksum, crc_or_error))
            elif not _has_valid_end(checksum.data.source):
                text = "its compressed bytes have no end mark, or have extra bytes after it"
                self.add(problems=(Finding("corrupt", text, (checksum.place,)),))
        self.add(summed=len(checksums), checked=meter.total)
        return mismatches


def _has_valid_end(source: Source) -> bool:
    """Return True if a record is not compressed, or its compressed data ends correctly."""
    try:
        return not isinstance(source, InflatedSource) or source.has_clean_end()
    except CorruptFile:
        return False


def _list_floating_arrays(tensor: TensorRef) -> list[TensorRef]:
    """Return the floating-point arrays that a tensor is made of, usually the tensor itself."""
    parts = [tensor] if tensor.has_content else tensor.tensors_inside()
    return [part for part in parts if part.has_content and is_floating(part.dtype)]


def _describe_damage(
    mismatches: Sequence[_Mismatch], checkpoint: Checkpoint | None
) -> tuple[Finding, ...]:
    """Return a problem for each record with a wrong checksum, with the tensors in it.

    These are the tensors with a storage that begins where the record begins. `checkpoint` is None
    if the file did not open: then no tensor is known.
    """
    if not mismatches:
        return ()
    names_by_position: dict[tuple[int, int], list[str]] = {}  # by file and offset
    for path, tensor in checkpoint.tensors() if checkpoint is not None else ():
        if tensor.storage is not None and tensor.storage.data is not None:
            data = tensor.storage.data
            position = id(data.source), data.offset
            names_by_position.setdefault(position, []).append(name_of(path))
    problems = []
    for checksum, actual in mismatches:
        data, stated = checksum.data, checksum.crc32
        kind = "CRC-32C" if checksum.castagnoli else "CRC-32"
        text = f"checksum mismatch: {kind} is {actual:08x}, expected {stated:08x}"
        names = names_by_position.get((id(data.source), data.offset))
        text += f"; affects {listed(names, 3)}" if names else ""
        problems.append(Finding("checksum", text, (checksum.place,)))
    return tuple(problems)


NOT_CHECKPOINT = "not-a-checkpoint"
"""The kind of problem of a file that is not a checkpoint."""

_KIND_BY_ERROR: dict[type[CheckpointError], str] = {
    TruncatedFile: "truncated",
    CorruptFile: "corrupt",
    LimitExceeded: "limit",
    NotACheckpoint: NOT_CHECKPOINT,
}
"""The kind of problem for each error about the content of a file. The first match counts."""
_KIND_BY_ERROR_OF_CHECKPOINT: dict[type[CheckpointError], str] = {
    FileMissing: "missing-shard",
    UnsupportedFormat: "corrupt",
}
"""More kinds, if other facts show that the file should exist or have another format."""


@dataclass(frozen=True, slots=True, repr=False)
class Verdict(Result):
    """The result of checking one checkpoint; `format` is empty if it does not open.

    `size` is in bytes on disk, `records` counts those of an archive, `summed` those with a verified
    CRC-32, `checked` the bytes compared with a CRC-32 or a manifest.
    """

    file: str
    """The given path."""
    format: str = ""
    problems: tuple[Finding, ...] = ()
    """The problems, in the order of the file; empty if there are none."""
    notes: tuple[str, ...] = ()
    """Notes, for example about data that could not be checked."""
    size: int = 0
    shards: int = 0
    """The number of shards or rank files; 0 for a single file."""
    records: int = 0
    summed: int = 0
    tensors: int = 0
    """The number of tensors, tied ones once for each key."""
    content: int = 0
    """Bytes of the tensors' elements, tied ones once."""
    checked: int = 0
    values: bool = False
    """True if the values were checked for NaN and infinities."""
    manifest: bool = False
    """True if it was compared with a manifest."""

    @property
    def ok(self) -> bool:
        """True if no problem was found."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return the file's entry of `ckptool.verify/1`."""
        left_out = ("file", "format", "summed", "content", "checked")
        return {
            "file": self.file,
            "format": self.format or None,
            "ok": self.ok,
            **to_document(self, *left_out),
            "records_checked": self.summed,
            "bytes_checked": self.checked,
        }


@dataclass(frozen=True, slots=True)
class ManifestOutcome:
    """The action on a manifest: `written`, `checked`, or `not-written`."""

    file: str
    action: str
    files: int
    tensors: int
    problems: tuple[Finding, ...] = ()
    """Missing files that it lists."""
    unhashed: int = 0
    """Tensors written without a hash because they are sparse or quantized."""
    reason: str | None = None
    """Why it was not written: `problem` (in a file) or `error` (a file could not be checked)."""

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of `ckptool.verify/1`."""
        return to_document(self)


def verify(
    path: str | os.PathLike[str],
    *,
    values: bool = False,
    manifest: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Verdict:
    """Check a checkpoint for damage, even where torch does not look.

    A file that does not open as a checkpoint has a verdict too. Does not import torch.

    Args:
        path: The file, or the folder of an unzipped file or of shards.
        values: Also look for NaN and infinite values.
        manifest: A file with the SHA-256 of every tensor: compared, or written if it is missing.
        progress: Called with the bytes done and the total bytes of each part of the work.
        limits: Limits for hostile files.

    Raises:
        FileMissing, FileDenied: the file cannot be read.
        UnsupportedFormat: ckptool does not read this kind of checkpoint.
        UnreadableFile: the file changed while it was read.
        UsageError, WriteError: `manifest` is not a manifest, or cannot be written.
    """
    verifier = Verifier(values=values, manifest=manifest, progress=progress, limits=limits)
    verdict = verifier.verify(path, alone=True)
    verifier.finish()
    return verdict


class Verifier:
    """Checks several checkpoints, and compares them with one manifest."""

    def __init__(
        self,
        *,
        values: bool = False,
        manifest: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """Read the manifest if it exists.

        Raises:
            UsageError: the file is not a manifest.
        """
        self.values, self.progress, self.limits = values, progress, limits
        self.manifest = None if manifest is None else os.fspath(manifest)
        expected = None if self.manifest is None else read_manifest(self.manifest, limits)
        self._expected_by_file = dict(expected or {})
        """The tensors that the manifest lists, by file."""
        self._is_new_manifest = self.manifest is not None and expected is None
        """True if `finish` writes the manifest."""
        self._hashes_by_file: dict[str, tuple[HashedTensor, ...]] = {}
        """The tensors of the files so far."""
        self._not_written_reason: str | None = None
        """The `reason` of the outcome, if a file has a problem or could not be checked."""

    def verify_all(
        self, paths: Iterable[str | os.PathLike[str]]
    ) -> Iterator[Verdict | CheckpointError]:
        """Yield a verdict or an error for every path, and for every checkpoint in a folder.

        A folder without checkpoints is checked as if it should be one. Unsupported files next to
        others (shards of DCP) are a problem of their folder. Files in a folder that are no
        checkpoints, by content and name, are left out.
        """
        given_paths = [os.fsdecode(path) for path in paths]
        for given_path in given_paths:
            is_folder = os.path.isdir(given_path)
            files = find_checkpoints(given_path, self.limits) if is_folder else [given_path]
            is_alone = len(given_paths) == len(files) == 1  # the only file of the whole call
            has_result = False
            unsupported_by_folder = dict[str, list[Finding]]()
            for file in files:
                result = self._try_verify(file, alone=is_alone)
                is_expected = file == given_path or should_be_checkpoint(file)
                if is_expected or not _is_unsupported(result):
                    has_result = True
                    yield result
                elif isinstance(result, UnsupportedFormat):  # else its content is no checkpoint
                    folder, name = os.path.split(file)
                    text = f"not checked: it {result.message.removeprefix(file).lstrip()}"
                    finding = Finding("unread", text, (name,), hint=result.hint)
                    unsupported_by_folder.setdefault(folder, []).append(finding)
            if not has_result:
                yield self._try_verify(given_path, alone=is_alone)
                continue
            for folder, findings in unsupported_by_folder.items():
                yield Verdict(folder, problems=tuple(findings))

    def _try_verify(self, path: str, *, alone: bool) -> Verdict | CheckpointError:
        """Return the verdict on a checkpoint, or the error if it cannot be checked.

        After an error, no new manifest is written.
        """
        try:
            return self.verify(path, alone=alone)
        except CheckpointError as error:
            self._not_written_reason = self._not_written_reason or "error"
            if error.file is None:
                error.file = path
            return error

    def verify(self, path: str | os.PathLike[str], *, alone: bool = False) -> Verdict:
        """Return the verdict on one checkpoint; after a problem, no manifest will be written.

        With `alone` it is the only one, so a manifest of one file applies to it under any name.

        Raises:
            CheckpointError: as the function `verify`.
        """
        verdict, tensors = examine(
            path,
            values=self.values,
            hashes=self.manifest is not None,
            progress=self.progress,
            limits=self.limits,
        )
        if self.manifest is not None and tensors is not None:
            verdict = self._add_manifest_differences(verdict, tensors, self.manifest, alone=alone)
        if not verdict.ok:
            self._not_written_reason = "problem"
        return verdict

    def _add_manifest_differences(
        self, verdict: Verdict, tensors: tuple[HashedTensor, ...], manifest: str, *, alone: bool
    ) -> Verdict:
        """Return the verdict with the differences from the manifest; unchanged if that is new.

        Also keeps the hashes for `finish`.
        """
        name = manifest_name(verdict.file, manifest)
        if alone and len(self._expected_by_file) == 1:  # the file may have another name now
            [name] = self._expected_by_file
        self._hashes_by_file[name] = tensors
        if self._is_new_manifest:
            return verdict
        expected = self._expected_by_file.get(name)
        if expected is None:
            text = f"the manifest does not list {name!r}"
            findings = Findings((Finding("manifest", text),))
        else:
            findings = compare_tensors(expected, tensors)
        return replace(
            verdict,
            problems=verdict.problems + findings.problems,
            notes=verdict.notes + findings.notes,
            checked=verdict.checked or verdict.content,  # all bytes were hashed
            manifest=True,
        )

    def finish(self) -> ManifestOutcome | None:
        """Write the manifest, or look for missing files that it lists; return None without one.

        A new manifest is not written if a file has a problem or could not be checked.

        Raises:
            WriteError: the manifest cannot be written.
        """
        if self.manifest is None:
            return None
        tensors = sum(map(len, self._hashes_by_file.values()))
        if not self._is_new_manifest:
            return ManifestOutcome(
                self.manifest,
                "checked",
                len(self._hashes_by_file),
                tensors,
                tuple(self._find_missing_files(self.manifest)),
            )
        if self._not_written_reason is not None:
            return ManifestOutcome(
                self.manifest, "not-written", 0, 0, reason=self._not_written_reason
            )
        write_manifest(self.manifest, self._hashes_by_file)
        unhashed = sum(
            tensor.sha256 is None for file in self._hashes_by_file.values() for tensor in file
        )
        return ManifestOutcome(
            self.manifest, "written", len(self._hashes_by_file), tensors, unhashed=unhashed
        )

    def _find_missing_files(self, manifest: str) -> Iterator[Finding]:
        """Yield a problem for each file that the manifest lists but the folder lacks."""
        folder = os.path.dirname(manifest)
        for name in self._expected_by_file:
            if name not in self._hashes_by_file and not os.path.exists(os.path.join(folder, name)):
                yield Finding("missing", "the manifest lists it, but it is missing", (name,))


def _is_unsupported(result: Verdict | CheckpointError) -> bool:
    """Return True if ckptool does not read this file as a checkpoint."""
    if isinstance(result, CheckpointError):
        return isinstance(result, UnsupportedFormat)
    return any(problem.kind == NOT_CHECKPOINT for problem in result.problems)
