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
from ckptool.core.model import TensorRef, find_tensors
from ckptool.errors import FileMissing, NameCollision, UsageError
from ckptool.formats.base import of_files
from ckptool.formats.distributed.ranks import set_of
from ckptool.formats.opening import TORCH_FILES, Source, open_checkpoint, opened, opened_together
from ckptool.formats.sharded import NUMBERED, ShardIndex, checkpoint_of
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.words import counted, printable, shell

_FORMATS = ("safetensors", *TORCH_FILES)


def opened_parts(
    source: Source | Sequence[str | os.PathLike[str]], *, salvage: bool = False
) -> AbstractContextManager[Checkpoint]:
    """Yield the checkpoint of `opened`, or of `open_several` for a list of paths.

    Raises:
        UsageError: `salvage` is used with several files.
    """
    if isinstance(source, str) or not isinstance(source, Sequence):
        return opened(source, salvage=salvage)
    if salvage:
        raise UsageError(
            "only one file can be salvaged at a time", hint="salvage each file, then join them"
        )
    by_key = [keyed(os.fspath(one)) for one in source]
    if any(by_key):
        if not all(by_key):
            raise UsageError("give a key (KEY=FILE) for every source or for none")
        return open_by_key([one for one in by_key if one is not None])
    pattern = _rank_pattern([os.fspath(one) for one in source])
    return open_checkpoint(pattern) if pattern is not None else open_several(source)


def _rank_pattern(paths: Sequence[str]) -> str | None:
    """Return the pattern of a set of rank files that a shell has expanded; None for other files.

    Raises:
        FileMissing: the folder has more files of the set than are given.
    """
    sets = {
        (os.path.dirname(path), found and found[0]) for path in paths for found in [set_of(path)]
    }
    folder, called = sets.pop() if len(sets) == 1 else ("", None)
    if called is None:
        return None
    pattern = called.format(rank="*")
    there = set(fnmatch.filter(os.listdir(folder or "."), pattern))
    rest = sorted(there - {os.path.basename(path) for path in paths})
    if rest:
        raise FileMissing(
            f"belongs to the same set of rank files and was not given: {rest[0]}",
            file=os.path.join(folder, rest[0]),
            hint=f"give the folder, or all rank files: {shell(os.path.join(folder, pattern))}",
        )
    return os.path.join(folder, pattern)


_KEYED = re.compile(r"([\w.-]+)=(.+)", re.DOTALL)


def keyed(source: str) -> tuple[str, str] | None:
    """Return the key and the path of `KEY=PATH`; None for a path, or if a file has that name."""
    found = None if os.path.lexists(source) else _KEYED.fullmatch(source)
    return None if found is None else (found[1], found[2])


def open_by_key(
    sources: Iterable[tuple[str, str]],
    open_one: Callable[[str], Checkpoint] = open_checkpoint,
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
            files.append(stack.enter_context(open_one(path)))
            root[key] = files[-1].root
        first = files[0]
        made = of_files(
            files,
            Checkpoint(root, first.format, first.path),
            writer=f"{counted(len(files), 'file')}, each under a key",
            folder="",
        )
        stack.pop_all()
    return replace(made, original=root)


def open_several(
    paths: Sequence[str | os.PathLike[str]], *, limits: Limits = DEFAULT_LIMITS
) -> Checkpoint:
    """Return the state dict of all files together, in their order.

    Raises:
        FileMissing: one of a series of files such as `-00001-of-00003` was not given.
        NameCollision: two files have the same key.
        UsageError: a file does not have one flat state dict.
        UnreadableFile: as `open_checkpoint`.
    """
    names = [os.fspath(path) for path in paths]
    _check_numbers(names)
    with opened_together(names, limits, _FORMATS) as files:
        shards = dict(zip(names, files, strict=True))
        if len(shards) < len(names):
            raise UsageError("a file was given twice")
        weight_map: dict[str, str] = {}
        for path, file in shards.items():
            for key in _keys(path, file):
                before = weight_map.setdefault(key, path)
                if before != path:
                    text = f"tensor '{printable(key)}' is also in {before}"
                    raise NameCollision(text, file=path)
        index = ShardIndex(files[0].sources[0], weight_map, {}, tuple(names))
        made = checkpoint_of(index, shards, files[0].format, files[0].path)
        return replace(made, original=made.root)


def _keys(path: str, file: Checkpoint) -> list[str]:
    """Return the keys of the tensors in a file with a flat state dict."""
    root = file.root if isinstance(file.root, dict) else {}
    keys = [key for key, value in root.items() if isinstance(value, TensorRef)]
    rest = [value for value in root.values() if not isinstance(value, TensorRef)]
    is_named = bool(keys) and all(isinstance(key, str) for key in keys)
    if not is_named or any(True for _ in find_tensors(rest)):
        raise UsageError(
            "has no flat state dict, so it cannot be joined with other files by its keys",
            file=path,
            hint=f"make a flat state dict: ckptool convert {shell(path)} --model-only",
        )
    return keys


def _check_numbers(names: Sequence[str]) -> None:
    series: dict[tuple[str, ...], set[int]] = {}
    for name in names:
        found = NUMBERED.fullmatch(name)
        if found is not None:
            series.setdefault(found.group(1, 3, 4), set()).add(int(found[2]))
    for (stem, total, ending), numbers in series.items():
        first = 0 if 0 in numbers else 1
        every = range(first, int(total) + first)
        missing = next((number for number in every if number not in numbers), None)
        if missing is not None:
            raise FileMissing(
                f"is one of a set of {int(total):,} files, and only {len(numbers):,} were given",
                file=f"{stem}-{missing:0{len(total)}}-of-{total}{ending}",
            )
