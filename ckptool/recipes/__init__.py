"""Recipes: converting between the layouts of model families, without computing anything."""

from ckptool.recipes.recipe import Recipe as Recipe, shipped_recipes as shipped_recipes
from ckptool.recipes.relayout import (
    leads_to as leads_to,
    looks_like as looks_like,
    relayout as relayout,
)
from ckptool.recipes.several import (
    open_files as open_files,
    split_files as split_files,
    written_files as written_files,
)
from ckptool.recipes.step import Relayout as Relayout
