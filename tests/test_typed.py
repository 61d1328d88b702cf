"""A type checker knows the public functions: their arguments by name, and what they return."""

import inspect
import re
import subprocess
import sys

import pytest

import ckptool

FUNCTIONS = [name for name in ckptool.__all__ if inspect.isfunction(getattr(ckptool, name))]
CLASSES = ckptool.results.__all__
METHODS = [
    f"{name}.{method}"
    for name in CLASSES
    for method, _ in inspect.getmembers(getattr(ckptool, name), inspect.isfunction)
    if method == "__init__" or not method.startswith("_")
]

VERBS = {
    "Check", "Compare", "Convert", "Find", "Finish", "List", "Load", "Measure", "Open", "Return",
    "Summarize", "Write",
}  # fmt: skip
"""How the help of a public function begins."""

HEAD = """
from pathlib import Path
import torch
import ckptool
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = model.state_dict()
checkpoint = ckptool.open("a.pth")
tensor: ckptool.TensorRef = checkpoint["weight"]
def told(done: int, everything: int) -> None: ...
""".splitlines()
RIGHT = {
    'ckptool.open("a.pth", limits=ckptool.Limits(max_depth=9))': "Checkpoint",
    'ckptool.load("a.pth", "cpu", mmap=True)': "Any",
    'ckptool.load(checkpoint, map_location={"cuda:1": "cpu"})': "Any",
    'ckptool.load("a.pth", lambda storage, tag: storage)': "Any",
    'ckptool.load_state_dict("a.pth", torch.device("cpu"), key="ema", wrappers="keep", '
    "dtype=torch.half, mmap=True)": "OrderedDict[str, Any]",
    'ckptool.load_into(model, "a.pth", strict=False, optimizer=optimizer, rename=["a=>b"], '
    'allow_missing=["fc.*"], map_location=None)': "MatchReport",
    'ckptool.match(state, model, prefixes=["a=b"])[0]': "OrderedDict[str, Any]",
    'ckptool.match("a.pth", "b.pth", like_key="ema")[1].fits': "bool",
    'ckptool.save("a.pth", model=model, optimizer=optimizer, epoch=3)': "Receipt",
    "ckptool.info(checkpoint).devices": "Mapping[str, int]",
    'ckptool.list_tensors("a.pth", hash=True, exclude=["a"]).tensors[0].sha256': "str | None",
    'ckptool.stats("a.pth", bins=9, key="ema", progress=told)': "Stats",
    'ckptool.diff("a.pth", checkpoint, rename=["a=>b"], quick=True, max_diffs=3).identical': "bool",
    'ckptool.verify("a.pth", values=True, manifest="sums.json", progress=told).ok': "bool",
    'ckptool.scan("a.pth").ok(strict=True)': "bool",
    'ckptool.doctor("a.pth", like="b.pth", devices=["cpu"]).commands': "tuple[str, ...]",
    'ckptool.report("a.pth", "a.html", other=checkpoint, overwrite=True)': "PageReceipt",
    "ckptool.strip_module(state, levels=1)": "dict[Any, Any]",
    'ckptool.strip_module(checkpoint, only=["module"], at="a")': "Checkpoint",
    'ckptool.add_module(state, wrapper="_orig_mod", key="ema")': "dict[Any, Any]",
    'ckptool.remap(checkpoint, {"*": "cpu"})': "Checkpoint",
    'ckptool.strip_module("a.pth")': "Checkpoint",
    'ckptool.rename(Path("a.pth"), ["a=>b"]).save("b.pth")': "Receipt",
    'checkpoint.by_name["a"].shape': "tuple[int | None, ...]",
    'ckptool.list_tensors("a.pth")["a"].nbytes': "int",
    '[row.dtype for row in ckptool.list_tensors("a.pth")[:2]]': "list[str]",
    'ckptool.rename(state, ["a=>b"], prefixes=["c=d"], key="ema")': "dict[Any, Any]",
    'ckptool.convert("a.pth", "b.safetensors", ckptool.Fit(model, allow_missing=True), '
    'ckptool.Cast(torch.half, keep={"*.bias": None}), max_shard_size="5GB")': "Receipt",
    'ckptool.average(["a.pth", checkpoint], "b.pth", ints="first", overwrite=True)': "Receipt",
    'ckptool.merge_lora("a.pth", ["b", checkpoint], "c.pth", scale=[1, 0.5])': "Receipt",
    'ckptool.recover("a.pth", discard=True).action': "str",
    "checkpoint.strip_module(levels=1)": "Checkpoint",
    'checkpoint.add_module(at="backbone")': "Checkpoint",
    'checkpoint.rename(["a=>b"], key="ema")': "Checkpoint",
    'checkpoint.then(ckptool.Take(include=["*.weight"], model_only=True))': "Checkpoint",
    'checkpoint.remap("cpu").then(ckptool.Compact(), ckptool.Plain(False, True))': "Checkpoint",
    'ckptool.Cast("bfloat16", keep=["*.bias"], cast_optimizer=True)(checkpoint)': "Checkpoint",
    "ckptool.Strip()(state)": "dict[Any, Any]",
    'checkpoint.save("b.pth", format="torch-zip", in_place=True, verify=True)': "Receipt",
    'tensor.torch(map_location="cuda:0", dtype="float32", mmap=True)': "Tensor",
}  # fmt: skip
"""Each call of a consumer, and the type of its result."""

KEYWORD, TYPE = "Unexpected keyword argument", "has incompatible type"
OVERLOAD = "No overload variant"
WRONG = {
    'ckptool.open("a.pth", limit=None)': KEYWORD,
    "ckptool.open(3)": TYPE,
    'ckptool.load("a.pth", 3)': TYPE,
    'ckptool.load_state_dict("a.pth", "cpu", "ema")': "Too many positional arguments",
    'ckptool.load_state_dict("a.pth", wrapper="keep")': KEYWORD,
    'ckptool.load_into("a.pth", model)': TYPE,
    'ckptool.load_into(model, "a.pth", strikt=False)': KEYWORD,
    'ckptool.match(state, model, prefix=["a=b"])': KEYWORD,
    'ckptool.save("a.pth", model=3)': TYPE,
    "ckptool.info(3)": TYPE,
    'ckptool.list_tensors("a.pth", hashes=True)': KEYWORD,
    'ckptool.stats("a.pth", bins="many")': TYPE,
    'ckptool.diff("a.pth", "b.pth", tolerance=1)': KEYWORD,
    'ckptool.verify("a.pth", progress=3)': TYPE,
    'ckptool.scan("a.pth", strict=True)': KEYWORD,
    'ckptool.doctor("a.pth", fast=True)': KEYWORD,
    'ckptool.report("a.pth", "a.html", "b.pth")': "Too many positional arguments",
    "ckptool.strip_module(state, level=1)": OVERLOAD,
    "ckptool.strip_module(3)": OVERLOAD,
    "ckptool.add_module(state, wrapper=3)": OVERLOAD,
    'ckptool.remap(checkpoint, ["cpu"])': OVERLOAD,
    'ckptool.rename(state, prefixes=[1])': "has incompatible type",
    'ckptool.convert("a.pth", "b.pth", color="red")': KEYWORD,
    'ckptool.convert("a.pth", "b.pth", ckptool.Fit(3))': TYPE,
    'ckptool.convert("a.pth", "b.pth", cast="bfloat16")': KEYWORD,
    'ckptool.average(["a.pth"], "b.pth", overwrit=True)': KEYWORD,
    'ckptool.merge_lora("a.pth", ["b"], "c.pth", scales=[1])': KEYWORD,
    'ckptool.recover("a.pth", discard="yes")': TYPE,
    'checkpoint.strip_module(onyl="module")': KEYWORD,
    "checkpoint.add_module(at=3)": TYPE,
    'checkpoint.rename(["a=>b"], keys="ema")': KEYWORD,
    'checkpoint.then(ckptool.Take(includes=["*"]))': KEYWORD,
    "checkpoint.then(ckptool.Cast(16))": TYPE,
    'checkpoint.save("b.pth", force=True)': KEYWORD,
    'tensor.torch(device="cpu")': KEYWORD,
}  # fmt: skip
"""Each call of a consumer who errs, and what the type checker says of it."""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What mypy says of each line of a consumer's module."""
    folder = tmp_path_factory.mktemp("consumer")
    calls = [*(f"reveal_type({call})" for call in RIGHT), *WRONG]
    (folder / "consumer.py").write_text("\n".join([*HEAD, *calls]), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "consumer.py"],
        cwd=folder, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.stderr == ""
    words = {}
    for number, text in re.findall(r"consumer\.py:(\d+): (?:error|note): (.*)", done.stdout):
        words.setdefault(int(number) - len(HEAD) - 1, []).append(text)
    assert min(words) == 0, words
    return {call.removeprefix("reveal_type("): words.get(at, []) for at, call in enumerate(calls)}


@pytest.mark.parametrize("call", RIGHT)
def test_a_right_call_has_the_type_of_its_result(said, call):
    (text,) = said[f"{call})"]
    assert re.sub(r"\w+\.", "", text) == f'Revealed type is "{RIGHT[call]}"'


@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_call_is_reported(said, call):
    assert any(WRONG[call] in text for text in said[call]), said[call]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_is_called_rightly_and_wrongly(name):
    for calls in (RIGHT, WRONG):
        assert any(call.startswith(f"ckptool.{name}(") for call in calls)


@pytest.mark.parametrize("name", [*FUNCTIONS, *METHODS])
def test_a_public_signature_names_its_arguments(name):
    found = ckptool
    for part in name.split("."):
        found = getattr(found, part)
    for parameter in inspect.signature(found).parameters.values():
        assert parameter.kind is not parameter.VAR_KEYWORD or parameter.annotation == "object"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_help_of_a_public_function_begins_with_a_verb_and_has_every_argument(name):
    function = getattr(ckptool, name)
    text = (inspect.getdoc(function) or "").replace("    *", "    ")
    arguments = inspect.signature(function).parameters
    assert text.partition(" ")[0] in VERBS
    assert [one for one in arguments if not re.search(rf"^    {one}: ", text, re.M)] == []
