"""Execute a planned write, completely or not at all."""

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
from ckptool.files.journal import is_path_of
from ckptool.files.place import place_of
from ckptool.files.source import Progress
from ckptool.files.system import announce_read
from ckptool.formats.base import WritePlan
from ckptool.writing.target import check_still_source
from ckptool.writing.verification import check_sources_meanwhile, verify, verify_file


@dataclass(frozen=True, slots=True)
class Job:
    """The sources and target of a write, and its conditions."""

    checkpoint: Checkpoint
    path: str
    overwrite: bool
    in_place: bool
    """True if the target is the source, or has its name."""
    verify: bool
    """True to read the file back and compare it."""
    progress: Progress | None
    """Called with the bytes done and the total bytes."""

    @property
    def may_replace(self) -> bool:
        """True if an existing file may be replaced."""
        return self.overwrite or self.in_place

    @property
    def mode(self) -> int | None:
        """The permission bits of new files, from the first source, if any."""
        descriptors = self.open_files()
        return stat.S_IMODE(os.fstat(descriptors[0]).st_mode) & 0o777 if descriptors else None

    def open_files(self) -> list[int]:
        """Return the descriptors of the sources."""
        return [fd for source in self.checkpoint.sources if (fd := source.fd()) is not None]

    def check_sources(self) -> None:
        """Refuse the result if a source changed; in place, it must also still exist.

        A source that was replaced by another file is still intact, and only noted.

        Raises:
            UnreadableFile: if a source was written to.
            WriteError: if, in place, the source was replaced or removed.
        """
        sources = self.checkpoint.sources
        for source in sources:
            source.check_unchanged()
        if self.in_place:
            check_still_source(self.path, sources)
            return
        for source in sources:
            fd = source.fd()
            if fd is not None and not is_path_of(source.name, fd):
                warn(
                    f"{source.name}: was replaced or removed during the run; "
                    "the result is of the file that was there before"
                )

    @contextmanager
    def attribute_errors(self) -> Iterator[None]:
        """Attribute errors in the block to a source that was written to, if one was.

        Errors of the system have other causes, and a truncated source is named already.

        Raises:
            UnreadableFile: if one was, and the error is not from the system.
            TruncatedFile: if it became shorter.
        """
        try:
            yield
        except CheckpointError as error:
            if not isinstance(error, (OSError, TruncatedFile)):
                for source in self.checkpoint.sources:
                    source.check_unchanged()
            raise


def execute(plan: WritePlan, job: Job) -> None:
    """Execute `plan`, completely or not at all; errors as for `save`."""
    if plan.files:
        _write_files(plan, job)
        return

    def verify_if_asked() -> None:
        """Read the file back and compare it, if the job asks for it."""
        if job.verify:
            verify(job.checkpoint, job.path, {}, job.progress)

    if plan.patch is None:  # the source already has the new content
        with job.attribute_errors():
            verify_if_asked()
        job.check_sources()
        return
    # The patch is made from the header, so its checksum is checked before anything is written.
    header = job.checkpoint.with_root(None)
    with job.attribute_errors(), check_sources_meanwhile(header, plan.format) as wait_for_checks:
        wait_for_checks()
    apply_patch(job.checkpoint.sources[0], plan.patch, path=job.path, check=verify_if_asked)


def _write_files(plan: WritePlan, job: Job) -> None:
    """Write new files next to their targets, and rename them when all of them are checked."""
    outputs: list[FileOutput] = []
    for fd in job.open_files():
        announce_read(fd)

    def check_before_rename() -> None:
        """Check the sources, and verify the new files if the job asks for it."""
        wait_for_checks()
        if job.verify:
            for file, output in zip(plan.files, outputs, strict=True):
                verify_file(file, output, job.progress)
        job.check_sources()

    with (
        job.attribute_errors(),
        check_sources_meanwhile(job.checkpoint, plan.format) as wait_for_checks,
        place_of(job.path).open_outputs(
            plan.index or job.path,
            {file.path or job.path: file.size for file in plan.files},
            overwrite=job.may_replace,
            mode=job.mode,
            check=check_before_rename,
            progress=job.progress,
            shared=plan.files[0].shared if len(plan.files) == 1 else None,
        ) as open_output,
    ):
        for file in plan.files:
            with open_output(file.path or job.path) as output:
                output.is_verified = job.verify
                file.write(output)
            outputs.append(output)
