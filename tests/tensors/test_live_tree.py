"""What is not plain data is refused before anything is written, with its place and what helps."""

import argparse
import collections
import dataclasses
import datetime
import enum
import pathlib
import random
import re

import numpy
import pytest
import torch

from ckptool import save
from ckptool.errors import NotRepresentable


class Colour(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Settings:
    lr: float = 0.1


class Text(str):
    """Of a class of its own."""


class Bare:
    __slots__ = ()


Pair = collections.namedtuple("Pair", "a b")

REFUSED = {
    "namespace": (argparse.Namespace(a=1), "argparse.Namespace", "vars(args)"),
    "dataclass": (Settings(), "Settings", "dataclasses.asdict(args)"),
    "named tuple": (Pair(1, 2), "Pair", "args._asdict()"),
    "enumeration": (Colour.RED, "Colour", "args.value"),
    "path": (pathlib.PurePosixPath("a"), "PurePosixPath", "str(args)"),
    "date": (datetime.date(2024, 1, 1), "datetime.date", "str(args)"),
    "array": (numpy.zeros(2), "numpy.ndarray", "args.tolist()"),
    "frozen set": (frozenset(), "frozenset", "list(args)"),
    "default dict": (collections.defaultdict(int), "collections.defaultdict", "dict(args)"),
    "deque": (collections.deque(), "collections.deque", "list(args)"),
    "range": (range(3), "range", "list(args)"),
    "bytes that change": (bytearray(b"a"), "bytearray", "list(args)"),
    "text of another class": (Text("a"), "Text", "str(args)"),
    "function": (len, "builtin_function_or_method", "repr(args)"),
    "function without a name": (lambda: 1, "function", "repr(args)"),
    "class": (Settings, "type", "vars(args)"),
    "generator of numbers": (torch.Generator(), "torch._C.Generator", "args.get_state()"),
    "anything": (Bare(), "Bare", "repr(args)"),
    "huge number": (1 << 3000, "int of 3,001 bits", "str(args)"),
}


def test_the_place_the_class_and_what_helps_are_told(tmp_path):
    path = tmp_path / "new" / "f.pth"
    for kind, (value, name, remedy) in REFUSED.items():
        with pytest.raises(NotRepresentable, match=re.escape(name)) as caught:
            save(path, epoch=1, config={"args": value})
        assert str(caught.value).startswith(f"{path}: config/args: "), kind
        assert caught.value.hint == f"save {remedy} in its place", kind
        assert not path.parent.exists(), kind


def test_what_helps_names_the_object(tmp_path):
    for value, name in [
        ({"a": numpy.zeros(2)}, "a.tolist()"),
        (("MT19937", numpy.zeros(2)), "value.tolist()"),
        ({"a b": len}, "repr(value)"),
    ]:
        with pytest.raises(NotRepresentable) as caught:
            save(tmp_path / "f.pth", v=value)
        assert caught.value.hint == f"save {name} in its place", value


def test_a_place_is_an_address(tmp_path):
    for value, place in [
        ([0, {"a b": object()}], "config/1/a b: object"),
        ({"a.b": (object(),)}, "config/a.b/0: object"),
        ({3: object()}, "config/3: object"),
        ({"a\x1b[2J": object()}, r"config/a\x1b[2J: object"),
        ({Colour.RED: 1}, "Colour"),
        ({torch.ones(1): 1}, "is a key, and no plain one"),
        ({object()}, "object"),
    ]:
        with pytest.raises(NotRepresentable) as caught:
            save(tmp_path / "f.pth", config=value)
        assert place in str(caught.value), value


def test_an_extra_state_is_saved_where_it_is_plain(tmp_path):
    class Extra(torch.nn.Linear):
        def __init__(self, state):
            super().__init__(1, 1)
            self.state = state

        def get_extra_state(self):
            return self.state

        def set_extra_state(self, state):
            self.state = state

    save(tmp_path / "f.pth", model=torch.nn.DataParallel(Extra({"scale": [1, torch.ones(1)]})))
    fresh = Extra(None)
    fresh.load_state_dict(torch.load(tmp_path / "f.pth", weights_only=True)["state_dict"])
    assert fresh.state == {"scale": [1, torch.ones(1)]}
    with pytest.raises(NotRepresentable, match="state_dict/_extra_state: object is not plain"):
        save(tmp_path / "g.pth", model=Extra(object()))


def test_what_a_scheduler_keeps_is_looked_at_too(tmp_path):
    class Scale:
        def __init__(self):
            self.made_by = argparse.Namespace()

        def __call__(self, epoch):
            return 1.0

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, Scale())
    with pytest.raises(NotRepresentable, match=r"scheduler/lr_lambdas/0/made_by: argparse"):
        save(tmp_path / "f.pth", scheduler=scheduler)


def test_circles_and_depths_that_no_pickle_has_are_refused(tmp_path):
    inner = []
    circle = (inner,)
    inner.append(circle)
    with pytest.raises(NotRepresentable, match="tuple holds itself"):
        save(tmp_path / "f.pth", value=circle)
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(NotRepresentable, match="nested deeper"):
        save(tmp_path / "f.pth", value=deep)
    while deep:  # bit by bit: Python's own way to free it is as deep
        deep = deep.pop()


FOLLOWED = {
    "masked": numpy.ma.array([1, 2]),
    "error": KeyError("x"),
    "generator": numpy.random.default_rng(0),
    "bits": numpy.random.PCG64(0),
    "seeds": numpy.random.SeedSequence(0),
    "random": random.Random(0),
    "torch": torch.Generator(),
    "dtype": numpy.dtype("f4"),
    "object": object(),
    "range": range(3),
}


def test_what_is_told_to_help_is_taken(tmp_path):
    for kind, value in FOLLOWED.items():
        with pytest.raises(NotRepresentable) as caught:
            save(tmp_path / f"{kind}.pth", v=value)
        told = caught.value.hint.removeprefix("save ").removesuffix(" in its place")
        save(tmp_path / f"{kind}.pth", v=eval(told, {"v": value}))
