"""Entries moved, set and dropped by exact paths; torch judges what is written."""

import json
import shutil
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import ckptool
from ckptool.errors import AmbiguousName, CheckpointError, NotFound, UsageError
from ckptool.transforms.tree_edits import parse_json, split_rule


def run():
    weights = OrderedDict({"conv.weight": torch.ones(2, 2), "fc.bias": torch.zeros(3)})
    weights._metadata = OrderedDict({"": {"version": 1}})
    return {
        "model_state_dict": weights,
        "ema": {key: one + 1 for key, one in weights.items()},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [
            {"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}]},
        "epoch": 3,
        "tags": ["a", "b"],
    }  # fmt: skip


@pytest.fixture
def file(tmp_path):
    torch.save(run(), tmp_path / "run.pth")
    return tmp_path / "run.pth"


def made(file, *steps, target="out.pth"):
    out = file.parent / target
    receipt = ckptool.convert(file, out, *steps, overwrite=True)
    return torch.load(out, weights_only=True), receipt


def test_a_key_gets_another_name_and_keeps_its_place_and_metadata(file):
    found, receipt = made(file, ckptool.Move({"model_state_dict": "state_dict"}))
    assert list(found) == ["state_dict", "ema", "optimizer", "epoch", "tags"]
    assert found["state_dict"]._metadata == {"": {"version": 1}}
    assert [one.text for one in receipt.changes] == ["moved model_state_dict to state_dict"]


def test_several_move_at_once(file):
    swapped, _ = made(file, ckptool.Move(["ema=model_state_dict", "model_state_dict=ema"]))
    assert list(swapped) == list(run())
    assert swapped["model_state_dict"]["fc.bias"].tolist() == [1, 1, 1]
    assert swapped["ema"]["fc.bias"].tolist() == [0, 0, 0]
    nested, _ = made(file, ckptool.Move({"ema": "optimizer/ema", "epoch": "step"}))
    assert list(nested["optimizer"]) == ["state", "param_groups", "ema"]
    assert nested["step"] == 3


def test_values_are_set_and_tuples_stay_tuples(file):
    values = {"epoch": 9, "optimizer/param_groups/0/betas": [0.5, 0.6], "tags": [], "note": None,
              "config": {"heads": [1, 2]}, "optimizer/param_groups/0/lr": 0.01}  # fmt: skip
    found, receipt = made(file, ckptool.Set(values))
    group = found["optimizer"]["param_groups"][0]
    assert (group["lr"], group["betas"], group["params"]) == (0.01, (0.5, 0.6), [0])
    assert (found["epoch"], found["tags"], found["note"]) == (9, [], None)
    assert found["config"] == {"heads": [1, 2]}
    assert receipt.changes[0].text == "set epoch to 9 (was 3)"


def test_a_section_goes_with_its_tensors(file):
    found, receipt = made(file, ckptool.Drop(["ema", "optimizer"]))
    assert list(found) == ["model_state_dict", "epoch", "tags"]
    assert receipt.left_out == ("ema (state_dict, 2 tensors)", "optimizer (optimizer, 1 tensor)")
    made(file, ckptool.Drop(["ema"]), target="strict.pth")
    ckptool.convert(file, file.parent / "s.pth", ckptool.Drop(["ema"]), strict=True)


def test_parameters_of_the_model_go_only_by_force(file):
    for path in ("model_state_dict/fc.bias", "ema/fc.bias"):
        with pytest.raises(UsageError, match="1 tensor of the model") as caught:
            made(file, ckptool.Drop([path]))
        assert "--force" in caught.value.hint
        found, _ = made(file, ckptool.Drop([path], force=True))
        assert "fc.bias" not in found[path.partition("/")[0]]
    torch.save({"model": {"w": torch.ones(2)}, "epoch": 3}, file)
    with pytest.raises(UsageError, match="1 tensor of the model"):
        made(file, ckptool.Drop(["model"]))


@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        (
            ckptool.Move({"modle_state_dict": "x"}),
            NotFound,
            "no entry is at 'modle_state_dict'; it has model_state_dict",
        ),
        (
            ckptool.Move({"ema/fc.bais": "x"}),
            NotFound,
            r"no entry is at 'ema/fc\.bais' in ema; it has fc\.bias",
        ),
        (ckptool.Move({"ema": "epoch"}), UsageError, "'epoch' already exists"),
        (ckptool.Move({"ema": "ema/inner"}), UsageError, "is inside 'ema', which moves"),
        (
            ckptool.Move({"ema": "a/b"}),
            NotFound,
            "no entry is at 'a'; it has model_state_dict, ema, optimizer, epoch,",
        ),
        (
            ckptool.Move({"ema": "epoch/b"}),
            UsageError,
            "epoch is not a dict, so it cannot have a new key",
        ),
        (ckptool.Move({"tags/0": "x"}), UsageError, "item of a list"),
        (ckptool.Set({"ema": 3}), UsageError, "is a container"),
        (ckptool.Set({"ema/fc.bias": 3}), UsageError, "is a tensor"),
        (ckptool.Set({"optimizer/param_groups": []}), UsageError, "is a container"),
        (
            ckptool.Set({"a/b": 3}),
            NotFound,
            "no entry is at 'a'; it has model_state_dict, ema, optimizer, epoch,",
        ),
        (
            ckptool.Drop(["x"]),
            NotFound,
            "no entry is at 'x'; it has model_state_dict, ema, optimizer, epoch,",
        ),
        (ckptool.Drop(["optimizer/param_groups/0"]), UsageError, "item of a list"),
    ],
    ids=repr,
)
def test_what_cannot_be_done_is_refused_and_nothing_written(file, step, error, words):
    with pytest.raises(error, match=words):
        made(file, step)
    assert [path.name for path in file.parent.iterdir()] == ["run.pth"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ckptool.Move({"a": "x", "b": "x"}), "two entries cannot move"),
        (lambda: ckptool.Move(["a"]), "OLD=NEW"),
        (lambda: ckptool.Move("a=b"), "takes a list"),
        (lambda: ckptool.Move(["a=b", "a=c"]), "one path twice"),
        (lambda: ckptool.Set({"a": torch.ones(1)}), "plain values, not Tensor"),
        (lambda: ckptool.Set({"a": {1: 2}}), "keys of a value"),
        (lambda: ckptool.Drop([""]), "--drop needs the path of an entry"),
        (lambda: ckptool.Drop("a"), "takes a list"),
    ],
)
def test_wrong_options_are_refused_when_the_step_is_made(make, words):
    with pytest.raises(UsageError, match=words):
        make()


def test_a_key_with_a_slash_is_quoted_where_it_is_needed(tmp_path):
    torch.save({"a": {"b/c": 1}, "a/b": {"c": 2}, "d/e": 3}, tmp_path / "run.pth")
    found, _ = made(tmp_path / "run.pth", ckptool.Set({'a/"b/c"': 5, "d/e": 4}))
    assert found == {"a": {"b/c": 5}, "a/b": {"c": 2}, "d/e": 4}
    with pytest.raises(
        AmbiguousName, match=r"'a/b/c' is ambiguous: it could be \['a', 'b/c'\], \['a/b', 'c'\]"
    ):
        made(tmp_path / "run.pth", ckptool.Set({"a/b/c": 5}))
    moved, _ = made(tmp_path / "run.pth", ckptool.Move(['"d/e"="x/y"']))
    assert moved["x/y"] == 3


def test_an_object_is_not_looked_into(tmp_path):
    torch.save(torch.nn.ModuleDict({"a": torch.nn.Linear(1, 1)}), tmp_path / "run.pth")
    with pytest.raises(CheckpointError, match=r"no dict|object of class|nothing at"):
        made(tmp_path / "run.pth", ckptool.Set({"a/b": 1}))
    torch.save({"net": torch.nn.Linear(1, 1)}, tmp_path / "run.pth")
    with pytest.raises(NotFound, match=r"is an object of class torch\.nn"):
        ckptool.Set({"net/training": True})(tmp_path / "run.pth")


def test_strings_of_a_safetensors_header(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.ones(2)}, path, {"format": "pt", "note": "old, and long enough"})
    for step in (ckptool.Set({"__metadata__/note": "new"}), ckptool.Set({"__metadata__/b": "2"})):
        ckptool.convert(path, path, step, in_place=True)
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "note": "new", "b": "2"}
    with pytest.raises(
        UsageError, match="safetensors stores no values except header strings: epoch"
    ):
        ckptool.convert(path, tmp_path / "b.safetensors", ckptool.Set({"epoch": 3}))


def test_names_and_values_change_in_place_by_the_header_alone(tmp_path):
    torch.save({"model": {"w": torch.ones(1 << 20)}, "epoch": 3}, tmp_path / "a.pth")
    before = (tmp_path / "a.pth").stat().st_ino
    receipt = ckptool.convert(
        tmp_path / "a.pth",
        tmp_path / "a.pth",
        ckptool.Move({"model": "state_dict"}),
        ckptool.Set({"epoch": 4}),
        in_place=True,
    )
    assert receipt.written < 1 << 16
    assert (tmp_path / "a.pth").stat().st_ino == before
    found = torch.load(tmp_path / "a.pth")
    assert (list(found), found["epoch"], found["state_dict"]["w"].sum()) == (
        ["state_dict", "epoch"], 4, 1 << 20,
    )  # fmt: skip


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(PLAIN)
def test_what_json_says_is_what_is_set(value):
    assert parse_json(json.dumps(value)) == value
    state = {"w": torch.ones(1), "x": 1}
    assert ckptool.Set({"new": value})(state)["new"] == value


@pytest.mark.parametrize("text", ["abc", "NaN", "{", "1 2", "", "'a'", "[" * 100_000, "Infinity"])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(UsageError):
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "parts"),
    [("a=b", ("a", "b")), ('"a=b"=c', ('"a=b"', "c")), ("a=b=c", ("a", "b=c"))],
)
def test_a_rule_is_parted_at_the_first_sign_outside_quotes(text, parts):
    old, _, new = split_rule(text)
    assert (old, new) == parts


def test_a_key_of_that_name_is_no_header_and_a_file_without_one_says_so(tmp_path):
    torch.save({"w": torch.ones(2), "__metadata__": {"a": "old", "n": 3}}, tmp_path / "m.pth")
    found, _ = made(tmp_path / "m.pth", ckptool.Set({"__metadata__/a": "new", "__metadata__/n": 4}))
    assert found["__metadata__"] == {"a": "new", "n": 4}
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pth")
    with pytest.raises(UsageError, match="torch-zip has no header strings: __metadata__/a"):
        made(tmp_path / "m.pth", ckptool.Set({"__metadata__/a": "new"}))
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    with pytest.raises(UsageError, match="must be a string"):
        ckptool.Set({"__metadata__/a": 3})(tmp_path / "m.safetensors")


def test_numbered_entries_stay_numbered(tmp_path):
    torch.save({"state": {0: torch.zeros(1), 1: torch.ones(1)}}, tmp_path / "o.pth")
    rules = ["state/0=state/1", "state/1=state/0"]
    found, _ = made(tmp_path / "o.pth", ckptool.Move(rules))
    assert {key: one.item() for key, one in found["state"].items()} == {0: 1, 1: 0}
    far, _ = made(tmp_path / "o.pth", ckptool.Move(["state/0=state/7"]))
    assert list(far["state"]) == [7, 1]


def test_values_of_a_distributed_checkpoint_are_set(fixtures, tmp_path):
    folder = tmp_path / "dcp"
    shutil.copytree(fixtures / "dcp" / "training-2.13.0", folder)
    for value in (1, 2):
        ckptool.convert(folder, folder, ckptool.Set({"lr2": value}), in_place=True)
    assert ckptool.load(folder)["lr2"] == 2
