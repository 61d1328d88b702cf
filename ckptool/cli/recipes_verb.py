"""`ckptool recipes`."""

from __future__ import annotations

import click

from ckptool.cli.console import Screen, print_document, print_lines
from ckptool.cli.options import PATH, screen_options, verb
from ckptool.recipes import Recipe, list_shipped
from ckptool.render.table import table_lines
from ckptool.words import clean, clean_lines


@verb(
    "recipes",
    "ckptool recipes",
    "ckptool recipes vit-timm-to-hf",
    "ckptool recipes mine.toml",
)
@click.argument("name", type=PATH, required=False, metavar="[NAME|FILE]")
@screen_options()
def command(name: str | None, screen: Screen) -> None:
    """List the recipes for convert --recipe, or print one.

    A recipe converts a model between the layouts of two libraries. NAME is a recipe in the list;
    FILE is your own recipe, which is checked first. docs/recipes.md explains how to write one.
    """
    if name is None:
        recipes = list_shipped()
        if screen.as_json:
            rows = [{"name": recipe_name, "about": about} for recipe_name, about in recipes]
            print_document({"schema": "ckptool.recipes/1", "recipes": rows})
        else:
            cells = [(recipe_name, clean(about)) for recipe_name, about in recipes]
            print_lines(table_lines(("recipe", "converts"), cells, screen.look, flexible=1))
        return
    recipe = Recipe.load(name)
    if screen.as_json:
        document = {"name": recipe.name, "about": recipe.about, "text": recipe.text}
        print_document({"schema": "ckptool.recipe/1", **document})
    else:
        print_lines([clean_lines(recipe.text.rstrip("\n"))])
