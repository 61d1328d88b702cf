"""list, info and show, from the command line to the screen."""

import json

import pytest
import torch


def test_list_prints_names_and_totals(ckptool, model):
    done = ckptool("list", model)
    assert (done.code, done.err) == (0, "")
    assert "state_dict/module.fc.weight" in done.out
    assert done.out.splitlines()[-1].startswith("9 tensors, ")


def test_list_as_json_has_every_tensor_with_its_hash(ckptool, model):
    document = ckptool("list", "--json", "--hash", model).document
    assert document["schema"] == "ckptool.list/1"
    assert (document["file"], document["format"]) == (str(model), "torch-zip")
    state = torch.load(model)["state_dict"]
    assert [row["path"] for row in document["tensors"]] == [["state_dict", name] for name in state]
    assert all(len(row["sha256"]) == 64 for row in document["tensors"])


def test_list_takes_globs(ckptool, model):
    document = ckptool(
        "list", model, "--json", "--include", "*.weight", "--exclude", "*bn1*"
    ).document
    assert [row["path"][-1] for row in document["tensors"]] == [
        "module.conv1.weight",
        "module.fc.weight",
    ]


def test_list_as_tree(ckptool, tmp_path):
    layers = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(6)))
    torch.save(layers.state_dict(), tmp_path / "m.pth")
    done = ckptool("list", "--tree", tmp_path / "m.pth")
    assert "{0..5}" in done.out
    document = ckptool("list", "--tree", "--json", tmp_path / "m.pth").document
    assert document["schema"] == "ckptool.tree/1"
    assert document["root"]["children"][0]["label"] == "{0..5}"


def test_a_hundred_thousand_rows_stream(ckptool, tmp_path):
    shared = torch.zeros(1)
    torch.save({f"layer.{n}": shared for n in range(5000)}, tmp_path / "many.pth")
    assert ckptool("list", tmp_path / "many.pth").out.count("\n") == 5003


def test_info_proposes_the_command_that_is_needed(ckptool, model):
    done = ckptool("info", model)
    assert (done.code, done.err) == (0, "")
    (command,) = ckptool("doctor", model, "--quick", "--json").document["commands"]
    assert f"  {command}\n" in done.out
    assert "--wrappers strip" in command
    document = ckptool("info", model, "--json").document
    assert document["schema"] == "ckptool.info/1"
    assert document["weights_only"] is True
    assert document["sections"][0]["wrappers"] == ["module"]


@pytest.mark.parametrize(("name", "out"), [("epoch", "7\n"), ("param_groups/0/lr", "0.1\n")])
def test_show_prints_a_value(ckptool, model, name, out):
    assert ckptool("show", model, name).out == out


def test_show_prints_a_tensor(ckptool, model):
    weight = torch.load(model)["state_dict"]["module.fc.weight"]
    document = ckptool("show", model, "module.fc.weight", "--count", 3, "--json").document
    assert document["head"] == weight.reshape(-1)[:3].tolist()
    assert document["max"] == weight.max().item()
    assert "float32 [10, 8] on cpu" in ckptool("show", model, "module.fc.weight").out


def test_show_of_an_unknown_name_lists_what_is_near(ckptool, model):
    done = ckptool("show", model, "fc.wieght")
    assert done.code == 2
    assert "state_dict/module.fc.weight" in done.err
    assert "hint: " in done.err


def test_values_that_json_lacks_are_strings(ckptool, tmp_path):
    torch.save({"best": float("inf"), "loss": float("nan")}, tmp_path / "m.pth")
    text = ckptool("list", "--json", tmp_path / "m.pth").out
    values = json.loads(text, parse_constant=pytest.fail)["values"]
    assert [row["value"] for row in values] == ["inf", "nan"]


def test_a_hostile_name_reaches_neither_the_table_nor_an_error(ckptool, tmp_path):
    torch.save({"\x1b[2Jx": torch.ones(1)}, tmp_path / "m.pth")
    assert "\\x1b[2Jx" in ckptool("list", tmp_path / "m.pth").out
    assert "\x1b" not in ckptool("list", "--json", tmp_path / "m.pth").out
    assert "\x1b" not in ckptool("show", tmp_path / "m.pth", "\x1b[2J").err


@pytest.mark.parametrize("verb", ["list", "stats"])
def test_names_that_match_nothing_are_named_with_what_is_near(ckptool, model, verb):
    done = ckptool(verb, model, "--include", "*.wieght", "--exclude", "x\x1b")
    assert done.code == 1
    assert "warning: '*.wieght' matches no key; did you mean module." in done.err
    assert "warning: 'x\\\\x1b' matches no key" in done.err
    quiet = ckptool(verb, model, "--include", "q*", "-q")
    assert (quiet.code, quiet.err) == (1, "")
    document = ckptool(verb, model, "--include", "q*", "--json")
    assert (document.code, document.document["tensors"]) == (1, [])
    rest = ckptool(verb, model, "--include", "fc.weight", "--include", "q*", "--json")
    assert (rest.code, len(rest.document["tensors"])) == (1, 1)


@pytest.mark.parametrize("verb", ["list", "stats"])
def test_patterns_that_let_nothing_through_are_named(ckptool, model, verb):
    done = ckptool(verb, model, "--include", "fc.*", "--exclude", "module.fc.*")
    assert done.code == 0
    assert " is left after --include 'fc.*', --exclude 'module.fc.*'" in done.err


def test_a_file_of_no_tensors_needs_no_note(ckptool, tmp_path):
    torch.save({}, tmp_path / "m.pth")
    assert ckptool("list", tmp_path / "m.pth").err == ""


def test_a_name_that_is_empty_or_none_at_all(ckptool, tmp_path):
    torch.save({"": torch.ones(1), "a": {"": 1}}, tmp_path / "m.pth")
    assert ckptool("list", tmp_path / "m.pth", "--fmt", "tsv").out.splitlines()[1][:3] == "''\t"
    torch.save(torch.ones(1), tmp_path / "m.pth")
    assert "(the whole file)  float32" in ckptool("list", tmp_path / "m.pth").out
