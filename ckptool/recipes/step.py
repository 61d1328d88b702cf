"""The step that gives a checkpoint the layout of another library, by a recipe."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from ckptool.core.checkpoint import Checkpoint
from ckptool.formats import open_checkpoint
from ckptool.recipes.recipe import Recipe
from ckptool.recipes.relayout import relayout
from ckptool.recipes.several import has_files, open_files
from ckptool.transforms import Step
from ckptool.transforms.step import check_list_option


@dataclass(frozen=True)
class Relayout(Step):
    """Give the model the keys and tensors that it has in another library, by a recipe.

    The recipe is a text file, or one that comes with ckptool: docs/recipes.md.
    """

    on_files: ClassVar[str] = "its results are computed when the file is written"
    options: ClassVar[Mapping[str, str]] = {"params": "param", "configs": ""}

    recipe: str | os.PathLike[str]
    """The name of a recipe of `ckptool recipes`, or a `.toml` or `.json` file."""
    reverse: bool = False
    """Go from the recipe's target to its source."""
    params: Mapping[str, int | str] = field(default_factory=dict)
    """Parameters of the recipe: `{"heads": 32}`. They come before those in `config.json`."""
    configs: tuple[str | os.PathLike[str], ...] = ()
    """Folders in which the recipe looks for `config.json`, after the folder of the source."""

    def __post_init__(self) -> None:
        """Read the recipe.

        Raises:
            UsageError: there is none, or it is wrong; a path is in place of a list of them.
        """
        object.__setattr__(self, "configs", check_list_option("configs", self.configs))
        _ = self.loaded  # raises the errors of the recipe

    @classmethod
    def of(cls, recipe: str | os.PathLike[str], /, **params: int | str) -> Relayout:
        """Return the step of a recipe with these parameters: `Relayout.of("qkv-fused", heads=8)`.

        Raises:
            UsageError: there is no such recipe, or it is wrong.
        """
        return cls(recipe, params=params)

    def reversed(self) -> Relayout:
        """Return the step that leads back."""
        return replace(self, reverse=not self.reverse)

    @cached_property
    def loaded(self) -> Recipe:
        """The recipe, in the direction of the step."""
        recipe = Recipe.load(os.fspath(self.recipe))
        return recipe.invert() if self.reverse else recipe

    def opens(self, path: str | os.PathLike[str]) -> bool:
        """Return True if a path is a layout of several files that the recipe joins."""
        recipe = self.loaded
        return recipe.files is not None and not recipe.is_reversed and has_files(path, recipe)

    def open(self, path: str | os.PathLike[str], *, salvage: bool = False) -> Checkpoint:
        """Open a path; of a layout of several files all of them.

        Raises:
            UnreadableFile: as `open_checkpoint`.
        """
        if not self.opens(path):
            return super().open(path, salvage=salvage)
        return open_files(path, self.loaded, lambda file: open_checkpoint(file, salvage=salvage))

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint in the other layout, over the same bytes.

        Raises:
            UsageError: the recipe does not fit: a rule matches nothing, no rule takes a tensor,
                nothing decides a size; or there is the state of an optimizer.
            NameCollision: two tensors get one key.
            NotRepresentable: a tensor has no plain elements, or is quantized.
        """
        configs = [Path(config) for config in self.configs]
        return relayout(checkpoint, self.loaded, self.params, configs=configs)
