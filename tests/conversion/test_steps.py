"""Steps: from options and back to words, on files and on dicts, and what is refused."""

import json
from dataclasses import FrozenInstanceError, fields

import pytest
import torch

import ckptool
from ckptool.conversion.fit import Fit, Reference
from ckptool.conversion.steps import STEPS, make_steps
from ckptool.errors import CheckpointError, UsageError
from ckptool.recipes.reshaping import Concat

EXAMPLES = [
    ckptool.Salvage(),
    ckptool.Masters(),
    Concat(["*.qkv=0"]),
    ckptool.Flatten("/"),
    ckptool.Take("model", include=["a.*"], exclude=["*.bias"]),
    ckptool.Take(model_only=True),
    ckptool.Take(ema=True),
    ckptool.Strip(),
    ckptool.Strip(levels=0),
    ckptool.Strip(at="features"),
    ckptool.Rename(["a=>b", "^c=>d"], prefixes=["e=f"]),
    ckptool.Relayout("qkv-fused", reverse=True, params={"heads": "8", "kv_heads": "2"}),
    ckptool.Reshape(resize=["w=4"], split=["*.qkv=>*.q,*.k@0"]),
    ckptool.Fit("ref.pth", allow_missing=["a.*"], min_coverage=0.5, transpose=["a"]),
    ckptool.Plain(),
    ckptool.Plain(drop_objects=True),
    ckptool.Plain(plain=False, drop_objects=True),
    ckptool.Untie(),
    ckptool.Cast("bfloat16", keep={"*.norm.*": "float32", "b": None}, cast_optimizer=True),
    ckptool.Cast(dequantize="float32", raw=True, allow_overflow=True),
    ckptool.Compact(),
    ckptool.Remap("cpu"),
    ckptool.Remap(map={"cuda:1": "cuda:0", "cuda:*": "cpu"}),
    ckptool.Overlay("vae.pth", key="model", at="vae", include=["a.*"], add=True),
    ckptool.Drop(["ema", "optimizer/state"]),
    ckptool.Move({"model_state_dict": "state_dict", "a": "b"}),
    ckptool.Set({"epoch": 3, "name": "x", "betas": [0.5, None]}),
    ckptool.Nest("state_dict"),
]


def options_of(words):
    """Options of `convert` by the words of a command, as the command line makes them."""
    given: dict = {}
    words = iter(
        [one for word in words for one in (word.split("=", 1) if word.startswith("--") else [word])]
    )
    flags = {"salvage", "master", "model_only", "ema", "plain", "drop_objects", "compact", "raw",
             "cast_optimizer", "allow_overflow", "overlay_add", "reverse"}  # fmt: skip
    several = {"concat", "include", "exclude", "rename", "prefix", "resize", "split", "keep", "map",
               "allow_missing", "transpose", "overlay_include", "drop", "move", "set",
               "param"}  # fmt: skip
    for word in words:
        name = word.removeprefix("--").replace("-", "_")
        if name in flags:
            given[name] = True
        elif name in several:
            given.setdefault(name, []).append(next(words))
        else:
            given[name] = next(words)
    for name in {"map", "param"} & given.keys():
        given[name] = dict(one.split("=") for one in given[name])
    if "set" in given:
        pairs = [one.split("=") for one in given["set"]]
        given["set"] = {path: json.loads(value) for path, value in pairs}
    if "keep" in given:
        given["keep"] = [[*one.split("="), None][:2] for one in given["keep"]]
        given["keep"] = tuple(map(tuple, given["keep"]))
    if "min_coverage" in given:
        given["min_coverage"] = float(given["min_coverage"])
    return {name: tuple(one) if isinstance(one, list) else one for name, one in given.items()}


@pytest.mark.parametrize("step", EXAMPLES, ids=repr)
def test_the_words_of_a_step_ask_for_it_again(step):
    assert make_steps(options_of(list(step.words()))) == [step]


def test_every_step_has_an_example_or_no_option():
    assert {type(one) for one in EXAMPLES} | {ckptool.Wrap} == {*STEPS}
    assert list(ckptool.Wrap().words()) == []


def test_options_are_carried_out_in_the_order_of_the_steps():
    options = {"to": "cpu", "dtype": "bfloat16", "wrappers": "strip", "model_only": True}
    assert [type(one).__name__ for one in make_steps(options)] == ["Take", "Strip", "Cast", "Remap"]


@pytest.mark.parametrize("step", EXAMPLES, ids=repr)
def test_a_step_is_frozen(step):
    for one in fields(step):
        with pytest.raises(FrozenInstanceError):
            setattr(step, one.name, None)


NOT_FOR_DICTS = [one for one in EXAMPLES if one.on_files]


@pytest.mark.parametrize("step", NOT_FOR_DICTS, ids=lambda one: type(one).__name__)
def test_a_step_that_makes_no_sense_for_a_dict_refuses_it_by_name(step):
    with pytest.raises(UsageError, match=f"{type(step).__name__} needs a file, not a dict"):
        step({"w": torch.ones(2)})


def test_steps_change_a_dict_in_memory_and_not_the_argument():
    state = {"module.a.w": torch.ones(2), "module.b.w": torch.zeros(2)}
    bare = ckptool.Strip()(state)
    assert list(ckptool.Strip(only=iter(["module"]))(state)) == list(bare)
    assert list(bare) == ["a.w", "b.w"]
    assert bare["a.w"] is state["module.a.w"]
    assert list(ckptool.Take(include=["a.*"])(bare)) == ["a.w"]
    assert list(ckptool.Take(model_only=True)({"state_dict": bare, "epoch": 3})) == ["a.w", "b.w"]
    assert list(ckptool.Nest("model")(bare)["model"]) == ["a.w", "b.w"]
    assert list(ckptool.Flatten()({"x": bare})) == ["x.a.w", "x.b.w"]
    assert ckptool.remap(bare, "cpu").keys() == bare.keys()
    assert list(ckptool.Wrap()(bare)) == list(state)
    assert list(state) == ["module.a.w", "module.b.w"]


@pytest.mark.parametrize("state", [3, [torch.ones(1)], torch.nn.Linear(1, 1)])
def test_what_is_neither_a_file_nor_a_dict_is_refused(state):
    with pytest.raises(UsageError, match="a path, a state dict or an open checkpoint"):
        ckptool.Strip()(state)


def test_steps_of_a_path_and_of_an_open_file_are_the_same(tmp_path):
    torch.save({"module.w": torch.ones(2), "module.v": torch.ones(1)}, tmp_path / "a.pth")
    steps = [ckptool.Strip(), ckptool.Take(exclude=["v"]), ckptool.Rename(["w=>x"])]
    with ckptool.open(tmp_path / "a.pth") as checkpoint:
        made = checkpoint.then(*steps)
        assert list(made) == ["x"]
        assert list(checkpoint) == ["module.w", "module.v"]
        assert [one.wanted for one in made.changes if one.kind == "left-out"] == [True]
        assert checkpoint.then() is checkpoint
    with ckptool.Strip()(tmp_path / "a.pth") as stripped:
        assert list(stripped) == ["w", "v"]
    ckptool.convert(tmp_path / "a.pth", tmp_path / "b.pth", *steps)
    assert list(torch.load(tmp_path / "b.pth")) == ["x"]


def test_in_python_the_order_is_the_callers(tmp_path):
    torch.save({"module.w": torch.ones(2)}, tmp_path / "a.pth")
    renamed = ckptool.Rename([r"^module\.=>net."])
    ckptool.convert(tmp_path / "a.pth", tmp_path / "b.pth", renamed, ckptool.Strip())
    assert list(torch.load(tmp_path / "b.pth")) == ["net.w"]
    ckptool.convert(tmp_path / "a.pth", tmp_path / "c.pth", ckptool.Strip(), renamed)
    assert list(torch.load(tmp_path / "c.pth")) == ["w"]


def test_a_refused_step_closes_the_file_and_writes_nothing(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pth")
    with pytest.raises(CheckpointError):
        ckptool.Take("nothing")(tmp_path / "a.pth")
    with pytest.raises(UsageError, match="expected a step, not a str"):
        ckptool.convert(tmp_path / "a.pth", tmp_path / "b.pth", "strip")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pth"]


def test_a_reference_is_called_by_its_word():
    assert list(Fit(Reference(None, "net:build", None)).words()) == ["--like", "net:build"]


@pytest.mark.parametrize("name", ["cast", "extract", "compact", "to_plain", "drop_objects"])
def test_a_method_of_before_names_the_step(tmp_path, name):
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pth")
    with ckptool.open(tmp_path / "a.pth") as checkpoint:
        with pytest.raises(AttributeError, match=r"it is checkpoint\.then\(ckptool\."):
            getattr(checkpoint, name)
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            checkpoint.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: ckptool.convert("a", "b", cast="bfloat16"), "ckptool.Cast"),
        (lambda: ckptool.convert("a", "b", wrappers="strip"), "ckptool.Strip"),
        (lambda: ckptool.load_into({}, "a", rules=["a=>b"]), "use rename instead"),
        (lambda: ckptool.match("a", "b", rules=["a=>b"]), "use rename instead"),
        (lambda: ckptool.diff("a", "b", rules=["a=>b"]), "use rename instead"),
    ],
)
def test_an_argument_of_before_is_refused_with_the_new_one(call, hint):
    with pytest.raises(UsageError, match="has no argument") as caught:
        call()
    assert hint in caught.value.hint


def test_salvage_judges_what_is_taken(tmp_path):
    torch.save({"model": {"w": torch.ones(9)}, "ema": {"w": torch.ones(2000)}}, tmp_path / "a.pth")
    data = (tmp_path / "a.pth").read_bytes()
    (tmp_path / "a.pth").write_bytes(data[:3000])
    steps = [ckptool.Salvage(), ckptool.Take("model")]
    ckptool.convert(tmp_path / "a.pth", tmp_path / "b.pth", *steps)
    assert torch.load(tmp_path / "b.pth")["w"].tolist() == [1] * 9
