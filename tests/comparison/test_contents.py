"""How far a comparison has come."""

import random

import pytest
import torch
from safetensors.torch import save_file

import ckptool
from ckptool.core.reading import Meter


def test_bytes_done_never_exceed_what_was_expected_and_end_with_all_of_it():
    seen = []
    meter = Meter(lambda done, total: seen.append((done, total)), 15)
    for nbytes in (4, 9, 9):
        meter.advance(nbytes)
    assert seen == [(4, 15), (13, 15), (15, 15)]
    meter = Meter(lambda done, total: seen.append((done, total)), 15)
    meter.finish()
    assert seen[-1] == (15, 15)


def test_no_progress_is_told_where_nothing_is_to_do():
    seen = []
    Meter(lambda done, total: seen.append((done, total))).finish()
    assert seen == []


@pytest.fixture
def renamed(compare):
    """Old and new names of what is found under another one, between two dicts of tensors."""
    return lambda a, b, **options: {
        row.a.name: row.b.name for row in compare(a, b, **options).renamed
    }


def tensors(*names):
    torch.manual_seed(1)
    return {name: torch.randn(3, 2) for name in names}


def test_equal_content_under_another_name_is_a_rename(renamed, tmp_path):
    a = tensors("net.a", "net.b", "net.c")
    b = {"net.a": a["net.a"], "net.x": a["net.c"], "net.y": torch.randn(3, 2)}
    assert renamed(a, b) == {"net.c": "net.x"}
    found = ckptool.diff(tmp_path / "a.pth", tmp_path / "b.pth")
    assert found.counts == {"A": 1, "D": 1, "M": 0, "R": 1, "T": 0}
    assert [side.name for side in found.only_in_a] == ["net.b"]
    assert [side.name for side in found.only_in_b] == ["net.y"]
    assert not found.identical


def test_a_file_that_states_no_checksum_is_read(tmp_path):
    a = tensors("net.a", "net.b")
    torch.save(a, tmp_path / "a.pth")
    save_file({f"{name}.x": value for name, value in a.items()}, tmp_path / "b.safetensors")
    found = ckptool.diff(tmp_path / "a.pth", tmp_path / "b.safetensors")
    assert {row.a.name: row.b.name for row in found.renamed} == {
        "net.a": "net.a.x",
        "net.b": "net.b.x",
    }
    quick = ckptool.diff(tmp_path / "a.pth", tmp_path / "b.safetensors", quick=True)
    assert not quick.renamed
    assert len(quick.only_in_a) == 2


def test_checksums_alone_do_where_both_state_them(renamed):
    a = tensors("net.a", "net.b")
    assert renamed(a, {"x": a["net.b"]}, quick=True) == {"net.b": "x"}


def test_structure_looks_for_none(renamed):
    a = tensors("a.weight")
    assert renamed(a, {"b.weight": a["a.weight"]}, structure=True) == {}


def test_another_dtype_or_shape_is_no_rename(renamed):
    zeros = torch.zeros(4)
    assert renamed({"a.bias": zeros}, {"b.bias": zeros.half()}) == {}
    assert renamed({"a.bias": zeros}, {"b.bias": zeros.view(2, 2)}) == {}


def test_contents_all_alike_go_by_the_end_of_the_name_then_by_the_order(renamed):
    zeros = torch.zeros(4)
    a = {f"{name}.bias": zeros for name in ("one.norm", "two.norm", "head", "tail")}
    b = {f"{name}.bias": zeros for name in ("x.two.norm", "y.head", "z.one.norm", "other")}
    assert renamed(a, b) == {
        "one.norm.bias": "z.one.norm.bias",
        "two.norm.bias": "x.two.norm.bias",
        "head.bias": "y.head.bias",
        "tail.bias": "other.bias",
    }


def test_several_contents_alike_that_nothing_tells_apart_stay(renamed):
    zeros = torch.zeros(4)
    assert renamed({"a": zeros, "b": zeros}, {"x": zeros, "y": zeros}) == {}
    assert renamed({"a": zeros}, {"x": zeros}) == {"a": "x"}


def test_one_element_says_too_little(renamed):
    one = torch.ones(1)
    assert renamed({"a.scale": one}, {"b.rate": one}) == {}
    assert renamed({"a.scale": one}, {"b.scale": one}) == {"a.scale": "b.scale"}
    nothing = torch.ones(0)
    assert renamed({"a.scale": nothing}, {"b.rate": nothing}) == {}


def test_a_shuffled_model_is_found_name_by_name(renamed):
    names = [f"layers.{layer}.{part}" for layer in range(40) for part in ("w", "b")]
    a = tensors(*names)
    shuffled = list(a)
    random.Random(3).shuffle(shuffled)
    b = {f"model.{name.replace('.', '_')}": a[name] for name in shuffled}
    assert renamed(a, b) == {name: f"model.{name.replace('.', '_')}" for name in names}


def test_layouts_do_not_matter(renamed):
    weight = torch.randn(4, 6)
    assert renamed({"a.w": weight}, {"b.w": weight.t().contiguous().t()}) == {"a.w": "b.w"}
    part = torch.randn(10, 6)
    assert renamed({"a.w": part[3:7]}, {"b.w": part[3:7].clone()}) == {"a.w": "b.w"}


def test_devices_that_differ_are_told(tmp_path):
    weight = torch.randn(3)
    torch.save({"a": weight}, tmp_path / "a.pth")
    torch.save({"b": weight}, tmp_path / "b.pth")
    with ckptool.open(tmp_path / "b.pth") as b:
        (row,) = ckptool.diff(tmp_path / "a.pth", b.remap({"cpu": "cuda:1"})).renamed
    assert row.what == ("device",)
    assert row.to_dict()["a"] == "a"
    assert row.to_dict()["b"] == "b"
