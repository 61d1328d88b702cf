"""Recipes: converting between the layouts of model families, without computing anything."""

from ckptool.recipes.recipe import Recipe as Recipe, list_shipped as list_shipped
from ckptool.recipes.relayout import (
    find_recipe as find_recipe,
    guess_layout as guess_layout,
    relayout as relayout,
)
from ckptool.recipes.several import (
    open_files as open_files,
    output_files as output_files,
    split_files as split_files,
)
from ckptool.recipes.step import Relayout as Relayout
