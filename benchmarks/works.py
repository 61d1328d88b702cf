"""What is measured, the quick works first."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks import idioms
from benchmarks.inputs import HALF, shapes
from benchmarks.rows import MB, Growth, Row
from benchmarks.timing import Command

__all__ = ["HOLLOW", "Inputs", "rows"]

HOLLOW = 10**12
"""Bytes of a file that takes no room."""
IDIOM_MOST = 10**9
"""Bytes up to which the torch idiom is run beside an edit."""


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
    zero: Path
    """The folder of a step of DeepSpeed, as large as `single`."""
    folder: Path
    dcp: Path
    """A folder of `torch.distributed.checkpoint`, by four processes."""
    shards: Path
    """A folder of an index and 64 shards whose tensors take no room."""
    files: Path
    """A folder of a thousand small files, as torch of many versions and numpy wrote them."""
    size: int
    """Bytes that the large files were made for."""
    peers: Path | None = None
    """The folder of other tools' programs, if they are to be run too."""


def rows(inputs: Inputs) -> tuple[Row, ...]:
    """Every row, the quick ones first."""
    return (
        *list_rows(inputs),
        *far_rows(inputs),
        *edit_rows(inputs.edited),
        *strip_rows(inputs),
        *rewrite_rows(inputs.large, inputs.folder),
        cast_row(inputs.single, inputs.folder),
        shard_row(inputs.large, inputs.folder),
        *folder_rows(inputs.dcp, inputs.folder),
        zero_row(inputs),
        *diff_rows(inputs),
        *value_rows(inputs),
        *load_rows(inputs.large),
        *fill_rows(inputs.large, inputs.size),
        *match_rows(inputs.many, inputs.renamed),
        *(peer_rows(inputs, inputs.peers) if inputs.peers else ()),
    )


def far_rows(inputs: Inputs) -> Iterator[Row]:
    """Files on another machine, 50 ms and 100 MB/s away."""
    hollow, shards = inputs.edited[HOLLOW], inputs.shards / "model.safetensors.index.json"
    yield Row(
        f"`list` over http, {words(HOLLOW)}",
        hollow,
        (Command.far("list", hollow),),
        most_seconds=0.5,
        hollow=True,
    )
    yield Row(
        "`list` over http, an index of 64 shards",
        shards,
        (Command.far("list", shards),),
        most_seconds=1.0,
    )
    size, output = inputs.size // 5, inputs.folder / "far.safetensors"
    yield Row(
        f"`convert` over http, {words(size)}",
        inputs.edited[size],
        (Command.far("convert", inputs.edited[size], output),),
        output=output,
        most_seconds=1.2 * size / (100 * MB),
        most_bytes=300 * MB,
    )


def list_rows(inputs: Inputs) -> Iterator[Row]:
    """Questions about the header."""
    for size, path in inputs.edited.items():
        yield Row(
            f"`list`, {words(size)}",
            path,
            (
                Command.ckptool("list", path),
                Command.program('torch.load(map_location="meta"), a loop', idioms.LIST, path),
            ),
            most_seconds=0.15,
            most_bytes=40 * MB,
            growth=Growth("list", "bytes", size),
            hollow=is_hollow(size),
        )
    for count, path in inputs.many.items():
        alone = Command.program("torch.load(mmap=True) alone", idioms.LOAD_MAPPED, path)
        yield Row(
            f"`list`, {count:,} tensors",
            path,
            (Command.ckptool("list", path), alone),
            beside=alone.label,
            most_times=0.5 if count == max(inputs.many) else None,
            growth=Growth("list", "tensors", count),
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
            growth=Growth("strip-module --in-place", "bytes", size),
        )


def is_hollow(size: int) -> bool:
    """Whether a file of that size has bytes behind it."""
    return size >= HOLLOW


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


def folder_rows(source: Path, folder: Path) -> Iterator[Row]:
    """What several processes saved, listed and made one file; torch's way takes all of it."""
    torchs = Command.program("FileSystemReader(...).read_metadata()", idioms.DCP_LIST, source)
    yield Row(
        "`list`, a folder of four ranks",
        source,
        (Command.ckptool("list", source), torchs),
        most_seconds=0.2,
        most_bytes=60 * MB,
    )
    output = folder / "whole.safetensors"
    copy = Command.system(
        "cat && sync", "sh", "-c", 'cat "$1"/*.distcp > "$2" && sync "$2"', "sh", source, output
    )
    torchs = Command.program("dcp_to_torch_save, not synced", idioms.DCP_TO_TORCH, source, output)
    yield Row(
        "`convert` to safetensors, a folder of four ranks",
        source,
        (Command.ckptool("convert", source, output, "--model-only"), copy, torchs),
        output=output,
        beside=copy.label,
        most_times=1.2,
        most_bytes=300 * MB,
    )


def zero_row(inputs: Inputs) -> Row:
    """The slices of two ranks into one file; DeepSpeed's script too where DeepSpeed is there."""
    output = inputs.folder / "zero.safetensors"
    copy = Command.copy(inputs.single, output)
    convert = Command.ckptool("convert", inputs.zero, output, "--model-only", "--master")
    commands = [convert, copy]
    if find_spec("deepspeed"):
        module = "deepspeed.utils.zero_to_fp32"
        words = (sys.executable, "-m", module, inputs.zero.parent, output, "--safe_serialization")
        commands.append(Command.system("zero_to_fp32", *words, "--tag", inputs.zero.name))
    return Row(
        "`convert --master` of ZeRO-3, two ranks, to a new `.safetensors`",
        inputs.zero,
        tuple(commands),
        output=output,
        beside=copy.label,
        most_bytes=60 * MB,
    )


def strip_rows(inputs: Inputs) -> Iterator[Row]:
    """Names changed in a new file: bytes that are read and written, of every size that has some."""
    output = inputs.folder / "out.pth"
    for size, path in inputs.edited.items():
        if not is_hollow(size):
            is_large = path == inputs.large
            yield rewrite_row(
                "strip-module",
                path,
                output,
                ("-o", output),
                idioms.STRIP,
                most_times=1.0 if is_large else None,
                file="large file" if is_large else words(size),
                growth=Growth("strip-module to a new file", "bytes", size),
            )


def rewrite_rows(source: Path, folder: Path) -> Iterator[Row]:
    """The file written anew, synced; the idioms do not sync."""
    torch_file, safetensors_file = folder / "out.pth", folder / "out.safetensors"
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
    most_times: float | None,
    file: str = "large file",
    growth: Growth | None = None,
) -> Row:
    """A rewriting verb beside a synced copy of the file and beside the torch idiom."""
    copy = Command.copy(source, output)
    return Row(
        f"`{verb}` to a new `{output.suffix}`, {file}",
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
        growth=growth,
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
        beside=idiom.label,
        most_times=1.1,
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


RULE = r"^module\.layers\.=>blocks."
"""What makes the names of `inputs.many` those of `inputs.renamed`."""


def match_rows(many: dict[int, Path], renamed: Path) -> Iterator[Row]:
    """Names alone: a wrapper and a prefix to take off each, or a rule that is given."""
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
        (Command.ckptool("match", many[count], "--like", renamed, "--rename", RULE), idiom),
        second=renamed,
        beside=idiom.label,
        most_times=1.0,
    )


def peer_rows(inputs: Inputs, programs: Path) -> Iterator[Row]:
    """What other tools do as well, on a file that all of them take."""
    size = sorted(inputs.edited)[1]
    source, folder = inputs.edited[size], inputs.folder / "peers"
    name = words(size)
    python = programs / "python"
    yield Row(
        f"`info`, {name}, beside other tools",
        source,
        (
            Command.ckptool("info", source),
            Command.system("ckptkit info", programs / "ckptkit", "info", source),
            Command.system("picklescan, the globals alone", programs / "picklescan", "-gp", source),
        ),
    )
    whatever = '"$@" || true'  # an exit code other than 0 is an answer of theirs
    scanner = ("sh", "-c", whatever, "sh", programs / "picklescan", "-p", inputs.files)
    yield Row(
        "`scan`, 1,000 files, beside other tools",
        inputs.files,
        (
            Command.ckptool("scan", inputs.files),
            Command.system("picklescan", *scanner),
            Command.system("fickling, each data.pkl", python, "-c", idioms.FICKLING, inputs.files),
        ),
    )
    target = folder / "out.safetensors"
    made = Command.into(folder)
    yield Row(
        f"`convert` to a new `.safetensors`, {name}, beside other tools",
        source,
        (
            Command.ckptool("convert", source, target),
            made("sft convert", programs / "sft", "convert", source, "-o", target),
            made(
                "checkpoint-tools convert",
                *(programs / "checkpoint-tools", "convert", "--full", "--name"),
                *(target.with_suffix(""), source),
            ),
            made("pt-safe-loader export", python, "-c", idioms.PT_EXPORT, source, target),
        ),
        output=folder,
    )
    yield Row(
        f"`load_state_dict`, {name}, beside other tools",
        source,
        (
            Command.program("load_state_dict", idioms.CKPTOOL_LOAD, source),
            Command.system("mergekit, its lazy loader", python, "-c", idioms.MERGEKIT, source),
            Command.system("pt-safe-loader, numpy", python, "-c", idioms.PT_LOAD, source),
        ),
    )
