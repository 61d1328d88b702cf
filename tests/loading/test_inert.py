"""What of an extra state comes out of a file as it was saved."""

import argparse
import io
from collections import Counter, OrderedDict, defaultdict

import pytest
import torch

import ckptool
from ckptool.loading.plan import inert

np = pytest.importorskip("numpy")

MADE = [
    None,
    1.5,
    {"a": [1, (2, "b")]},
    OrderedDict(a=1),
    {1, frozenset({2, frozenset({3})})},
    Counter("aab"),
    defaultdict(list, a=[1]),
    bytearray(b"ab"),
    torch.float16,
    torch.sparse_coo,
    torch.device("cpu"),
    torch.Size([1, 2]),
    torch.ones(2),
    np.float64(2.5),
]
NOT_MADE = [
    (argparse.Namespace(a=1), "an object of argparse.Namespace"),
    ([{"a": (io.BytesIO(b"1"),)}], "an object of _io.BytesIO"),
    (defaultdict(list, a=[argparse.Namespace()]), "an object of argparse.Namespace"),
    ({"a": argparse.Namespace}, "argparse.Namespace"),
    ([np.ones(2)], "a numpy array"),
]


def stored(value, path):
    torch.save({"w": torch.ones(1), "x": value}, path)
    return ckptool.open(path)


def test_what_is_made_is_as_it_was(tmp_path):
    with stored(MADE, tmp_path / "a.pth") as checkpoint:
        assert [inert(value) for value in checkpoint.root["x"]] == [""] * len(MADE)
    for made, value in zip(ckptool.load(tmp_path / "a.pth")["x"], MADE, strict=True):
        assert type(made) is type(value) or isinstance(value, np.float64)
        assert torch.equal(made, value) if isinstance(value, torch.Tensor) else made == value


def test_what_is_not_is_named(tmp_path):
    with stored([value for value, _ in NOT_MADE], tmp_path / "a.pth") as checkpoint:
        for value, (_, said) in zip(checkpoint.root["x"], NOT_MADE, strict=True):
            assert said in inert(value)


def test_what_holds_itself_ends():
    node = [1]
    node.append(node)
    assert inert(node) == ""
