"""Whether checkpoints are intact: one, several, all in a folder; with a manifest or without.

What is wrong is a `Problem` in a `Verdict`, also what keeps a file from being opened. What keeps it
from being looked at (no such file, no permission, a kind that is not read) is an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ckptool.errors import CheckpointError, UnsupportedFormat
from ckptool.formats.base import Findings, Problem
from ckptool.inspection.examining import Progress, examine
from ckptool.inspection.manifest import (
    HashedTensor,
    manifest_name,
    read_manifest,
    write_manifest,
)
from ckptool.inspection.manifest_check import held_against
from ckptool.inspection.searching import checkpoints_in, should_be_one
from ckptool.inspection.verdict import NOT_ONE, Verdict
from ckptool.limits import DEFAULT_LIMITS, Limits

__all__ = ["ManifestOutcome", "Verdict", "Verifier", "verify"]


@dataclass(frozen=True, slots=True)
class ManifestOutcome:
    """What became of a manifest: `written`, `checked`, or `not-written`."""

    file: str
    action: str
    files: int
    tensors: int
    problems: tuple[Problem, ...] = ()
    """Files that it lists and that are gone."""
    unhashed: int = 0
    """Tensors of a written one that have no content hash, being sparse, quantised or the like."""
    reason: str | None = None
    """Why it was not written: a `problem` in a file, or an `error` before one was looked at."""

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of `ckptool.verify/1`."""
        return {
            "file": self.file,
            "action": self.action,
            "files": self.files,
            "tensors": self.tensors,
            "problems": [problem.to_dict() for problem in self.problems],
            "unhashed": self.unhashed,
            "reason": self.reason,
        }


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
            told, unread = False, dict[str, list[Problem]]()
            for one in inside:
                result = self._tried(one, alone=alone)
                if one == path or should_be_one(one) or not _is_other(result):
                    told = True
                    yield result
                elif isinstance(result, UnsupportedFormat):
                    folder, name = os.path.split(one)
                    text = f"not looked at: it {result.message.removeprefix(one).lstrip()}"
                    unread.setdefault(folder, []).append(Problem("unread", name, text, result.hint))
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
            found = Findings((Problem("manifest", "", text),))
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

    def _gone(self, manifest: str) -> Iterator[Problem]:
        folder = os.path.dirname(manifest)
        for name in self._listed:
            if name not in self._seen and not os.path.exists(os.path.join(folder, name)):
                yield Problem("missing", name, "the manifest lists it, and it is gone")


def _is_other(result: Verdict | CheckpointError) -> bool:
    """Return True if the file is no checkpoint that ckptool reads."""
    if isinstance(result, CheckpointError):
        return isinstance(result, UnsupportedFormat)
    return any(problem.kind == NOT_ONE for problem in result.problems)
