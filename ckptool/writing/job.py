"""A planned write, carried out: whole, or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ckptool.core.checkpoint import Checkpoint
from ckptool.errors import CheckpointError, TruncatedFile, warn
from ckptool.files.atomic import FileOutput
from ckptool.files.editing import apply_patch
from ckptool.files.journal import leads_to
from ckptool.files.place import place_of
from ckptool.files.source import Progress
from ckptool.files.system import announce_read
from ckptool.formats.base import WritePlan
from ckptool.writing.target import check_still_there
from ckptool.writing.verification import source_check, verify, verify_file


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

    @property
    def may_replace(self) -> bool:
        """Whether a file that is there may be replaced."""
        return self.overwrite or self.in_place

    @property
    def mode(self) -> int | None:
        """The permission bits of new files, those of the first source; None: there is none."""
        open_files = self.open_files()
        return stat.S_IMODE(os.fstat(open_files[0]).st_mode) & 0o777 if open_files else None

    def open_files(self) -> list[int]:
        """Return the descriptors of the sources."""
        return [fd for source in self.checkpoint.sources if (fd := source.fd()) is not None]

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
            fd = source.fd()
            if fd is not None and not leads_to(source.name, fd):
                warn(
                    f"{source.name}: was replaced or removed during the run; "
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


def carry_out(plan: WritePlan, job: Job) -> None:
    """Execute `plan`, whole or not at all; errors as `save`."""
    if plan.files:
        _write_files(plan, job)
        return

    def check() -> None:
        if job.verify:
            verify(job.checkpoint, job.path, {}, job.progress)

    if plan.patch is None:  # the source holds already what it is to hold
        with job.reading():
            check()
        job.check_sources()
        return
    header = job.checkpoint.with_root(None)
    with job.reading(), source_check(header, plan.format) as check_header:
        check_header()
    apply_patch(job.checkpoint.sources[0], plan.patch, path=job.path, check=check)


def _write_files(plan: WritePlan, job: Job) -> None:
    """Write new files beside their targets, reading the sources from front to back; rename them."""
    outputs: list[FileOutput] = []
    for fd in job.open_files():
        announce_read(fd)

    def check() -> None:
        check_sources()
        if job.verify:
            for file, output in zip(plan.files, outputs, strict=True):
                verify_file(file, output, job.progress)
        job.check_sources()

    with (
        job.reading(),
        source_check(job.checkpoint, plan.format) as check_sources,
        place_of(job.path).new_files(
            plan.index or job.path,
            {file.path or job.path: file.size for file in plan.files},
            overwrite=job.may_replace,
            mode=job.mode,
            check=check,
            progress=job.progress,
            shared=plan.files[0].shared if len(plan.files) == 1 else None,
        ) as output_of,
    ):
        for file in plan.files:
            with output_of(file.path or job.path) as output:
                output.is_verified = job.verify
                file.write(output)
            outputs.append(output)
