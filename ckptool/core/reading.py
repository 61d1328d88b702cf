"""Read the bytes of tensors: within limits, with progress, and hashed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ckptool.core.model import Path, TensorRef
from ckptool.core.tree import name_of
from ckptool.errors import LimitExceeded
from ckptool.files.source import BytesDone, Progress
from ckptool.files.threads import run_in_order
from ckptool.limits import Limits

_JOB_BYTES, _JOB_TENSORS = 8 << 20, 64
"""The bytes and tensors of one job for a thread; many tensors are small."""


class Meter:
    """Counts the bytes done out of a total, and reports the progress."""

    def __init__(self, progress: Progress | None, total: int = 0) -> None:
        """Start with no bytes done."""
        self._progress = progress
        self._done = 0
        self.total = total

    def advance(self, nbytes: int) -> None:
        """Add bytes that are done, up to the total."""
        self._done = min(self._done + nbytes, self.total)
        if self._progress is not None and self.total:
            self._progress(self._done, self.total)

    def finish(self) -> None:
        """Report completion, even if there was less work than expected."""
        self.advance(self.total)


class RepeatedBytes:
    """Counts the bytes that strides repeat: a few stored bytes can expand to exabytes."""

    def __init__(self, limits: Limits) -> None:
        """Start with no repeated bytes."""
        self._max_bytes = limits.max_repeated_bytes
        self._sum = 0

    def add(self, path: Path, tensor: TensorRef) -> None:
        """Count a tensor that is about to be read.

        Raises:
            LimitExceeded: if too many of the bytes read so far are repeated.
        """
        storage = tensor.storage
        stored = storage.nbytes if storage is not None else 0
        self._sum += max(0, tensor.nbytes - stored)
        if self._sum > self._max_bytes:
            data = storage.data if storage is not None else None
            raise LimitExceeded(
                f"{name_of(path)!r} spreads {stored:,} stored bytes over {tensor.nbytes:,}: "
                f"reading it would exceed the limit of {self._max_bytes:,} repeated bytes",
                file=None if data is None else data.source.name,
            )


def hash_contents(
    leaves: Sequence[tuple[Path, TensorRef]], limits: Limits, advance: BytesDone | None = None
) -> list[str | None]:
    """Return the SHA-256 of the content of each tensor; ties are read once, in two threads.

    None stands for a tensor without plain content. `advance` is called with the bytes done.

    Raises:
        LimitExceeded: if strides repeat more bytes than in a real file.
        CorruptFile: if bytes cannot be read.
    """
    locations = [tensor.place if tensor.has_content else None for _, tensor in leaves]
    distinct_tensors: dict[Any, TensorRef] = {}  # by location
    repeated = RepeatedBytes(limits)
    for (path, tensor), location in zip(leaves, locations, strict=True):
        if location is not None and location not in distinct_tensors:
            repeated.add(path, tensor)
            distinct_tensors[location] = tensor
    hashes = _hash_distinct(list(distinct_tensors.values()), advance)
    hash_by_location = dict(zip(distinct_tensors, hashes, strict=True))
    return [hash_by_location.get(location) for location in locations]


def _hash_distinct(tensors: Sequence[TensorRef], advance: BytesDone | None) -> Iterator[str]:
    """Yield the hash of each tensor, in order, with threads if the sources allow it."""
    jobs = list(_group_into_jobs(tensors))
    run_jobs = run_in_order if all(map(_is_shared, tensors)) else map
    for job, hashes in zip(jobs, run_jobs(_hash_job, jobs), strict=True):
        yield from hashes
        if advance is not None:
            advance(sum(tensor.nbytes for tensor in job))


def _group_into_jobs(tensors: Iterable[TensorRef]) -> Iterator[list[TensorRef]]:
    """Yield the tensors in order, in groups large enough for a thread."""
    job: list[TensorRef] = []
    for tensor in tensors:
        job.append(tensor)
        if sum(member.nbytes for member in job) >= _JOB_BYTES or len(job) >= _JOB_TENSORS:
            yield job
            job = []
    if job:
        yield job


def _is_shared(tensor: TensorRef) -> bool:
    """Return True if several threads can read the bytes of a tensor at once."""
    return tensor.storage is not None and (
        tensor.storage.data is not None and tensor.storage.data.source.is_shared
    )


def _hash_job(tensors: Iterable[TensorRef]) -> list[str]:
    """Return the SHA-256 of the content of each tensor."""
    return list(map(hash_content, tensors))


def hash_content(tensor: TensorRef) -> str:
    """Return the SHA-256 of the content of a tensor that has content."""
    import hashlib  # loads OpenSSL, which checks of structure do not need

    digest = hashlib.sha256()
    for block in tensor.content():
        digest.update(block)
    return digest.hexdigest()
