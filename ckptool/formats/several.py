"""Join files with parts of one state dict, for example shards without an index."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import TensorRef
from ckptool.core.modules import has_tensors
from ckptool.errors import FileMissing, NameCollision, UsageError
from ckptool.formats.base import combine_details
from ckptool.formats.distributed.ranks import parse_rank_name
from ckptool.formats.opening import (
    TORCH_FILES,
    Source,
    open_checkpoint,
    open_or_reuse,
    open_together,
)
from ckptool.formats.sharded import NUMBERED, ShardIndex, make_checkpoint
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.words import counted, printable, shell

_JOINED_FORMATS = ("safetensors", *TORCH_FILES)


def open_parts(
    source: Source | Sequence[str | os.PathLike[str]], *, salvage: bool = False
) -> AbstractContextManager[Checkpoint]:
    """Return a context manager for the checkpoint of a path, or the joined one of several paths.

    Several paths are one of three: all with keys (`KEY=FILE`), which become keys of the root; all
    rank files of a set; or parts of one state dict. An open checkpoint is used as it is.

    Raises:
        UsageError: `salvage` is used with several files.
    """
    if isinstance(source, str) or not isinstance(source, Sequence):
        return open_or_reuse(source, salvage=salvage)
    if salvage:
        raise UsageError(
            "only one file can be salvaged at a time", hint="salvage each file, then join them"
        )
    pairs = [split_key(os.fspath(path)) for path in source]
    if any(pairs):
        if not all(pairs):
            raise UsageError("give a key (KEY=FILE) for every source or for none")
        return open_by_key([pair for pair in pairs if pair is not None])
    pattern = _find_rank_pattern([os.fspath(path) for path in source])
    return open_checkpoint(pattern) if pattern is not None else open_several(source)


def _find_rank_pattern(paths: Sequence[str]) -> str | None:
    """Return the pattern of a set of rank files that a shell has expanded; None for other files.

    All paths must be in one folder and have names of one set, for example `rank_*.pt`.

    Raises:
        FileMissing: the folder has more files of the set than are given.
    """
    folders, name_patterns = set(), set()
    for path in paths:
        parsed = parse_rank_name(path)
        if parsed is None:
            return None
        name_pattern, _ = parsed
        folders.add(os.path.dirname(path))
        name_patterns.add(name_pattern)
    if len(folders) != 1 or len(name_patterns) != 1:
        return None
    folder, pattern = folders.pop(), name_patterns.pop().format(rank="*")
    existing = set(fnmatch.filter(os.listdir(folder or "."), pattern))
    missing = sorted(existing - {os.path.basename(path) for path in paths})
    if missing:
        raise FileMissing(
            f"belongs to the same set of rank files and was not given: {missing[0]}",
            file=os.path.join(folder, missing[0]),
            hint=f"give the folder, or all rank files: {shell(os.path.join(folder, pattern))}",
        )
    return os.path.join(folder, pattern)


_KEY_AND_FILE = re.compile(r"([\w.-]+)=(.+)", re.DOTALL)


def split_key(source: str) -> tuple[str, str] | None:
    """Return the key and the path of `KEY=PATH`; None for a path, or if a file has this name."""
    match = None if os.path.lexists(source) else _KEY_AND_FILE.fullmatch(source)
    return None if match is None else (match[1], match[2])


def open_by_key(
    sources: Iterable[tuple[str, str]],
    open_file: Callable[[str], Checkpoint] = open_checkpoint,
) -> Checkpoint:
    """Return a checkpoint with a dict as its root: the tree of each file under its key.

    Raises:
        UsageError: two files have the same key.
        UnreadableFile: as `open_checkpoint`.
    """
    root: dict[str, Any] = {}
    with ExitStack() as stack:
        files = []
        for key, path in sources:
            if key in root:
                raise UsageError(f"two sources have the key {printable(key)!r}")
            files.append(stack.enter_context(open_file(path)))
            root[key] = files[-1].root
        first = files[0]
        checkpoint = combine_details(
            files,
            Checkpoint(root, first.format, first.path),
            writer=f"{counted(len(files), 'file')}, each under a key",
            folder="",
        )
        stack.pop_all()  # the checkpoint closes them
    return replace(checkpoint, original=root)


def open_several(
    paths: Sequence[str | os.PathLike[str]], *, limits: Limits = DEFAULT_LIMITS
) -> Checkpoint:
    """Return a checkpoint with the state dict of all files together, in their order.

    They are joined like shards with an index that lists all their tensors.

    Raises:
        FileMissing: one of a series of files such as `-00001-of-00003` was not given.
        NameCollision: two files have the same key.
        UsageError: a file does not have one flat state dict.
        UnreadableFile: as `open_checkpoint`.
    """
    names = [os.fspath(path) for path in paths]
    _refuse_incomplete_series(names)
    with open_together(names, limits, _JOINED_FORMATS) as files:
        shards = dict(zip(names, files, strict=True))
        if len(shards) < len(names):
            raise UsageError("a file was given twice")
        weight_map: dict[str, str] = {}
        for path, file in shards.items():
            for key in _list_tensor_keys(path, file):
                other_path = weight_map.setdefault(key, path)
                if other_path != path:
                    text = f"tensor '{printable(key)}' is also in {other_path}"
                    raise NameCollision(text, file=path)
        first = files[0]
        index = ShardIndex(first.sources[0], weight_map, metadata={}, shards=tuple(names))
        checkpoint = make_checkpoint(index, shards, first.format, first.path)
        return replace(checkpoint, original=checkpoint.root)


def _list_tensor_keys(path: str, file: Checkpoint) -> list[str]:
    """Return the keys of the tensors in a file, which must have one flat state dict.

    It has at least one tensor, only text keys for tensors, and no tensors below its other values.
    """
    root = file.root if isinstance(file.root, dict) else {}
    keys = [key for key, value in root.items() if isinstance(value, TensorRef)]
    others = [value for value in root.values() if not isinstance(value, TensorRef)]
    has_text_keys = bool(keys) and all(isinstance(key, str) for key in keys)
    if not has_text_keys or has_tensors(others):
        raise UsageError(
            "has no flat state dict, so it cannot be joined with other files by its keys",
            file=path,
            hint=f"make a flat state dict: ckptool convert {shell(path)} --model-only",
        )
    return keys


def _refuse_incomplete_series(names: Sequence[str]) -> None:
    """Refuse an incomplete series of files, such as `-00001-of-00003` without the second.

    A series counts from 0 if one of the given files has the number 0, else from 1.
    """
    numbers_by_series: dict[tuple[str, ...], set[int]] = {}
    for name in names:
        match = NUMBERED.fullmatch(name)
        if match is not None:
            numbers_by_series.setdefault(match.group(1, 3, 4), set()).add(int(match[2]))
    for (stem, total, ending), numbers in numbers_by_series.items():
        first = 0 if 0 in numbers else 1
        expected = range(first, int(total) + first)
        missing = next((number for number in expected if number not in numbers), None)
        if missing is not None:
            raise FileMissing(
                f"is one of a set of {int(total):,} files, and only {len(numbers):,} were given",
                file=f"{stem}-{missing:0{len(total)}}-of-{total}{ending}",
            )
