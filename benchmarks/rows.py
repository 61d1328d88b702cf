"""What is measured: each row a piece of work, by ckptool and by what people use today."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import idioms
from benchmarks.inputs import HALF, shapes
from benchmarks.timing import Command, Measured, measure, ratio, warm

__all__ = ["Inputs", "Result", "Row", "rows", "run_row"]

MB = 10**6
IDIOM_MOST = 10**9
"""Bytes up to which the torch idiom is run beside an edit."""
SLACK = 1.02
"""On the memory of another process that loads torch as well: the code of ckptool itself."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The files that are there to measure on; `many` by number of tensors."""

    large: Path
    twin: Path
    """A copy of it."""
    single: Path
    """Of float32."""
    other: Path
    """Of the same names and shapes, other numbers."""
    edited: dict[int, Path]
    """By bytes; the largest is hollow."""
    many: dict[int, Path]
    renamed: Path
    """Of as many tensors as the largest of those, under other names."""
    folder: Path
    size: int
    """Bytes that the large files were made for."""


@dataclass(frozen=True, slots=True)
class Row:
    """One piece of work. The first command is ours; a bound that is None is not held.

    `most_times` bounds our time as a multiple of the command named `beside`'s, `most_seconds` and
    `most_bytes` bound our own, `peak_beside` bounds our memory by that command's too.
    """

    work: str
    source: Path
    commands: tuple[Command, ...]
    second: Path | None = None
    """Another file that is read."""
    output: Path | None = None
    beside: str = ""
    most_times: float | None = None
    most_seconds: float | None = None
    most_bytes: int | None = None
    peak_beside: bool = False
    edits: bool = False
    """The source is edited: what each run appends to it is cut off again."""

    def bounds(self) -> Iterator[str]:
        """Each bound in words."""
        if self.most_seconds is not None:
            yield f"<= {self.most_seconds:g} s"
        if self.most_times is not None:
            yield f"<= {self.most_times:g} x {self.beside}"
        if self.most_bytes is not None:
            yield f"<= {self.most_bytes // MB} MB"
        if self.peak_beside:
            yield "no more memory"


@dataclass(frozen=True, slots=True)
class Result:
    """A row, measured."""

    row: Row
    measured: tuple[Measured, ...]

    @property
    def ours(self) -> Measured:
        """The runs of ckptool."""
        return self.measured[0]

    @property
    def theirs(self) -> tuple[Measured, ...]:
        """The runs of the others."""
        return self.measured[1:]

    def misses(self) -> Iterator[str]:
        """Each bound that was not kept, in words."""
        row, ours = self.row, self.ours
        if row.most_seconds is not None and ours.seconds > row.most_seconds:
            yield f"{ours.seconds:.2f} s, at most {row.most_seconds:g} s wanted"
        if row.most_bytes is not None and ours.peak > row.most_bytes:
            yield f"{ours.peak / MB:.0f} MB, at most {row.most_bytes / MB:.0f} MB wanted"
        for other in self.theirs:
            if other.command.label != row.beside:
                continue
            times = ratio(ours, other)
            if row.most_times is not None and times > row.most_times:
                yield f"{times:.2f} x {row.beside}, at most {row.most_times:g} x wanted"
            if row.peak_beside and ours.peak > SLACK * other.peak:
                yield f"{ours.peak / MB:.0f} MB, at most {other.peak / MB:.0f} MB wanted"


def run_row(row: Row, repeats: int) -> Result:
    """Measure a row: its source warm, its output gone before each run."""
    length = row.source.stat().st_size

    def before() -> None:
        clear(row, length)
        if not row.edits:  # an edit reads the header alone, and a hollow file fills no cache
            warm(row.source)
            if row.second is not None:
                warm(row.second)

    try:
        return Result(row, measure(row.commands, repeats, before))
    finally:
        clear(row, length)


def clear(row: Row, length: int) -> None:
    """Remove what the last run wrote; `length` is the source's own."""
    if row.edits:
        os.truncate(row.source, length)
    if row.output is not None and row.output.is_dir():
        shutil.rmtree(row.output)
    elif row.output is not None:
        row.output.unlink(missing_ok=True)


def rows(inputs: Inputs) -> tuple[Row, ...]:
    """Every row, the quick ones first."""
    return (
        *list_rows(inputs),
        *edit_rows(inputs.edited),
        *rewrite_rows(inputs.large, inputs.folder),
        cast_row(inputs.single, inputs.folder),
        shard_row(inputs.large, inputs.folder),
        *diff_rows(inputs),
        *value_rows(inputs),
        *load_rows(inputs.large),
        *fill_rows(inputs.large, inputs.size),
        *match_rows(inputs.many, inputs.renamed),
    )


def list_rows(inputs: Inputs) -> Iterator[Row]:
    """Questions about the header."""
    source = inputs.large
    yield Row(
        "`list`, large file",
        source,
        (
            Command.ckptool("list", source),
            Command.program("torch.load(mmap=True) and a loop", idioms.LIST, source),
        ),
        most_seconds=0.15,
        most_bytes=40 * MB,
    )
    for count, path in inputs.many.items():
        alone = Command.program("torch.load(mmap=True) alone", idioms.LOAD_MAPPED, path)
        yield Row(
            f"`list`, {count:,} tensors",
            path,
            (Command.ckptool("list", path), alone),
            beside=alone.label,
            most_times=0.5 if count == max(inputs.many) else None,
        )


def edit_rows(files: dict[int, Path]) -> Iterator[Row]:
    """Names changed where the file lies, whatever its size; the idiom writes the file anew."""
    for size, path in files.items():
        alone = Command.program('torch.load(map_location="meta") alone', idioms.LOAD_META, path)
        idiom = Command.program("torch idiom, not synced", idioms.STRIP_ITSELF, path)
        yield Row(
            f"`strip-module --in-place`, {words(size)}",
            path,
            (
                Command.ckptool("strip-module", "--in-place", path),
                idiom if size <= IDIOM_MOST else alone,
            ),
            most_seconds=0.2,
            most_bytes=40 * MB,
            edits=True,
        )


def words(size: int) -> str:
    """A round size: 10 MB, 1 TB."""
    for unit, least in (("TB", 10**12), ("GB", 10**9)):
        if size >= least:
            return f"{size / least:g} {unit}"
    return f"{size / MB:g} MB"


def cast_row(source: Path, folder: Path) -> Row:
    """float32 to bfloat16, counted and read back; the idiom does neither, and does not sync."""
    output = folder / "out.pth"
    idiom = Command.program("torch idiom, not synced", idioms.CAST, source, output)
    return Row(
        "`cast --dtype bfloat16`, large float32 file",
        source,
        (Command.ckptool("cast", source, "--dtype", "bfloat16", "-o", output), idiom),
        output=output,
        beside=idiom.label,
        most_times=1.0,
        most_bytes=300 * MB,
    )


def shard_row(source: Path, folder: Path) -> Row:
    """One file into several of 1 GB, synced."""
    output = folder / "shards"
    target = output / "model.safetensors"
    copy = Command.copy(source, output)
    return Row(
        "`convert --max-shard-size 1GB`, large file",
        source,
        (Command.ckptool("convert", source, target, "--max-shard-size", "1GB"), copy),
        output=output,
        beside=copy.label,
        most_times=1.1,
        most_bytes=60 * MB,
    )


def rewrite_rows(source: Path, folder: Path) -> Iterator[Row]:
    """The file written anew, synced; the idioms do not sync."""
    torch_file, safetensors_file = folder / "out.pth", folder / "out.safetensors"
    yield rewrite_row(
        "strip-module", source, torch_file, ("-o", torch_file), idioms.STRIP, most_times=1.0
    )
    yield rewrite_row(
        "remap", source, torch_file, ("--to", "cpu", "-o", torch_file), idioms.REMAP, most_times=1.0
    )
    yield rewrite_row(
        "convert", source, safetensors_file, (safetensors_file,), idioms.CONVERT, most_times=1.1
    )


def rewrite_row(
    verb: str,
    source: Path,
    output: Path,
    options: tuple[object, ...],
    idiom: str,
    *,
    most_times: float,
) -> Row:
    """A rewriting verb beside a synced copy of the file and beside the torch idiom."""
    copy = Command.copy(source, output)
    return Row(
        f"`{verb}` to a new `{output.suffix}`, large file",
        source,
        (
            Command.ckptool(verb, source, *options),
            copy,
            Command.program("torch idiom, not synced", idiom, source, output),
        ),
        output=output,
        beside=copy.label,
        most_times=most_times,
        most_bytes=60 * MB,
    )


def diff_rows(inputs: Inputs) -> Iterator[Row]:
    """Two files held against each other: by their bytes, by their headers, by their numbers."""
    large, twin = inputs.large, inputs.twin
    plain = Command.system("cmp", "cmp", large, twin)
    yield Row(
        "`diff`, two equal large files",
        large,
        (Command.ckptool("diff", large, twin), plain),
        second=twin,
        beside=plain.label,
        most_times=1.2,
        most_bytes=60 * MB,
    )
    for option in ("--quick", "--structure"):
        yield Row(
            f"`diff {option}`, two equal large files",
            large,
            (Command.ckptool("diff", option, large, twin), plain),
            second=twin,
            most_seconds=0.3,
            most_bytes=40 * MB,
        )
    single, other = inputs.single, inputs.other
    idiom = Command.program("torch idiom, max abs alone", idioms.COMPARE, single, other)
    yield Row(
        "`diff`, two large float32 files that differ everywhere",
        single,
        (Command.ckptool("diff", single, other, ends=1), idiom),
        second=other,
        beside=idiom.label,
        most_times=1.0,
        most_bytes=400 * MB,
    )


def value_rows(inputs: Inputs) -> Iterator[Row]:
    """Every byte of one file read, and what is found out from it."""
    unzip = Command.system("unzip -t", "unzip", "-tqq", inputs.large)
    yield Row(
        "`verify`, large file",
        inputs.large,
        (Command.ckptool("verify", inputs.large), unzip),
        beside=unzip.label,
        most_times=0.2,
        most_bytes=60 * MB,
    )
    idiom = Command.program("torch idiom: min, max, mean, std", idioms.STATS, inputs.single)
    yield Row(
        "`stats`, large float32 file",
        inputs.single,
        (Command.ckptool("stats", inputs.single), idiom),
        most_bytes=400 * MB,
    )


def load_rows(source: Path) -> Iterator[Row]:
    """Tensors in memory, in Python."""
    for name, ours, theirs in (
        ("load_state_dict", idioms.CKPTOOL_LOAD, idioms.LOAD),
        ("load_state_dict(mmap=True)", idioms.CKPTOOL_LOAD_MAPPED, idioms.LOAD_MAPPED),
    ):
        label = name.replace("load_state_dict", "torch.load").replace("()", "")
        yield Row(
            f"`{name}`, large file",
            source,
            (
                Command.program(name, ours, source),
                Command.program(label, theirs, source),
            ),
            beside=label,
            most_times=1.0,
            peak_beside=True,
        )


def fill_rows(source: Path, size: int) -> Iterator[Row]:
    """A model filled, without the time that building it takes; names are other than the file's."""
    ours = Command.program("load_into", idioms.CKPTOOL_FILL, source, size, tells=True)
    theirs = Command.program(
        "torch.load(mmap=True), load_state_dict", idioms.FILL, source, size, tells=True
    )
    yield Row(
        "`load_into(model)`, large file",
        source,
        (ours, theirs),
        beside=theirs.label,
        most_times=1.0,
        most_bytes=HALF * sum(map(math.prod, shapes(size).values())) + 300 * MB,
    )
    ours = Command.program("load_into", idioms.CKPTOOL_FILL_META, source, size, tells=True)
    theirs = Command.program(
        "torch.load(mmap=True), load_state_dict(assign=True)",
        idioms.FILL_META,
        source,
        size,
        tells=True,
    )
    yield Row("`load_into(model)` on `meta`, large file", source, (ours, theirs), most_seconds=1.0)


def match_rows(many: dict[int, Path], renamed: Path) -> Iterator[Row]:
    """Names alone: a wrapper and a prefix to take off each, or a rule to be found."""
    count = max(many)
    ours = Command.program("match", idioms.CKPTOOL_MATCH, count, tells=True)
    theirs = Command.program(
        "consume_prefix_in_state_dict_if_present, told both", idioms.CONSUME, count, tells=True
    )
    yield Row(f"`match`, {count:,} names", many[count], (ours, theirs), most_seconds=2.0)
    idiom = Command.program(
        "torch.load(mmap=True) of both, replace, told the names", idioms.MATCH, many[count], renamed
    )
    yield Row(
        f"`match --like` another file, {count:,} names",
        many[count],
        (Command.ckptool("match", many[count], "--like", renamed), idiom),
        second=renamed,
        beside=idiom.label,
        most_times=1.0,
    )
