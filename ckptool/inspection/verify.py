"""Whether checkpoints are intact: one, several, all in a folder; with a manifest or without.

What is wrong is a `Finding` in a `Verdict`, also what keeps a file from being opened. What keeps it
from being looked at (no such file, no permission, a kind that is not read) is an error.
In a folder a checkpoint is known by its content, or by a name that only checkpoints have. `.bin`
and `.pkl` are names that any file may have: a damaged file of such a name is reported if its whole
name is a checkpoint's, or if its content is what a failed save or download leaves behind.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from os.path import islink
from typing import Any

from ckptool.core.finding import Finding
from ckptool.errors import CheckpointError, UnsupportedFormat
from ckptool.files import FileSource
from ckptool.files.source import Progress
from ckptool.formats import candidates
from ckptool.formats.archive import open_archive
from ckptool.formats.base import Findings, Probe
from ckptool.formats.distributed.dcp import DCP
from ckptool.formats.distributed.dcp_safetensors import DCP_SAFETENSORS, is_part_file
from ckptool.formats.distributed.ranks import FSDP_RANKS, of_model
from ckptool.formats.distributed.zero import is_part, is_step
from ckptool.formats.foreign.tensorflow import is_index
from ckptool.formats.identify import looks_like_checkpoint
from ckptool.formats.sharded import shards_named_by
from ckptool.formats.torch_tar import BLOCK, is_tar
from ckptool.inspection.examining import NOT_ONE, Verdict, examine
from ckptool.inspection.manifest import (
    HashedTensor,
    held_against,
    manifest_name,
    read_manifest,
    write_manifest,
)
from ckptool.inspection.values import documented
from ckptool.limits import DEFAULT_LIMITS, Limits


@dataclass(frozen=True, slots=True)
class ManifestOutcome:
    """What became of a manifest: `written`, `checked`, or `not-written`."""

    file: str
    action: str
    files: int
    tensors: int
    problems: tuple[Finding, ...] = ()
    """Files that it lists and that are gone."""
    unhashed: int = 0
    """Tensors of a written one that have no content hash, being sparse, quantized or the like."""
    reason: str | None = None
    """Why it was not written: a `problem` in a file, or an `error` before one was looked at."""

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of `ckptool.verify/1`."""
        return documented(self)


def verify(
    path: str | os.PathLike[str],
    *,
    values: bool = False,
    manifest: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Verdict:
    """Check a checkpoint: checksums, structure, and everything else that torch does not check.

    A file that does not open as a checkpoint has a verdict too. Torch is not imported.

    Args:
        path: The file, or the folder of an unzipped file or of shards.
        values: Look for NaN and infinite values too.
        manifest: A file with the SHA-256 of every tensor: compared, or written if it is missing.
        progress: Called with the bytes done and the bytes in all, of each part of the work.
        limits: Bounds for what the file may cost.

    Raises:
        FileMissing, FileDenied: the file cannot be read.
        UnsupportedFormat: ckptool does not read this kind of checkpoint.
        UnreadableFile: the file changed while it was read.
        UsageError, WriteError: `manifest` is a file of another kind, or cannot be written.
    """
    verifier = Verifier(values=values, manifest=manifest, progress=progress, limits=limits)
    verdict = verifier.verify(path, alone=True)
    verifier.finish()
    return verdict


class Verifier:
    """Looks at one checkpoint after the other, and at what one manifest says of all of them."""

    def __init__(
        self,
        *,
        values: bool = False,
        manifest: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """Read the manifest, if it is there.

        Raises:
            UsageError: it is something else.
        """
        self.values, self.progress, self.limits = values, progress, limits
        self.manifest = None if manifest is None else os.fspath(manifest)
        known = None if self.manifest is None else read_manifest(self.manifest, limits)
        self._listed = dict(known or {})
        self._writes = self.manifest is not None and known is None
        self._seen: dict[str, tuple[HashedTensor, ...]] = {}
        self._reason: str | None = None

    def each(self, paths: Iterable[str | os.PathLike[str]]) -> Iterator[Verdict | CheckpointError]:
        """Yield a verdict on every path, of folders on every checkpoint in them, or an error.

        A folder in which there is no checkpoint is looked at as if it should be one. What is not
        read beside others (shards of DCP) is a problem of the folder that it lies in.
        """
        given = [os.fsdecode(path) for path in paths]
        for path in given:
            inside = checkpoints_in(path, self.limits) if os.path.isdir(path) else [path]
            alone = len(given) == len(inside) == 1
            told, unread = False, dict[str, list[Finding]]()
            for one in inside:
                result = self._tried(one, alone=alone)
                if one == path or should_be_one(one) or not _is_other(result):
                    told = True
                    yield result
                elif isinstance(result, UnsupportedFormat):
                    folder, name = os.path.split(one)
                    text = f"not looked at: it {result.message.removeprefix(one).lstrip()}"
                    unread.setdefault(folder, []).append(
                        Finding("unread", text, (name,), hint=result.hint)
                    )
            if not told:
                yield self._tried(path, alone=alone)
            else:
                yield from (Verdict(name, problems=tuple(found)) for name, found in unread.items())

    def _tried(self, path: str, *, alone: bool) -> Verdict | CheckpointError:
        try:
            return self.verify(path, alone=alone)
        except CheckpointError as error:
            self._reason = self._reason or "error"
            if error.file is None:
                error.file = path
            return error

    def verify(self, path: str | os.PathLike[str], *, alone: bool = False) -> Verdict:
        """Return the verdict on one checkpoint.

        `alone`: it is the only one, so that a manifest of one file is about it, whatever its name.

        Raises:
            CheckpointError: as `verify`.
        """
        verdict, tensors = examine(
            path,
            values=self.values,
            hashes=self.manifest is not None,
            progress=self.progress,
            limits=self.limits,
        )
        if self.manifest is not None and tensors is not None:
            verdict = self._with_manifest(verdict, tensors, self.manifest, alone=alone)
        if not verdict.ok:
            self._reason = "problem"
        return verdict

    def _with_manifest(
        self, verdict: Verdict, tensors: tuple[HashedTensor, ...], manifest: str, *, alone: bool
    ) -> Verdict:
        """Return the verdict with the problems that the manifest reveals."""
        name = manifest_name(verdict.file, manifest)
        if alone and len(self._listed) == 1:
            name = next(iter(self._listed))
        self._seen[name] = tensors
        if self._writes:
            return verdict
        wanted = self._listed.get(name)
        if wanted is None:
            text = f"the manifest does not list it: there is no {name!r} in it"
            found = Findings((Finding("manifest", text),))
        else:
            found = held_against(wanted, tensors)
        return replace(
            verdict,
            problems=verdict.problems + found.problems,
            notes=verdict.notes + found.notes,
            checked=verdict.checked or verdict.content,
            manifest=True,
        )

    def finish(self) -> ManifestOutcome | None:
        """Write the manifest, or look for files that it lists and that are gone; None without one.

        Raises:
            WriteError: it could not be written.
        """
        if self.manifest is None:
            return None
        tensors = sum(len(one) for one in self._seen.values())
        if not self._writes:
            return ManifestOutcome(
                self.manifest, "checked", len(self._seen), tensors, tuple(self._gone(self.manifest))
            )
        if self._reason is not None:
            return ManifestOutcome(self.manifest, "not-written", 0, 0, reason=self._reason)
        write_manifest(self.manifest, self._seen)
        unhashed = sum(tensor.sha256 is None for one in self._seen.values() for tensor in one)
        return ManifestOutcome(
            self.manifest, "written", len(self._seen), tensors, unhashed=unhashed
        )

    def _gone(self, manifest: str) -> Iterator[Finding]:
        folder = os.path.dirname(manifest)
        for name in self._listed:
            if name not in self._seen and not os.path.exists(os.path.join(folder, name)):
                yield Finding("missing", "the manifest lists it, and it is gone", (name,))


def _is_other(result: Verdict | CheckpointError) -> bool:
    """Return True if the file is no checkpoint that ckptool reads."""
    if isinstance(result, CheckpointError):
        return isinstance(result, UnsupportedFormat)
    return any(problem.kind == NOT_ONE for problem in result.problems)


_INDEX = re.compile(r".+\.index(?:\.[^.]+)?\.json", re.IGNORECASE)

_NAMED_SO = re.compile(
    r".+\.(?:pth|pt|pth\.tar|ckpt|safetensors|pt2|ptl|(?:safetensors|bin|pth?)\.index(?:\.[^.]+)?\.json)"
    # what transformers, diffusers, peft and accelerate write
    r"|(?:pytorch_model|pytorch_lora_weights|diffusion_pytorch_model|adapter_model|training_args"
    r"|optimizer|scheduler)(?:[-_.][^-_.]+)*\.bin"
    r"|(?:random_states|rng_state)(?:[-_.][^-_.]+)*\.(?:bin|pkl)",
    re.IGNORECASE,
)
"""Names that only checkpoints have: damaged beyond recognition, they are told of."""
_ANYTHING = re.compile(r".+\.(?:bin|pkl|pickle)", re.IGNORECASE)
_LIKELY = re.compile(
    r"(?:^|[^a-z])(?:model|net|weights?|params?|state|states|optim|optimizer|scheduler|lora|adapter"
    r"|diffusion|unet|vae|ema|rng|checkpoint|ckpt|epoch|step|iter|best|last|latest|final)s?"
    r"(?:[^a-z]|$)",
    re.IGNORECASE,
)
"""Words in names that are likely a checkpoint's."""
_OTHERS = re.compile(r"token|vocab|spiece|sentencepiece|ggml|gguf|openvino", re.IGNORECASE)

_POINTER = b"version https://git-lfs"
_PAGE = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:<!doctype html|<html|<\?xml)", re.IGNORECASE)
_GZIP = b"\x1f\x8b"
_HEAD, _MOST_TEXT = 4096, 64 << 10

_Identity = tuple[int, int]


def checkpoints_in(folder: str, limits: Limits) -> list[str]:
    """Return the checkpoints in a folder and its subfolders, sorted; shards by their index.

    Names that begin with a dot are skipped. A file with several names is returned once: by a
    checkpoint's name, and by its own rather than a link's. Links are followed, each folder is
    entered once.
    """
    files: dict[_Identity, str] = {}
    shards: set[_Identity] = set()
    whole = []
    for path, identity in _entries(folder, limits):
        if identity is None:
            whole.append(path)
            continue
        if _INDEX.fullmatch(path):
            for name in shards_named_by(path):
                with suppress(OSError):
                    shards.add(_identity(os.path.join(os.path.dirname(path), name)))
        known = files.get(identity)
        files[identity] = path if known is None else min(known, path, key=_worth)
    single = (path for identity, path in files.items() if identity not in shards)
    return sorted((*whole, *filter(_may_be_one, single)))


def _worth(path: str) -> tuple[bool, bool, str]:
    """Return the sort key of a file's names: the best one first."""
    return not should_be_one(path), islink(path), path


def _entries(folder: str, limits: Limits) -> Iterator[tuple[str, _Identity | None]]:
    """Yield files below a folder with device and inode, and folders to open as a whole with None.

    None also stands for what cannot be looked at: whoever opens it says why.
    """
    entered: set[_Identity] = set()
    todo, linked = [folder], list[str]()
    while todo or linked:  # first where folders are, then where links to them are
        here = todo.pop() if todo else linked.pop()
        identity = _identity(here)
        if identity in entered:
            continue
        entered.add(identity)
        try:
            names = sorted(os.listdir(here))
        except OSError:
            yield here, None
            continue
        is_part = _part_of(here, limits)
        if is_part:
            yield here, None
        for path in (os.path.join(here, name) for name in names if not name.startswith(".")):
            if is_part and is_part(path):
                continue
            if os.path.isdir(path):
                (linked if islink(path) else todo).append(path)
            elif os.path.isfile(path):
                yield path, _identity(path)
            elif islink(path) and should_be_one(path):
                yield path, None


def _identity(path: str) -> _Identity:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _part_of(folder: str, limits: Limits) -> Callable[[str], object] | None:
    """Return the test for a part of a folder that is one checkpoint; None for another folder."""
    with suppress(CheckpointError), closing(Probe(folder, limits)) as probe:
        if DCP.recognize(probe):
            return re.compile(r".+\.(distcp|metadata)|.*(pytorch_model_fsdp|optimizer)_0").fullmatch
        if DCP_SAFETENSORS.recognize(probe):
            return is_part_file
        if FSDP_RANKS.recognize(probe):
            return of_model
        if is_step(probe):
            return is_part
        archive = probe.ask(open_archive)
        if archive.records and os.path.realpath(archive.path) == os.path.realpath(folder):
            is_unzipped = any(known.recognize(probe) for known in candidates(probe))
            return (lambda path: True) if is_unzipped else None
    return None


def _may_be_one(path: str) -> bool:
    """Return True if the name or the first bytes are a checkpoint's."""
    if should_be_one(path) or _INDEX.fullmatch(path) or path.endswith(".distcp"):
        return True
    if path.endswith(".index"):
        return is_index(path)
    head, _ = _begins(path)
    return looks_like_checkpoint(head[:16]) or is_tar(head[:BLOCK])


def _begins(path: str) -> tuple[bytes, int]:
    """Return the first bytes of a file and its size; -1 where it cannot be read."""
    try:
        with closing(FileSource(path)) as source:
            return source.read(0, min(_HEAD, source.size)), source.size
    except CheckpointError:
        return b"", -1


def should_be_one(path: str) -> bool:
    """Return True if a file should be a checkpoint: by its name, or as the rest of a failed save.

    False for a file that cannot be read.
    """
    name = os.path.basename(path)
    if _NAMED_SO.fullmatch(name):
        return True
    if not _ANYTHING.fullmatch(name):
        return False
    head, size = _begins(path)
    if size < 0:
        return False
    if not head or head.startswith(_POINTER) or _PAGE.match(head):
        return True
    likely = _LIKELY.search(name.rpartition(".")[0]) and not _OTHERS.search(name)
    return bool(likely) and (
        not head.strip(b"\0") or head.startswith(_GZIP) or _is_note(head, size)
    )


def _is_note(head: bytes, size: int) -> bool:
    """Return True for a short text: a server's answer in the place of the file."""
    if size > _MOST_TEXT:
        return False
    text = head.decode("utf-8", "replace")
    return all(char.isprintable() or char.isspace() for char in text) and "\ufffd" not in text[:-1]
