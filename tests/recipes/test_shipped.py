"""The shipped recipes lead from each `source/` of `fixtures/recipes` to its target, and back.

So do the examples of `docs/recipes.md`. Scripts in `fixtures/make/` made both sides with the
libraries that own the layouts; `proof.json` names the judge.
"""

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptool.core.sections import find_model_state_dict
from ckptool.errors import UsageError
from ckptool.formats import open_checkpoint
from ckptool.inspection.listing import list_tensors
from ckptool.recipes import Recipe, list_shipped, open_files, relayout

PROJECT = Path(__file__).parent.parent.parent
FOLDER = PROJECT / "fixtures" / "recipes"
EXAMPLES = dict(
    re.findall(
        r"^### (\S+\.toml)\n.*?^```toml\n(.*?)^```$",
        (PROJECT / "docs" / "recipes.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
)
PROOFS = {
    path.parent.name: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*/proof.json"))
}
OWNED = [
    "experts-mixtral", "experts-qwen", "gpt2-hf-to-nanogpt", "llama-megatron-to-hf",
    "llama-meta-to-hf", "llama-torchtitan-to-hf", "qkv-fused", "resnet-torchvision-to-hf",
    "unet-ldm-to-diffusers", "vit-timm-to-hf",
]  # fmt: skip

every_proof = pytest.mark.parametrize("name", PROOFS)


def recipe_of(name):
    """The recipe of a proof: a shipped one, or an example of the page."""
    recipe = PROOFS[name]["recipe"]
    if recipe in EXAMPLES:
        return Recipe.parse(EXAMPLES[recipe], name=recipe)
    return Recipe.load(recipe)


def opened(name):
    """The source of a proof."""
    source, recipe = FOLDER / name / "source", recipe_of(name)
    if recipe.files:
        return open_files(source, recipe, open_checkpoint)
    files = [one for one in source.iterdir() if one.suffix != ".json"]
    return open_checkpoint(source if len(files) > 1 or files[0].is_dir() else files[0])


def contents(checkpoint):
    """Path -> dtype, shape and SHA-256 of every tensor."""
    rows = list_tensors(checkpoint, hash=True).to_dict()["tensors"]
    return {
        "/".join(row["path"]): (row["dtype"], tuple(row["shape"]), row["sha256"]) for row in rows
    }


def hashes(state):
    """The same of a state dict of torch."""
    return {
        key: (
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest(),
        )
        for key, tensor in state.items()
    }


def source_state(name):
    """Path -> tensor of the source, as torch reads the files."""
    folder, made = FOLDER / name / "source", {}
    if (whole := FOLDER / name / "expected.safetensors").exists():
        return load_file(whole)  # of a folder that torch does not read
    for file in sorted(one for one in folder.rglob("*") if one.is_file() and one.suffix != ".json"):
        if file.suffix == ".safetensors":
            state, before = load_file(file), ""
        else:
            state, before = torch.load(file, weights_only=True), ""
        if file.parent != folder:
            state, before = state["model"], f"{file.parent.name}/model/"
        elif file.name.startswith("consolidated"):
            before = f"{file.name.split('.')[1]}/"
        made |= {before + key: one for key, one in state.items() if isinstance(one, torch.Tensor)}
    return made


def reversed_contents(name, target):
    """What the way back makes of a file."""
    proof = PROOFS[name]
    recipe = recipe_of(name).invert()
    with open_checkpoint(target) as checkpoint:
        made = relayout(checkpoint, recipe, proof["back"], configs=[FOLDER / name / "source"])
        return contents(made)


def expected_source(name):
    """What the way back should make: the source, but for what the proof tells."""
    proof = PROOFS[name]
    new = proof.get("renamed", {})
    return {
        new.get(path, path): one
        for path, one in hashes(source_state(name)).items()
        if path not in proof["lost"]
    }


def test_each_shipped_recipe_and_example_is_proven():
    assert [name for name, _ in list_shipped()] == OWNED
    assert {proof["recipe"] for proof in PROOFS.values()} == {*OWNED, *EXAMPLES}
    assert len(EXAMPLES) == 10
    assert all(10 < len(about) < 120 for _, about in list_shipped())


@every_proof
def test_the_recipe_gives_the_tensors_of_the_other_library(name):
    proof = PROOFS[name]
    with opened(name) as checkpoint:
        made = relayout(checkpoint, recipe_of(name), proof["params"])
        found = contents(made.with_root(find_model_state_dict(made).node))
    assert found == hashes(load_file(FOLDER / name / "target.safetensors"))


@every_proof
def test_the_way_back_gives_the_source(name):
    found = reversed_contents(name, FOLDER / name / "target.safetensors")
    expected = expected_source(name)
    extra = set(PROOFS[name].get("gained", []))
    assert {path: one for path, one in found.items() if path not in extra} == expected
    assert extra <= found.keys()


@pytest.mark.parametrize(
    ("name", "prefix"), [("vit-timm-headless", "vit."), ("resnet-torchvision-18", "resnet.")]
)
def test_the_way_back_reads_a_model_without_the_prefix_of_its_head(name, prefix, tmp_path):
    state = load_file(FOLDER / name / "target.safetensors")
    base = {key.removeprefix(prefix): one for key, one in state.items() if prefix in key}
    save_file(base, tmp_path / "base.safetensors")
    found = reversed_contents(name, tmp_path / "base.safetensors")
    assert found == {key: one for key, one in expected_source(name).items() if "fc." not in key}


def test_the_way_back_reads_a_state_dict_of_transformers_5():
    found = reversed_contents("vit-timm", FOLDER / "vit-timm" / "modules.safetensors")
    assert found == expected_source("vit-timm")


def test_one_file_with_the_keys_of_meta_needs_no_number(tmp_path):
    name = "llama-meta-one"
    state = torch.load(FOLDER / name / "source" / "consolidated.00.pth", weights_only=True)
    run = {"model": state, "model_args": {"dim": 24, "n_heads": 6}, "iter_num": 3}
    torch.save(run, tmp_path / "ckpt.pt")
    with open_checkpoint(tmp_path / "ckpt.pt") as checkpoint:
        made = relayout(checkpoint, Recipe.load("llama-meta-to-hf"), {})
        found = contents(made)
    assert found == hashes(load_file(FOLDER / name / "target.safetensors"))


def test_megatron_rows_are_padded_as_megatron_pads_them():
    name = "llama-megatron-two"
    recipe = Recipe.load("llama-megatron-to-hf").invert()
    with open_checkpoint(FOLDER / name / "target.safetensors") as checkpoint:
        configs = [FOLDER / name / "source"]
        made = contents(relayout(checkpoint, recipe, {"rank": 2}, configs=configs))
    _, shape, _ = made["mp_rank_01/model/output_layer.weight"]
    assert shape == (128, 18)


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("experts-mixtral", "model.layers.1.block_sparse_moe.experts.10.w3.weight"),
        ("vit-timm", "cls_token"),
        ("llama-torchtitan", "tok_embeddings.weight"),
        ("llama-meta-one", "00/norm.weight"),
    ],
)
def test_a_missing_tensor_is_named(name, without, tmp_path):
    state = {key: one for key, one in source_state(name).items() if key != without}
    if without.startswith("00/"):
        torch.save({"00": {key[3:]: one for key, one in state.items()}}, tmp_path / "model.pth")
    else:
        save_file(state, tmp_path / "model.safetensors")
    recipe, configs = recipe_of(name), [FOLDER / name / "source"]
    with (
        open_checkpoint(next(tmp_path.iterdir())) as checkpoint,
        pytest.raises(UsageError, match=without.removeprefix("00/").removesuffix(".weight")),
    ):
        relayout(checkpoint, recipe, {}, configs=configs)


def test_a_tensor_of_another_architecture_is_refused(tmp_path):
    state = source_state("vit-timm") | {"dist_token": torch.ones(1, 1, 6)}
    save_file(state, tmp_path / "deit.safetensors")
    with (
        open_checkpoint(tmp_path / "deit.safetensors") as checkpoint,
        pytest.raises(UsageError, match="dist_token"),
    ):
        relayout(checkpoint, Recipe.load("vit-timm-to-hf"), {})


def test_a_file_of_which_no_rule_takes_a_tensor_is_refused(tmp_path):
    save_file({"encoder.weight": torch.ones(2)}, tmp_path / "other.safetensors")
    with (
        open_checkpoint(tmp_path / "other.safetensors") as checkpoint,
        pytest.raises(UsageError, match="a rule of qkv-fused; the file has encoder"),
    ):
        relayout(checkpoint, Recipe.load("qkv-fused"), {})


def test_experts_of_gpt_oss_are_not_cut_as_those_of_qwen(tmp_path):
    state = {
        "model.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 6, 10),
        "model.layers.0.mlp.experts.down_proj": torch.zeros(2, 5, 6),
    }
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"hidden_size": 6}')
    with (
        open_checkpoint(tmp_path / "model.safetensors") as checkpoint,
        pytest.raises(UsageError, match="width"),
    ):
        relayout(checkpoint, Recipe.load("experts-qwen").invert(), {})


def test_the_page_teaches_what_the_errors_say(tmp_path):
    page = (PROJECT / "docs" / "recipes.md").read_text()
    notation = re.search(r"^## The notation.*?^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(Recipe.parse(notation[1], name="notation").passes[0]) == 2
    names, rule, params = re.findall(r"^   ```toml\n(.*?)^   ```", page, re.MULTILINE | re.DOTALL)
    state = {"wte.weight": torch.ones(7, 12), "final.weight": torch.ones(12)}
    for n in range(2):
        state |= {f"trunk.{n}.norm.weight": torch.ones(12)}
        state |= {f"trunk.{n}.out.weight": torch.ones(12, 12)}
        state |= {f"trunk.{n}.qkv.weight": torch.arange(432.0).view(36, 12) + n}
    save_file(state, tmp_path / "mine.safetensors")
    renamed = names.replace("norms", "norm")
    out = '"trunk.{n}.out.weight" = "model.layers.{n}.self_attn.o_proj.weight"\n'
    for recipe, given, said in (
        (names, {}, "no tensor matches 'trunk.{n}.norms.weight'"),
        (
            renamed,
            {},
            "matches 4 tensors: trunk.0.out.weight, trunk.0.qkv.weight, trunk.1.out.weight",
        ),
        (
            renamed + out + rule,
            {},
            "the size of heads, head is unknown; head ?, heads ?, i 12",
        ),
        (renamed + out + rule, {"heads": 5}, "36 is not divisible into (heads (1 + 1 + 1) head)"),
    ):
        assert said in page
        with (
            open_checkpoint(tmp_path / "mine.safetensors") as checkpoint,
            pytest.raises(UsageError, match=re.escape(said)),
        ):
            relayout(checkpoint, Recipe.parse(recipe, name="mine"), given)
    (tmp_path / "config.json").write_text('{"num_attention_heads": 3}')
    with open_checkpoint(tmp_path / "mine.safetensors") as checkpoint:
        made = relayout(checkpoint, Recipe.parse(renamed + out + rule + params, name="mine"), {})
        found = contents(made)
    parts = state["trunk.0.qkv.weight"].view(3, 3, 4, 12)
    for at, part in enumerate("qkv"):
        key = f"model.layers.0.self_attn.{part}_proj.weight"
        assert found[key] == hashes({key: parts[:, at].reshape(12, 12)})[key]
