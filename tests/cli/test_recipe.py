"""`convert --recipe` leads from each `source/` of `fixtures/recipes` to its target, and back."""

import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool as library
from ckptool.errors import CheckpointError, UsageError
from ckptool.recipes import Relayout, guess_layout
from tests.recipes.test_shipped import (
    EXAMPLES,
    FOLDER,
    PROOFS,
    contents,
    expected_source,
    hashes,
)

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
    several = len(list((FOLDER / name / "source").rglob("*.p*t*"))) > 1 or proof["back"].get("rank")
    target = f"{tmp_path}/back/" if several else tmp_path / "back.pth"
    source = tmp_path / "hf" / "model.safetensors"
    for one in (FOLDER / name / "source").glob("*.json"):
        (tmp_path / "hf" / one.name).write_bytes(one.read_bytes())
    done = ckptool("convert", source, target, *words)
    assert (done.code, done.err.count("reversible")) == (0, 1), done.err
    with Relayout(recipe).open(target) as made:
        found = contents(made)
    extra = set(proof.get("gained", []))
    assert {key: one for key, one in found.items() if key not in extra} == expected_source(name)


def test_the_files_of_a_layout_are_written_or_none(ckptool, tmp_path):
    back = ["--recipe", "llama-meta-to-hf", "--reverse", "--param", "rank=2"]
    back += ["--files-from", META / "source"]
    target = META / "target.safetensors"
    done = ckptool("convert", target, f"{tmp_path}/meta/", *back, "--json")
    assert sorted(one.name for one in (tmp_path / "meta").iterdir()) == [
        "consolidated.00.pth",
        "consolidated.01.pth",
        "params.json",
    ]
    assert done.document["file"] == str(tmp_path / "meta")
    assert [one["file"] for one in done.document["files"]] == [
        str(tmp_path / "meta" / name)
        for name in ("params.json", "consolidated.00.pth", "consolidated.01.pth")
    ]
    for n in range(2):
        made = torch.load(tmp_path / "meta" / f"consolidated.0{n}.pth")
        assert made.keys() == torch.load(META / "source" / f"consolidated.0{n}.pth").keys() - {
            "rope.freqs"
        }
    done = ckptool("convert", target, f"{tmp_path}/meta/", *back)
    assert (done.code, "exists" in done.err) == (2, True)
    done = ckptool("convert", target, tmp_path / "one.pth", *back)
    assert (done.code, "the recipe writes 2 files" in done.err) == (2, True)
    back += ["--max-shard-size", "1MB"]
    done = ckptool("convert", target, f"{tmp_path}/sharded/", *back)
    assert (done.code, "--max-shard-size" in done.err) == (2, True)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["meta"]


def test_a_recipe_of_safetensors_files_goes_both_ways(ckptool, tmp_path):
    recipe = tmp_path / "ranks.toml"
    recipe.write_text(
        'files = "part-{rank:02}.safetensors"\n[[tensors]]\nfrom = "{rank:02}/{x*}"\nto = "{x*}"\n'
        'axes = ["o i -> (rank o) i", "o -> (rank o)"]\n'
    )
    want = {"a.weight": torch.arange(24.0).view(6, 4), "a.bias": torch.arange(6)}
    save_file(want, tmp_path / "whole.safetensors")
    words = ["--recipe", recipe, "--reverse", "--param", "rank=3"]
    done = ckptool("convert", tmp_path / "whole.safetensors", f"{tmp_path}/ranks/", *words)
    assert done.code == 0, done.err
    made = load_file(tmp_path / "ranks" / "part-01.safetensors")
    assert torch.equal(made["a.weight"], want["a.weight"][2:4])
    assert made["a.bias"].tolist() == [2, 3]
    done = ckptool("convert", f"{tmp_path}/ranks/", tmp_path / "w.safetensors", *words[:2])
    assert done.code == 0, done.err
    assert hashes(load_file(tmp_path / "w.safetensors")) == hashes(want)


def test_one_file_of_meta_is_a_flat_state_dict(ckptool, tmp_path):
    name = "llama-meta-one"
    words = ["--recipe", "llama-meta-to-hf", "--reverse", "--param", "rank=1"]
    words += ["--files-from", FOLDER / name / "source"]
    target = tmp_path / "model.pth"
    assert ckptool("convert", FOLDER / name / "target.safetensors", target, *words).code == 0
    found = {f"00/{key}": one for key, one in hashes(torch.load(target)).items()}
    assert found == expected_source(name)


def test_megatron_ranks_get_their_folders(ckptool, tmp_path):
    name = "llama-megatron-two"
    words = ["--recipe", "llama-megatron-to-hf", "--reverse", *params(PROOFS[name]["back"])]
    words += ["--files-from", FOLDER / name / "source"]
    done = ckptool("convert", FOLDER / name / "target.safetensors", f"{tmp_path}/meg/", *words)
    assert done.code == 0, done.err
    found = {str(one.relative_to(tmp_path / "meg")) for one in (tmp_path / "meg").rglob("*.*")}
    assert found == {
        "config.json",
        "mp_rank_00/model_optim_rng.pt",
        "mp_rank_01/model_optim_rng.pt",
    }
    with library.open(tmp_path / "meg") as made:
        assert (made.format, contents(made)) == ("megatron", expected_source(name))


def test_a_folder_of_dcp_goes_to_hugging_face_and_back(ckptool, tmp_path):
    source = FOLDER / "llama-torchtitan" / "source"
    words = ["--recipe", "llama-torchtitan-to-hf", "--files-from", source]
    run = ["convert", source / "model.pth", f"{tmp_path}/step-1000/", "--format", "dcp"]
    assert ckptool(*run, "--files-from", source).code == 0
    assert ckptool("convert", tmp_path / "step-1000", f"{tmp_path}/hf/", *words).code == 0
    assert sorted(one.name for one in (tmp_path / "hf").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    back = ["convert", tmp_path / "hf", f"{tmp_path}/back/", "--format", "dcp"]
    assert ckptool(*back, *words[:2], "--reverse").code == 0
    assert ckptool("diff", tmp_path / "step-1000", tmp_path / "back").code == 0
    sharded = ["convert", tmp_path / "back", f"{tmp_path}/shards/", "--max-shard-size", "10kB"]
    assert ckptool(*sharded, *words).code == 0
    assert ckptool("diff", tmp_path / "hf", tmp_path / "shards").code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--reverse"], "add --recipe NAME"),
        (["--param", "heads=6"], "add --recipe NAME"),
        (["--recipe", "llama"], "no recipe is named 'llama'"),
        (["--recipe", "none.toml"], "none.toml"),
        (["--recipe", "llama-meta-to-hf", "--param", "heads"], "is not KEY=VALUE"),
        (["--recipe", "llama-meta-to-hf", "--param", "heads=six"], "expected a number"),
        (["--recipe", "llama-meta-to-hf", "--param", "half=1", "--param", "half=2"], "twice"),
        (["--recipe", "llama-meta-to-hf", "--param", "hands=2"], "no parameter hands"),
        (["--recipe", "llama-meta-to-hf", "--param", "half=5"], "does not"),
        (["--recipe", "vit-timm-to-hf"], "several checkpoints"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_written(ckptool, tmp_path, words, said):
    done = ckptool("convert", META / "source", f"{tmp_path}/hf/", *words)
    assert (done.code, said in done.err) == (2, True), done.err
    assert not (tmp_path / "hf").exists()


def test_a_dry_run_states_the_rules_and_the_way_back(ckptool, tmp_path):
    words = ["--recipe", "llama-meta-to-hf", "--dry-run"]
    done = ckptool("convert", META / "source", f"{tmp_path}/hf/", *words)
    assert done.code == 0
    assert "(h half 2) i -> (rank h 2 half) i" in done.err
    assert "reversible with --reverse --param rank=2, except for 2 dropped tensors" in done.err
    assert not (tmp_path / "hf").exists()


def test_some_files_of_a_layout_are_refused_with_the_folder_as_the_hint(ckptool, tmp_path):
    files = sorted((META / "source").glob("*.pth"))
    done = ckptool("convert", *files, f"{tmp_path}/hf/", "--recipe", "llama-meta-to-hf")
    assert (done.code, f"ckptool convert {META / 'source'}" in done.err) == (2, True)


def test_other_options_follow_the_recipe(ckptool, tmp_path):
    words = ["--recipe", "llama-meta-to-hf", "--include", "*.q_proj.*", "--dtype", "bfloat16"]
    assert ckptool("convert", META / "source", f"{tmp_path}/hf/", *words).code == 0
    found = load_file(tmp_path / "hf" / "model.safetensors")
    want = load_file(META / "target.safetensors")
    assert found.keys() == {key for key in want if ".q_proj." in key}
    assert all(torch.equal(one, want[key].bfloat16()) for key, one in found.items())


def test_the_verb_lists_and_prints_recipes(ckptool, tmp_path):
    listed = ckptool("recipes", "--json").document["recipes"]
    assert {one["name"] for one in listed} >= {"llama-meta-to-hf", "vit-timm-to-hf"}
    assert all(one["name"] in ckptool("recipes").out for one in listed)
    printed = ckptool("recipes", "qkv-fused").out
    (tmp_path / "mine.toml").write_text(printed)
    document = ckptool("recipes", tmp_path / "mine.toml", "--json").document
    assert (document["name"], document["text"]) == ("mine", printed)
    (tmp_path / "mine.toml").write_text("about = 3")
    assert ckptool("recipes", tmp_path / "mine.toml").code == 2


def test_python_has_the_same_step(tmp_path):
    step = library.Relayout.of("llama-meta-to-hf", heads=6)
    want = hashes(load_file(META / "target.safetensors"))
    with step(META / "source") as made:
        assert contents(made) == want
    library.convert(META / "source", tmp_path / "hf.safetensors", step)
    assert hashes(load_file(tmp_path / "hf.safetensors")) == want
    back = step.reversed()
    assert back.reversed() == step
    assert list(back.words()) == ["--recipe", "llama-meta-to-hf", "--reverse", "--param", "heads=6"]
    both = library.Relayout("llama-meta-to-hf", reverse=True, params={"rank": 2})
    receipt = library.convert(
        tmp_path / "hf.safetensors", f"{tmp_path}/meta/", both, files_from=META / "source"
    )
    assert {path for path, _ in receipt.files} == {*map(str, (tmp_path / "meta").iterdir())}
    with pytest.raises(UsageError, match="no recipe is named"):
        library.Relayout("none")
    with pytest.raises(UsageError, match="a list"):
        library.Relayout("qkv-fused", configs="folder")
    with pytest.raises(UsageError, match="not a dict in memory"):
        step({"x": torch.ones(2)})
    with pytest.raises(CheckpointError, match="no tensor matches"):
        library.Relayout("vit-timm-to-hf")(META / "target.safetensors")


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("experts-mixtral", "experts-mixtral"),
        ("experts-qwen2", "experts-qwen"),
        ("llama-torchtitan", "llama-torchtitan-to-hf"),
        ("llama-meta-one", "llama-meta-to-hf"),
        ("qkv-neox", "qkv-fused"),
        ("vit-timm", "vit-timm-to-hf"),
    ],
)
def test_a_recipe_is_proposed_where_it_leads_to_the_model_and_never_applied(ckptool, name, recipe):
    ours, theirs = source_of(name), FOLDER / name / "target.safetensors"
    for file, reference, words in ((ours, theirs, recipe), (theirs, ours, f"{recipe} --reverse")):
        done = ckptool("match", file, "--like", reference, "--json")
        assert (done.code, done.document["recipe"]) == (1, words)
        for verb in ("match", "doctor"):
            done = ckptool(verb, file, "--like", reference)
            assert (done.code, f"convert {file} OUT --recipe {words}" in done.out) == (1, True)
            assert "architecture" not in done.out


@pytest.mark.parametrize("change", [{"cls_token": None}, {"other": torch.ones(2)}])
def test_no_recipe_is_proposed_for_another_model(ckptool, tmp_path, change):
    ours, theirs = source_of("vit-timm"), FOLDER / "vit-timm" / "target.safetensors"
    state = {**torch.load(ours), **change}
    torch.save({key: one for key, one in state.items() if one is not None}, tmp_path / "other.pth")
    done = ckptool("match", tmp_path / "other.pth", "--like", theirs, "--json")
    assert (done.code, done.document["recipe"]) == (1, "")
    assert "looks like" not in ckptool("info", tmp_path / "other.pth").out
    same = ckptool("match", ours, "--like", ours, "--json")
    assert (same.code, same.document["recipe"]) == (0, "")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (
            source_of("llama-torchtitan"),
            "the source of a recipe for another library: --recipe ll",
        ),
        (source_of("llama-megatron-two"), "--recipe llama-megatron-to-hf"),
        (source_of("llama-meta-one"), "--recipe llama-meta-to-hf"),
        (FOLDER / "vit-timm" / "target.safetensors", "--recipe vit-timm-to-hf --reverse"),
        (FOLDER / "llama-torchtitan" / "target.safetensors", None),  # several lead back
        (source_of("experts-mixtral"), None),  # most of it is left over
    ],
)
def test_info_notes_a_recipe_that_takes_all_keys(ckptool, file, words):
    notes = [
        one for one in ckptool("info", file, "--json").document["notes"] if "looks like" in one
    ]
    assert len(notes) == (words is not None)
    assert not words or words in notes[0]


def test_keys_of_a_large_model_are_sampled(monkeypatch):
    tried = []
    module = sys.modules["ckptool.recipes.relayout"]  # the package has a function of its name
    monkeypatch.setattr(module, "find_left_over", lambda _, keys: tried.extend(keys))
    keys = [f"layers.{n}.experts.{e}.w{w}" for n in range(40) for e in range(64) for w in range(2)]
    assert guess_layout(keys) is None
    assert len(set(tried)) <= 16 * 2
