"""The ways in which a checkpoint gets onto the disk, each planned first and then carried out."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from ckptool.checkpoint import Checkpoint
from ckptool.errors import CheckpointError, TruncatedFile, warn
from ckptool.files import FileSource
from ckptool.files.atomic import atomic_output
from ckptool.files.editing import apply_patch
from ckptool.files.file_set import atomic_set
from ckptool.files.locking import leads_to
from ckptool.files.output import FileOutput, Progress
from ckptool.files.system import announce_read
from ckptool.formats.base import EditPlan, WritePlan
from ckptool.symbolic.encoder import blockers
from ckptool.words import listed
from ckptool.writing.sharding import ShardPlan
from ckptool.writing.target import check_still_there
from ckptool.writing.verification import source_check, verify

__all__ = ["Edited", "Job", "NewFile", "NewSet", "Plan", "Untouched"]


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be written, where, and under which conditions."""

    checkpoint: Checkpoint
    path: str
    overwrite: bool
    in_place: bool
    """Whether the target is the source, or has its name."""
    verify: bool
    progress: Progress | None

    def check_sources(self) -> None:
        """Refuse to keep what was read of a file that changed; in place, it must still be there.

        A source of which another file has taken the place stays what it was, and is told.

        Raises:
            UnreadableFile: a source has been written to.
            WriteError: in place, another file has taken the place of the source, or none.
        """
        sources = self.checkpoint.sources
        for source in sources:
            source.check_unchanged()
        if self.in_place:
            check_still_there(self.path, sources)
            return
        for source in sources:
            if not leads_to(source.path, source.fileno()):
                warn(
                    f"{source.path}: has been replaced or removed meanwhile; "
                    "the result is of the file that was there before"
                )

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Where a source has been written to, what is found wrong with it comes from that.

        Raises:
            UnreadableFile: it has, and something went wrong that is no refusal of the system.
            TruncatedFile: it has become shorter.
        """
        try:
            yield
        except CheckpointError as error:
            if not isinstance(error, (OSError, TruncatedFile)):
                for source in self.checkpoint.sources:
                    source.check_unchanged()
            raise


class Plan(Protocol):
    """What will be on the disk, known before anything is written."""

    @property
    def format(self) -> str:
        """The name of the format."""
        ...

    @property
    def size(self) -> int:
        """Bytes of the file afterwards, of all files together."""
        ...

    @property
    def written(self) -> int:
        """Bytes that will go to the disk."""
        ...

    @property
    def tensors(self) -> int:
        """Names of tensors."""
        ...

    @property
    def left_out(self) -> tuple[str, ...]:
        """What the source has and the result has not, a phrase each."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What else is worth knowing, a sentence each."""
        ...

    @property
    def blockers(self) -> tuple[str, ...]:
        """Classes that keep `torch.load(weights_only=True)` from taking it."""
        ...

    @property
    def files(self) -> tuple[tuple[str, int], ...]:
        """Every file with its bytes, where there are several."""
        ...

    def carry_out(self, job: Job) -> None:
        """Write it, whole or not at all; errors as `writing.save`."""
        ...


class NewFile:
    """One file, written beside the target and renamed."""

    files: tuple[tuple[str, int], ...] = ()

    def __init__(self, plan: WritePlan, left_behind: tuple[str, ...]) -> None:
        """Carry out `plan`; `left_behind` is what was not taken along before it was made."""
        self._plan = plan
        self.format, self.size, self.written = plan.format, plan.size, plan.size
        self.tensors, self.notes, self.blockers = plan.tensors, plan.notes, plan.blockers
        self.left_out = (*left_behind, *plan.left_out)

    def carry_out(self, job: Job) -> None:
        """Write it, whole or not at all."""
        sources = job.checkpoint.sources
        announce(sources)

        def check() -> None:
            check_sources()
            if job.verify:
                verify(job.checkpoint, output.name, output.streamed, job.progress)
            job.check_sources()

        with (
            job.reading(),
            source_check(job.checkpoint, self.format) as check_sources,
            atomic_output(
                job.path,
                self.size,
                overwrite=job.overwrite or job.in_place,
                mode=permissions(sources),
                check=check,
                progress=job.progress,
            ) as output,
        ):
            self._plan.write(output)


class Edited:
    """The source itself, changed where it lies: the tensors' bytes are not touched."""

    files: tuple[tuple[str, int], ...] = ()

    def __init__(self, plan: EditPlan, format: str, left_out: tuple[str, ...]) -> None:
        """Carry out `plan`; `left_out` is what the changes did not take along."""
        self._plan = plan
        self.format, self.size, self.written = format, plan.size, len(plan.patch.data)
        self.tensors, self.notes, self.blockers = plan.tensors, plan.notes, plan.blockers
        self.left_out = left_out

    def carry_out(self, job: Job) -> None:
        """Edit the file; whatever goes wrong leaves it as it was."""

        def check() -> None:
            if job.verify:
                verify(job.checkpoint, job.path, {}, job.progress)

        header = job.checkpoint.with_root(None)
        with job.reading(), source_check(header, self.format) as check_header:
            check_header()
        apply_patch(job.checkpoint.sources[0], self._plan.patch, path=job.path, check=check)


class Untouched:
    """The source itself, which holds already what it is to hold."""

    written = 0
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    files: tuple[tuple[str, int], ...] = ()

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Leave the file of `checkpoint` as it is."""
        self.format, self.size = checkpoint.format, checkpoint.details.size
        self.tensors = sum(1 for _ in checkpoint.tensors())
        self.blockers = blockers(checkpoint.root)

    def carry_out(self, job: Job) -> None:
        """Make sure that it is still the file that was read, and as it should be."""
        with job.reading():
            if job.verify:
                verify(job.checkpoint, job.path, {}, job.progress)
        job.check_sources()


class NewSet:
    """Shards and their index, which appear together."""

    def __init__(
        self,
        plan: ShardPlan,
        index: str,
        left_behind: tuple[str, ...],
        superseded: tuple[str, ...],
    ) -> None:
        """Carry out `plan`, which has an index, at `index`; `superseded` shards stay beside it."""
        self._plan = plan
        self._index = index
        self.format, self.size, self.written = plan.format, plan.size, plan.size
        self.tensors, self.blockers = plan.tensors, plan.blockers
        stays = f"shards that the new index does not name stay: {listed(superseded)}"
        self.notes = (*plan.notes, *((stays,) if superseded else ()))
        self.left_out = (*left_behind, *plan.left_out)
        self.files = (
            *((shard.path, shard.plan.size) for shard in plan.shards),
            (index, len(plan.index)),
        )

    def carry_out(self, job: Job) -> None:
        """Write all of them, or none."""
        sources = job.checkpoint.sources
        announce(sources)
        written: list[FileOutput] = []

        def check() -> None:
            check_sources()
            if job.verify:
                for shard, output in zip(self._plan.shards, written, strict=True):
                    verify(shard.checkpoint, output.name, output.streamed, job.progress)
            job.check_sources()

        with (
            job.reading(),
            source_check(job.checkpoint, self.format) as check_sources,
            atomic_set(
                self._index,
                dict(self.files),
                overwrite=job.overwrite or job.in_place,
                mode=permissions(sources),
                check=check,
                progress=job.progress,
            ) as new,
        ):
            for shard in self._plan.shards:
                with new.file(shard.path) as output:
                    shard.plan.write(output)
                written.append(output)
            with new.file(self._index) as output:
                output.write(self._plan.index)


def announce(sources: Sequence[FileSource]) -> None:
    """Say that the sources will be read from front to back."""
    for source in sources:
        announce_read(source.fileno())


def permissions(sources: Sequence[FileSource]) -> int | None:
    """The permission bits of the first source, which a new file takes over."""
    if not sources:
        return None
    return stat.S_IMODE(os.fstat(sources[0].fileno()).st_mode) & 0o777
