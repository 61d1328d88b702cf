"""Write a set of files with several processes, on one machine or many.

Each process writes files next to their targets, under temporary names. Complete files get names
derived from the plan, so that the same plan continues with them after an interruption; any other
plan removes them. When all are complete, the first process writes the index and renames them, like
`open_atomic_set`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol, TypeVar

from ckptool.core.tree import name_of
from ckptool.errors import UnreadableFile
from ckptool.files.atomic import PendingFile, begin_set, plan_files, refuse_target, shift_progress
from ckptool.files.journal import read_journal
from ckptool.files.renames import recover_set, rename_all
from ckptool.files.system import convert_os_errors
from ckptool.files.temporary import temporary_name
from ckptool.formats.base import NewFile, WritePlan
from ckptool.writing.job import Job
from ckptool.writing.verification import check_sources_meanwhile, verify_file

_Result = TypeVar("_Result")


class WriterGroup(Protocol):
    """Processes that make the same calls in the same order, such as `loading.ranks.Ranks`."""

    @property
    def rank(self) -> int:
        """The rank of this process."""

    @property
    def has_failed(self) -> bool:
        """True if a process is known to have failed; does not wait."""

    def raise_on_all_ranks(self) -> AbstractContextManager[None]:
        """Raise an error in every process if the block raises in one of them."""

    def run_on_first(self, work: Callable[[], _Result]) -> _Result:
        """Do the work only in process 0, and return its result in all processes."""

    def collect(self, own: _Result) -> list[_Result]:
        """Return the value of each process, in the order of ranks."""


def write_divided(plan: WritePlan, job: Job, group: WriterGroup, options: str) -> None:
    """Write the files of a plan, each process its own, and their index last.

    Args:
        plan: A plan with an index, the same in every process.
        job: The job of `save`.
        group: The processes.
        options: Everything else that the bytes depend on, to identify the same write later.

    Raises:
        As `save`, in every process if it is raised in one.
    """
    _check_same_sources(job, group)
    target = os.path.realpath(plan.index)
    pending_files = plan_files(target, {file.path: file.size for file in plan.files}, job.mode)
    shards = pending_files[:-1]  # the last one is the index
    token = group.run_on_first(lambda: _hash_write(plan, job, options))
    complete_names = {  # the name of each complete file until all are renamed, by its target
        shard.path: temporary_name(target, f".ckptool-{token}-{number:05}.whole")
        for number, shard in enumerate(shards, 1)
    }
    complete_paths: set[str] = set()

    def begin() -> frozenset[str]:
        """Lock the set, and return the targets of files that an earlier run completed.

        These files keep their temporary names, and are renamed at the end with the others.
        """
        # An earlier run gave a shard such a name only when all of it was written.
        complete = [
            shard for shard in shards if _try_size(complete_names[shard.path]) == shard.size
        ]
        for shard in complete:
            shard.temporary = complete_names[shard.path]
            complete_paths.add(shard.temporary)
        set_lock = begin_set(
            plan.index,
            target,
            pending_files,
            overwrite=job.may_replace,
            is_kept=complete_paths.__contains__,
        )
        stack.enter_context(set_lock)
        return frozenset(shard.path for shard in complete)

    with ExitStack() as stack:
        complete = group.run_on_first(begin)
        missing = [shard for shard in shards if shard.path not in complete]
        process_count = len(group.collect(0))  # each process gives a value
        shares = _distribute(missing, process_count)
        with group.raise_on_all_ranks():
            files = {file.path: file for file in plan.files}
            files_of_rank = [(files[shard.path], shard) for shard in shares[group.rank]]
            _write_share(job, files_of_rank, complete_names, plan.format, group)
        group.run_on_first(lambda: _finish(plan, target, pending_files, complete_names, job))


def finish_divided(plan: WritePlan, job: Job, options: str) -> bool:
    """Finish an earlier run of the same write if its renames were interrupted; True if they were.

    The journal of the renames names the complete files, and these names have the token of the run.

    Raises:
        As `recover_set`.
    """
    journal = read_journal(os.path.realpath(plan.index))
    if journal is None:
        return False
    run_token = f".ckptool-{_hash_write(plan, job, options)}-"
    if run_token not in str(journal.facts):  # the facts list the files
        return False
    recover_set(plan.index, journal)
    return True


def _check_same_sources(job: Job, group: WriterGroup) -> None:
    """Refuse sources that are not the same files in all processes.

    Raises:
        UnreadableFile: if one differs; the message shows the first.
    """
    versions_by_rank = group.collect([source.version() for source in job.checkpoint.sources])
    for number, source in enumerate(job.checkpoint.sources):
        if len({versions[number] for versions in versions_by_rank}) > 1:
            raise UnreadableFile(
                "differs between processes: it was written again, or machines have their "
                "own copies",
                file=source.name,
                hint="try again when nothing writes to it; all machines must read the same file",
            )


def _hash_write(plan: WritePlan, job: Job, options: str) -> str:
    """Return a token that identifies a write by its sources, options and files."""
    checkpoint = job.checkpoint
    facts = [options]
    facts += (f"{source.name} {source.version()}" for source in checkpoint.sources)
    # The files of a folder are no sources before they are read for the first time.
    for folder, _, names in sorted(os.walk(checkpoint.path)):
        for path in (os.path.join(folder, name) for name in sorted(names)):
            if os.path.isfile(path):
                status = os.stat(path)
                facts.append(f"{path} {status.st_size} {status.st_mtime_ns}")
    for file in plan.files:
        facts.append(f"{os.path.basename(file.path)} {file.size}")
        for tensor_path, tensor in file.checkpoint.tensors() if file.checkpoint else ():
            facts.append(f"{name_of(tensor_path)} {tensor.dtype} {tensor.shape}")
    return hashlib.sha256("\0".join(facts).encode(errors="surrogatepass")).hexdigest()[:12]


def _try_size(path: str) -> int | None:
    """Return the size of a file; None if it does not exist."""
    try:
        return os.lstat(path).st_size
    except OSError:
        return None


def _distribute(files: Sequence[PendingFile], count: int) -> list[list[PendingFile]]:
    """Return the files of each of `count` processes.

    The largest file comes first, each to the process with the fewest bytes.
    """
    shares: list[list[PendingFile]] = [[] for _ in range(count)]
    for file in sorted(files, key=lambda file: -file.size):
        smallest = min(shares, key=lambda share: sum(other.size for other in share))
        smallest.append(file)
    return shares


def _write_share(
    job: Job,
    files: Sequence[tuple[NewFile, PendingFile]],
    complete_names: Mapping[str, str],
    format: str,
    group: WriterGroup,
) -> None:
    """Write the files of this process, and give complete ones their names in `complete_names`.

    Stops after a failure of another process. A source that changed is an error. Only the sources of
    these files are checked.
    """
    total, done = sum(pending.size for _, pending in files), 0
    roots = [file.checkpoint.root for file, _ in files if file.checkpoint]
    roots += [member.checkpoint.root for file, _ in files for member in file.members]
    own_content = job.checkpoint.with_root(roots)
    with job.attribute_errors(), check_sources_meanwhile(own_content, format) as wait_for_checks:
        for file, pending in files:
            if group.has_failed:
                return
            pending.old = refuse_target(pending.path, overwrite=job.may_replace)
            pending.reserve()
            with (
                convert_os_errors(pending.path),
                pending.open_output(shift_progress(job.progress, done, total)) as output,
            ):
                output.is_verified = job.verify
                file.write(output)
            if job.verify:
                verify_file(file, output, job.progress)
            done += pending.size
            job.check_sources()
            os.replace(pending.temporary, complete_names[pending.path])
        wait_for_checks()


def _finish(
    plan: WritePlan,
    target: str,
    pending_files: Sequence[PendingFile],
    complete_names: Mapping[str, str],
    job: Job,
) -> None:
    """Write the index, the last file, and rename all files to their targets, in process 0.

    `complete_names` has the present name of each complete shard, by its target.
    """
    *shards, index = pending_files
    *_, planned_index = plan.files
    index.reserve()
    with convert_os_errors(index.path), index.open_output(progress=None) as output:
        planned_index.write(output)
    for shard in shards:  # another process may have written it, under another temporary name
        shard.temporary = complete_names[shard.path]
        shard.inode = os.stat(shard.temporary).st_ino
    for pending in pending_files:
        pending.check_finished(overwrite=job.may_replace)
    job.check_sources()
    rename_all(target, [pending.make_rename() for pending in pending_files])
