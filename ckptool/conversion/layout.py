"""Layouts of several files in `convert`, which a recipe reads together and writes separately."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from ckptool.core.checkpoint import Checkpoint
from ckptool.errors import UsageError
from ckptool.formats import Source, load_format, shard_format_of
from ckptool.recipes import Relayout, output_files, split_files
from ckptool.transforms import Step
from ckptool.words import shell
from ckptool.writing import choose_file, choose_format, is_folder_target


def open_for_steps(
    source: Source | Sequence[str | os.PathLike[str]], steps: Iterable[Step], *, salvage: bool
) -> AbstractContextManager[Checkpoint]:
    """Open a checkpoint like `open_parts`, or the files of a layout with the recipe that reads it.

    Raises:
        UsageError: if some files of a layout are given instead of their folder.
        UnreadableFile: as in `open_checkpoint`.
    """
    from ckptool.formats.several import open_parts  # imported here: it is not always needed

    paths = [source] if isinstance(source, (str, os.PathLike)) else source
    relayout = next((step for step in steps if isinstance(step, Relayout)), None)
    if relayout is None or isinstance(paths, Checkpoint) or not relayout.opens(paths[0]):
        return open_parts(source, salvage=salvage)
    if len(paths) > 1:
        folder = os.path.dirname(os.fspath(paths[0])) or "."
        text = "belong to one layout: the recipe needs their folder"
        raise UsageError(text, hint=f"ckptool convert {shell(folder)} DESTINATION ...")
    return relayout.open(paths[0], salvage=salvage)


class Destination:
    """The target of a conversion: one file, a folder, or the files of a layout in a folder."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        source: Source | Sequence[str | os.PathLike[str]],
        steps: Iterable[Step],
        *,
        format: str | None = None,
        files_from: str | os.PathLike[str] | None = None,
        sharded: bool = False,
    ) -> None:
        """Decide whether the target is a folder, by its name and the other arguments.

        Raises:
            UsageError: as in `is_folder_target`.
        """
        self._name, self._format, self._sharded = os.fspath(path), format, sharded
        self._files_from, self._source = files_from, source
        recipes = [step.loaded for step in steps if isinstance(step, Relayout)]
        self._has_recipe = bool(recipes)
        name_pattern = output_files(recipes[-1]) if recipes else None
        self._recipe = recipes[-1] if name_pattern else None
        """The last recipe, if it writes several files."""
        needs_folder = sharded or files_from is not None or name_pattern is not None
        self.is_folder = is_folder_target(path, source, format, needs_folder=needs_folder)
        self.path = self._name
        """The target; for a folder of a recipe's files, a name with their extension."""
        if self.is_folder and name_pattern:
            self.path = os.path.join(path, os.path.basename(name_pattern))

    def is_source(self, checkpoint: Checkpoint) -> bool:
        """Return True if the target is the file or folder that `checkpoint` was opened from."""
        source_paths = [checkpoint.path]
        if isinstance(self._source, (str, os.PathLike)):
            source_paths.append(os.fspath(self._source))  # a folder, opened by a file in it
        return os.path.realpath(self._name) in map(os.path.realpath, source_paths)

    def format_for(self, checkpoint: Checkpoint) -> str:
        """Return the name of the format of the target, or of each file that a recipe makes.

        Raises:
            UsageError: if there is none, or both the format and a recipe make several files.
        """
        path = self.path
        if not self.divide_files:
            path = choose_file(
                checkpoint,
                path,
                self._format,
                to_folder=self.is_folder,
                files_from=self._files_from,
            )
        name = choose_format(checkpoint, path, self._format, sharded=self._sharded)
        if self.divide_files and (
            self._sharded or shard_format_of(name) or load_format(name).index_name
        ):
            text = "the recipe determines the number of files"
            raise UsageError(text, hint="leave out --max-shard-size and formats with several files")
        return name

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders in which a recipe looks for `config.json`, after that of the source."""
        target = self._name if self.is_folder else os.path.dirname(self._name) or "."
        return (target,) if self._files_from is None else (os.fspath(self._files_from), target)

    @property
    def companions(self) -> str | os.PathLike[str] | None:
        """The folder to copy the files next to the weights from, or None.

        If a recipe writes a single file, `files_from` only has the configuration that it reads.
        """
        return self._files_from if self.is_folder or not self._has_recipe else None

    def unwrap_only_file(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the content of the only file that a recipe makes, if the target is one file.

        The result is `checkpoint` itself for a folder, and without a recipe that names files.

        Raises:
            UsageError: if the recipe makes several files.
        """
        if self._recipe is None or self._recipe.files is None or self.is_folder:
            return checkpoint
        parts = list(split_files(checkpoint, self._recipe).values())
        if len(parts) == 1:
            return parts[0]
        text = f"the recipe writes {len(parts)} files, but the target is one file"
        raise UsageError(text, file=self._name, hint="end the target with / to name a folder")

    @property
    def divide_files(self) -> Callable[[Checkpoint], Mapping[str, Checkpoint]] | None:
        """The function that divides the result into files by name, if there are several."""
        recipe = self._recipe
        if recipe is None or not self.is_folder:
            return None
        return lambda checkpoint: split_files(checkpoint, recipe)


def with_configs(steps: Iterable[Step], folders: Sequence[str]) -> list[Step]:
    """Return the steps, with recipes that also look for `config.json` in these folders."""
    return [
        replace(step, configs=(*step.configs, *folders)) if isinstance(step, Relayout) else step
        for step in steps
    ]
