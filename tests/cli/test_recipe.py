"""`convert --recipe` leads from each `source/` of `fixtures/recipes` to its target, and back."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.recipes.test_shipped import (
    EXAMPLES,
    FOLDER,
    PROOFS,
    contents,
    expected_source,
    hashes,
)
from ckptool.formats import open_checkpoint
from ckptool.recipes import Recipe, Relayout, open_files

META = FOLDER / "llama3-meta-two"


def source_of(name):
    """What the user names: a folder of several files or the one file."""
    source = FOLDER / name / "source"
    files = [one for one in source.iterdir() if one.suffix != ".json"]
    return source if len(files) > 1 or files[0].is_dir() else files[0]


@pytest.fixture
def recipe_of(tmp_path):
    """The words for the recipe of a proof: a name, or a file with the example of the page."""

    def words(name):
        recipe = PROOFS[name]["recipe"]
        if recipe not in EXAMPLES:
            return recipe
        (tmp_path / recipe).write_text(EXAMPLES[recipe])
        return str(tmp_path / recipe)

    return words


def params(given):
    return [word for key, value in given.items() for word in ("--param", f"{key}={value}")]


@pytest.mark.parametrize("name", PROOFS)
def test_each_proof_goes_to_a_folder_and_back(ckptool, tmp_path, recipe_of, name):
    proof, recipe = PROOFS[name], recipe_of(name)
    words = ["--recipe", recipe, *params(proof["params"])]
    done = ckptool("convert", source_of(name), f"{tmp_path}/hf/", *words)
    assert (done.code, done.out) == (0, "")
    assert hashes(load_file(tmp_path / "hf" / "model.safetensors")) == hashes(
        load_file(FOLDER / name / "target.safetensors")
    )
    words = ["--recipe", recipe, "--reverse", *params(proof["back"])]
    files = Recipe.load(recipe).files
    target = f"{tmp_path}/back/" if files else tmp_path / "back.pth"
    source = tmp_path / "hf" / "model.safetensors"
    for one in (FOLDER / name / "source").glob("*.json"):
        (tmp_path / "hf" / one.name).write_bytes(one.read_bytes())
    done = ckptool("convert", source, target, *words)
    assert (done.code, done.err.count("reversible")) == (0, 1), done.err
    if files:
        with open_files(target, Recipe.load(recipe), open_checkpoint) as made:
            found = contents(made)
    else:
        with open_checkpoint(target) as made:
            found = contents(made)
    extra = set(proof.get("gained", []))
    assert {key: one for key, one in found.items() if key not in extra} == expected_source(name)
