"""What a cast does to elements, counted and told in words."""

import warnings

import torch

import ckptool
from ckptool.loading import plan
from ckptool.loading.plan import loss_of

NAN, INF = float("nan"), float("inf")
LOSSES = [
    ([1, 2.5, 70000, 1e-9, 0.1], "float32", "float16", "1 of 5 overflow, 2 of 5 change"),
    ([65519.0, 65504.0], "float32", "float16", "1 of 2 change"),
    ([1, 2.5, 1e39, NAN, INF], "float64", "float32", "1 of 5 overflow"),
    ([1.0, 500.0, 0.3], "float32", "float8_e4m3fn", "1 of 3 overflow, 1 of 3 change"),
    ([1.5, 2, 3e10, NAN, -1], "float32", "int32", "3 of 5 change"),
    ([-0.5, -1.5], "float32", "uint8", "2 of 2 change"),
    ([1, 2**24 + 1, 2**40], "int64", "float32", "1 of 3 change"),
    ([1, 2**40], "int64", "int32", "1 of 2 change"),
    ([0, 1, 2], "int64", "bool", "1 of 3 change"),
    ([0.0, 1.0, 0.5], "float32", "bool", "1 of 3 change"),
    ([70000, 3], "int32", "float16", "1 of 2 change"),
    ([1 + 2j, 3], "complex64", "float32", "1 of 2 change"),
    ([1 + 1e-20j, 3e39], "complex128", "complex64", "2 of 2 change"),
    ([3.7], "float32", "int8", "1 of 1 change"),
    ([-1, 1], "int8", "uint8", "1 of 2 change"),
    ([200, 1], "uint8", "int8", "1 of 2 change"),
    ([40000, 1], "uint16", "int16", "1 of 2 change"),
    ([-3, 1], "int16", "uint32", "1 of 2 change"),
    ([2**32 - 1, 1], "uint32", "int32", "1 of 2 change"),
    ([17, 16], "int32", "float8_e4m3fn", "1 of 2 change"),
    ([-(2**31), 1], "int32", "float16", "1 of 2 change"),
    ([-(2**31), 1], "int32", "float8_e5m2", "1 of 2 change"),
    ([-(2**31), -(2**15), 1], "int32", "float8_e4m3fnuz", "2 of 3 change"),
    ([2**63 - 1, 1], "int64", "float64", "1 of 2 change"),
    ([0, 1], "bool", "float8_e8m0fnu", "1 of 2 change"),
]


def test_what_is_lost_is_counted_and_told():
    for values, before, after, words in LOSSES:
        block = torch.tensor(values, dtype=getattr(torch, before))
        assert loss_of(block, after) == words, (values, before, after)


def test_an_infinity_is_no_integer_whatever_is_made_of_it_on_the_way_back():
    block = torch.tensor([-(2**63), 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of a type that it calls experimental
        assert loss_of(block, "complex32") == "1 of 2 change"


KEPT = [
    ([1.0, NAN, -INF, 0.0, -0.0], "float32", "bfloat16"), ([1.0, 2.0, -3.0], "float32", "int64"),
    ([1, 5], "uint64", "int32"), ([0.5, 1.0], "float32", "complex64"),
    ([3, 4], "int8", "complex64"), ([3 + 0j], "complex64", "float16"),
    ([True, False], "bool", "float32"), ([-(2**31), 2**30], "int32", "float32"),
    ([-(2**63), 2**62], "int64", "bfloat16"), ([-128, 64], "int8", "float8_e4m3fn"),
    ([], "float32", "float16"), ([1, 2, 16, -8], "int32", "float8_e4m3fn"),
    ([1, 100], "int8", "uint16"),
]  # fmt: skip


def test_what_is_not_lost_is_not_told():
    for values, before, after in KEPT:
        block = torch.tensor(values, dtype=getattr(torch, before))
        assert loss_of(block, after) == "", (values, before, after)


def test_losses_of_blocks_add_up(monkeypatch):
    monkeypatch.setattr(plan, "CHUNK", 2)
    assert loss_of(torch.tensor([1e9, 1.0, 0.1]), "float16") == "1 of 3 overflow, 1 of 3 change"


def test_what_has_no_elements_here_is_not_known():
    assert loss_of(torch.ones(2, device="meta"), "float16") is None
    assert loss_of(torch.eye(2).to_sparse(), "float16") is None


def test_the_elements_of_a_parameter_are_known_too(tmp_path):
    torch.save({"weight": torch.nn.Parameter(torch.tensor([1.0, 0.1]))}, tmp_path / "f.pth")
    with ckptool.open(tmp_path / "f.pth") as checkpoint:
        assert loss_of(checkpoint["weight"], "float16") == "1 of 2 change"
        assert loss_of(checkpoint["weight"][:1], "float16") == ""
