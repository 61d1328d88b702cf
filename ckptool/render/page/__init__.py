"""A report as one HTML page without other files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptool._lazy import Result
from ckptool.core.checkpoint import Checkpoint
from ckptool.core.values import to_document
from ckptool.files.atomic import open_atomic_output
from ckptool.render.page.document import render_page
from ckptool.render.text import format_size
from ckptool.words import clean, counted
from ckptool.writing.target import check_target

if TYPE_CHECKING:
    from ckptool.comparison.report import Report


@dataclass(frozen=True, slots=True, repr=False)
class PageReceipt(Result):
    """The contents of a page, and its path."""

    path: str
    """The path of the page."""
    size: int
    """The size of the page in bytes."""
    source: str
    """The first file of the report."""
    other: str | None
    """The second file; None without one."""
    tensors: int
    """The number of tensors in the report."""
    measured: int
    """The number of tensors whose values were read."""
    identical: bool | None
    """True if the two files are equal; None for one file."""
    structure: bool | None
    """True if only headers were compared, without values; None for one file."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""

    def to_dict(self) -> dict[str, Any]:
        """Return the document `ckptool.report/1`."""
        return {
            "schema": "ckptool.report/1",
            "source": self.source,
            "other": self.other,
            "file": self.path,
            **to_document(self, "source", "other", "path"),  # all fields but these
        }


def write_page(
    report: Report,
    path: str | os.PathLike[str],
    checkpoints: Sequence[Checkpoint],
    *,
    overwrite: bool = False,
) -> PageReceipt:
    """Write the page of a report about `checkpoints`.

    Raises:
        UnreadableFile: a checkpoint has changed.
        CheckpointError: see `check_target` and `open_atomic_output`.
    """
    for checkpoint in checkpoints:
        check_target(checkpoint, path, overwrite=overwrite, in_place=False)
    content = render_page(report)

    def check() -> None:
        """Raise an error if a source has changed."""
        for checkpoint in checkpoints:
            for source in checkpoint.sources:
                source.check_unchanged()

    with open_atomic_output(path, len(content), overwrite=overwrite, check=check) as output:
        output.write(content)
    return PageReceipt(
        path=os.fspath(path),
        size=len(content),
        source=report.file.info.file,
        other=None if report.other is None else report.other.info.file,
        tensors=len(report.tensors),
        measured=sum(tensor.measures is not None for tensor in report.tensors),
        identical=None if report.diff is None else report.diff.identical,
        structure=None if report.diff is None else report.diff.structure,
        notes=report.notes,
    )


def page_lines(receipt: PageReceipt) -> Iterator[str]:
    """Yield the notes, and the line about the page."""
    for note in receipt.notes:
        yield f"note: {clean(note)}"
    yield page_line(receipt)


def page_line(receipt: PageReceipt) -> str:
    """Return the path and the size of the page."""
    tensors = counted(receipt.tensors, "tensor")
    return f"wrote {clean(receipt.path)} ({tensors}, {format_size(receipt.size)})"
