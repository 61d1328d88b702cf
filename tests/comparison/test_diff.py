"""Two checkpoints compared, with torch as the judge."""

import json
import math
import re
from collections import OrderedDict
from itertools import product

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save_file

import ckptool
from ckptool.comparison import contents
from ckptool.comparison.aligning import align
from ckptool.core.model import TensorRef
from ckptool.core.sections import find_model_state_dict
from ckptool.core.tree import walk
from ckptool.errors import NameCollision, NotFound, TorchMissing, UsageError
from ckptool.tensors.comparing import Comparer
from tests.comparison.comparisons import whats
from tests.inspection.handmade import checkpoint, floats, tensor
from tests.sources import PROJECT


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.conv = torch.nn.Conv2d(2, 3, 3)
        self.bn = torch.nn.BatchNorm2d(3)
        self.fc = torch.nn.Linear(3, 4)


def trained(net, **more):
    optimizer = torch.optim.Adam(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"state_dict": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, **more}


class TestFormats:
    """One model in every format is the same."""

    @pytest.fixture(scope="class")
    @classmethod
    def files(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("formats")
        net = Net()
        state = net.state_dict()
        wrapped = OrderedDict((f"module._orig_mod.{name}", value) for name, value in state.items())
        torch.save(state, folder / "zip.pth")
        torch.save({"state_dict": wrapped}, folder / "wrapped.pth")
        torch.save(state, folder / "legacy.pth", _use_new_zipfile_serialization=False)
        torch.save(net, folder / "module.pth")
        torch.jit.script(net.fc).save(folder / "script.pt")
        save_file(dict(state), folder / "flat.safetensors")
        ckptool.convert(
            folder / "zip.pth", folder / "model.safetensors.index.json", max_shard_size=200
        )
        return {
            "zip": folder / "zip.pth",
            "wrapped": folder / "wrapped.pth",
            "legacy": folder / "legacy.pth",
            "module": folder / "module.pth",
            "flat": folder / "flat.safetensors",
            "shards": folder / "model.safetensors.index.json",
        }

    @pytest.mark.parametrize("options", [{}, {"quick": True}, {"structure": True}])
    def test_every_pair(self, files, options):
        for pair in product(files, repeat=2):
            found = ckptool.diff(*(files[name] for name in pair), **options)
            assert found.identical, (pair, whats(found))
            assert found.common >= len(Net().state_dict())
            assert not found.notes, pair


def every_fixture(fixtures):
    for oracle in sorted(fixtures.rglob("*.oracle.json")):
        yield re.sub(r"\.oracle\.json$", "", str(oracle))


def test_every_fixture_is_itself_and_nothing_in_it_is_passed_over(fixtures):
    for name in every_fixture(fixtures):
        with ckptool.open(name) as one, ckptool.open(name) as other:
            for options in ({"strict": True}, {"quick": True}, {"structure": True}):
                found = ckptool.diff(one, other, **options)
                assert found.identical, (name, whats(found))
                assert found.common == found.equal
                assert (found.changed, found.values, found.notes) == ((), (), ()), name
            tensors = {id(leaf) for _, leaf in walk(one.root) if isinstance(leaf, TensorRef)}
            assert tensors <= {id(pair.a.leaf) for pair in align(one, one).pairs}, name


def test_every_fixture_has_the_weights_of_what_it_is_converted_to(fixtures, memory_path):
    target = memory_path / "out.safetensors"
    converted = 0
    for name in every_fixture(fixtures):
        try:
            ckptool.convert(name, target, overwrite=True)
        except ckptool.CheckpointError:
            continue  # it has no weights that the format can hold
        with ckptool.open(name) as source:
            found = ckptool.diff(source, target, key=find_model_state_dict(source).path or None)
        tensors = {what for row in found.changed for what in row.what}
        assert tensors <= {"device", "requires_grad", "kind"}, (name, whats(found))
        assert not found.only_in_b, name
        left = [side.name for side in found.only_in_a if side.sort == "tensor"]
        assert not [name for name in left if "_extra_state" not in name], name
        converted += 1
    assert converted > 150


class TestValues:
    def test_what_differs_has_figures(self, compare):
        a, b = torch.randn(50), torch.randn(50)
        (row,) = compare({"w.x": a, "same": a}, {"w.x": b, "same": a}).changed
        assert (row.name, row.what, row.status) == ("w.x", ("value",), "M")
        difference = (a.double() - b.double()).abs()
        assert row.difference.max_abs == pytest.approx(difference.max().item())
        assert row.difference.mean_abs == pytest.approx(difference.mean().item())
        assert row.difference.mismatched == 50

    @given(st.data())
    def test_a_state_dict_is_equal_where_torch_says_so(self, tmp_path_factory, data):
        numbers = st.sampled_from([0.0, 1.0, -1.5, math.inf, 1e-30])
        rows = st.lists(numbers, min_size=3, max_size=3)
        states = [
            {f"layer.{index}": torch.tensor(data.draw(rows)) for index in range(3)}
            for _ in range(2)
        ]
        folder = tmp_path_factory.mktemp("pair")
        for name, state in zip("ab", states, strict=True):
            torch.save(state, folder / f"{name}.pth")
        found = ckptool.diff(folder / "a.pth", folder / "b.pth")
        unequal = {n for n in states[0] if not torch.equal(states[0][n], states[1][n])}
        assert {row.name for row in found.changed} == unequal
        assert found.identical == (not unequal)
        assert found.counts["M"] == len(unequal)

    def test_the_largest_relative_norm_comes_first_other_types_before(self, compare):
        one = torch.ones(4)
        a = {"l.small": one, "l.big": one, "l.type": one, "l.shape": one, "l.mid": one}
        b = {
            "l.small": one + 0.01,
            "l.big": one * 9,
            "l.type": one.double(),
            "l.shape": torch.ones(2, 2),
            "l.mid": one + 0.5,
        }
        found = compare(a, b)
        assert [row.name for row in found.changed] == [
            "l.shape",
            "l.type",
            "l.big",
            "l.mid",
            "l.small",
        ]
        assert [row.status for row in found.changed] == ["T", "T", "M", "M", "M"]
        assert found.counts == {"A": 0, "D": 0, "M": 3, "R": 0, "T": 2}

    def test_the_order_is_by_weights_then_floats_then_the_relative_norm(self, compare):
        one = torch.ones(2)
        steps = torch.tensor(3)
        a = {
            "optimizer": {"state": {0: {"exp_avg": one}}, "param_groups": [{"params": [0]}]},
            "model": {"l.n": steps, "l.zero": one * 0, "l.some": one, "l.more": one, "l.nan": one},
        }
        b = {
            "optimizer": {"state": {0: {"exp_avg": -one}}, "param_groups": [{"params": [0]}]},
            "model": {
                "l.n": steps * 9,
                "l.zero": one,
                "l.some": one + 0.1,
                "l.more": one + 0.2,
                "l.nan": one * math.nan,
            },
        }
        found = compare(a, b)
        assert [(row.name.rpartition("/")[2], row.is_weight) for row in found.changed] == [
            ("l.nan", True),
            ("l.zero", True),
            ("l.more", True),
            ("l.some", True),
            ("l.n", True),
            ("exp_avg", False),
        ]
        figures = [row["rel_norm"] for row in found.to_dict()["changed"]]
        assert figures == ["nan", "inf", pytest.approx(0.2), pytest.approx(0.1), 8.0, 2.0]

    def test_the_figure_to_sort_by(self, compare):
        a = {"l.a": torch.ones(2), "l.b": torch.full((2,), 10.0), "l.c": torch.tensor([1.0, 0.0])}
        b = {"l.a": torch.ones(2) * 3, "l.b": torch.full((2,), 13.0), "l.c": torch.tensor([0, 0.1])}
        order = {
            "rel_norm": ["l.a", "l.c", "l.b"],
            "max_abs": ["l.b", "l.a", "l.c"],
            "max_rel": ["l.c", "l.a", "l.b"],
            "cosine": ["l.c", "l.b", "l.a"],
        }
        for sort, names in order.items():
            assert [row.name for row in compare(a, b, sort=sort).changed] == names, sort

    def test_the_first_of_many_are_kept(self, compare):
        a = {f"l.{index}": torch.ones(2) for index in range(6)}
        b = {name: value + index for index, (name, value) in enumerate(a.items())}
        found = compare(a, b, max_diffs=2)
        assert [row.name for row in found.changed] == ["l.5", "l.4"]
        assert found.changed_in_all == found.to_dict()["changed_in_all"] == 5
        assert found.counts["M"] == 5
        assert compare(a, b, max_diffs=0).changed == ()

    def test_layouts_are_no_difference(self, compare):
        weight = torch.randn(4, 6)
        a = {"w": weight, "v": weight[:, :2]}
        b = {"w": weight.t().contiguous().t(), "v": weight[:, :2].clone()}
        assert compare(a, b).identical

    def test_another_dtype_is_another_type_and_the_values_are_compared_in_the_wider_one(
        self, compare
    ):
        a = torch.tensor([1.0, 2.0, 0.1])
        rows = compare({"l.a": a, "l.b": a[:2]}, {"l.a": a.half(), "l.b": a[:2].half()}).changed
        assert {row.name: row.what for row in rows} == {
            "l.a": ("dtype", "value"),
            "l.b": ("dtype",),
        }
        assert all(row.status == "T" for row in rows)
        (worst,) = [row.difference for row in rows if row.name == "l.a"]
        assert worst.max_abs == pytest.approx((a.double() - a.half().double()).abs().max().item())

    def test_another_shape_has_no_figures(self, compare):
        (row,) = compare({"l.a": torch.ones(2)}, {"l.a": torch.ones(3)}).changed
        assert (row.what, row.difference) == (("shape",), None)

    def test_ties_are_compared_once(self, compare, monkeypatch):
        shared, other = torch.ones(5), torch.zeros(5)
        calls = []
        real = contents.has_same_content
        monkeypatch.setattr(contents, "has_same_content", lambda *of: calls.append(of) or real(*of))
        found = compare({"l.a": shared, "l.b": shared}, {"l.a": other, "l.b": other})
        assert (len(calls), len(found.changed), found.read) == (1, 2, 2)

    def test_bits_that_make_no_other_value_are_noted(self, compare):
        found = compare({"l.a": torch.tensor([0.0, 1.0])}, {"l.a": torch.tensor([-0.0, 1.0])})
        assert found.identical
        assert "bits" in found.notes[0]

    def test_progress_ends_with_all_of_it(self, compare):
        told = []
        a = {"l.a": torch.ones(1000), "l.b": torch.ones(10), "l.c": torch.ones(9)}
        b = {"l.a": torch.ones(1000), "l.b": torch.zeros(10), "l.x": torch.ones(9)}
        compare(a, b, progress=lambda done, total: told.append((done, total)))
        assert told == sorted(told)
        assert told[-1] == (4076, 4076)


class TestTolerance:
    A, B = torch.tensor([1.0, 100.0, 0.0]), torch.tensor([1.001, 100.1, 1e-9])

    def test_what_is_close_is_equal(self, compare):
        for options, close in [
            ({"rtol": 0.01}, True),
            ({"rtol": 1e-6}, False),
            ({"atol": 0.2, "rtol": 0.0}, True),
            ({"atol": 0.01, "rtol": 0.0}, False),
            ({"atol": 0.0999}, True),  # with torch's own rtol
            ({"atol": 0.0999, "rtol": 0.0}, False),
        ]:
            given = {"rtol": 1e-5, "atol": 1e-8, **options}
            assert torch.allclose(self.A, self.B, **given) == close, options
            found = compare(
                {"l.a": self.A, "l.b": self.A}, {"l.a": self.B, "l.b": self.A}, **options
            )
            assert found.identical == close, options
            assert found.close == int(close), options
            assert found.equal == 1 + int(close), options

    def test_nan_is_equal_where_asked(self, compare):
        a, b = torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0001])
        assert not compare({"l.a": a}, {"l.a": b}, rtol=0.1).identical
        assert compare({"l.a": a}, {"l.a": b}, rtol=0.1, equal_nan=True).identical

    @pytest.mark.parametrize("options", [{}, {"rtol": 0.1}])
    def test_equal_bytes_are_equal_whatever_they_say(self, compare, options):
        nan = {"l.a": torch.tensor([math.nan, 1.0])}
        assert compare(nan, nan, **options).identical


class TestTags:
    @pytest.fixture
    def moved(self, tmp_path):
        torch.save({"l.a": torch.ones(2), "l.b": torch.ones(2)}, tmp_path / "a.pth")
        with ckptool.open(tmp_path / "a.pth") as source:
            source.remap({"*": "cuda:1"}).save(tmp_path / "b.pth")
        return tmp_path / "a.pth", tmp_path / "b.pth"

    def test_devices_are_shown_and_do_not_count(self, moved):
        found = ckptool.diff(*moved)
        assert found.identical
        assert (found.tagged, found.equal, found.counts["M"]) == (2, 2, 0)
        assert whats(found) == {"l.a": ("device",), "l.b": ("device",)}
        assert [(row.a.device, row.b.device) for row in found.changed] == [("cpu", "cuda:1")] * 2
        assert not any(row.counts for row in found.changed)

    def test_devices_count_where_asked(self, moved):
        found = ckptool.diff(*moved, strict=True)
        assert not found.identical
        assert (found.tagged, found.equal, found.counts["M"]) == (0, 0, 2)

    def test_requires_grad_is_one_too(self, compare):
        a, b = torch.ones(2), torch.ones(2, requires_grad=True)
        found = compare({"l.a": a}, {"l.a": b})
        assert found.identical
        assert whats(found) == {"l.a": ("requires_grad",)}
        assert not compare({"l.a": a}, {"l.a": b}, strict=True).identical

    def test_so_are_devices_among_the_values(self, compare):
        a, b = ({"it": torch.device(word), "in": {torch.device(word)}} for word in ("cpu", "cuda"))
        found = compare(a, b)
        assert found.identical
        assert whats(found) == {"it": ("device",), "in": ("device",)}
        tags = {row.name: (row.a.device, row.b.device) for row in found.values}
        assert tags["it"] == ("cpu", "cuda")
        assert not compare(a, b, strict=True).identical

    def test_what_does_not_count_comes_last(self, compare):
        a = {"l.a": torch.ones(2), "l.b": torch.ones(2)}
        b = {"l.a": torch.ones(2, requires_grad=True), "l.b": torch.zeros(2)}
        assert [row.name for row in compare(a, b).changed] == ["l.b", "l.a"]


class TestRest:
    """What is no weight is compared as well."""

    def test_values_with_both_sides(self, compare):
        net = Net()
        a, b = trained(net, lr=0.1, args={"steps": [1, 2]}), trained(net, lr=0.2, new=True)
        b["epoch"] = 4.0
        found = compare(a, b)
        rows = {row.name: row for row in found.values}
        assert rows["lr"].what == ("value",)
        assert (rows["lr"].a.value, rows["lr"].b.value) == (0.1, 0.2)
        assert rows["epoch"].what == ("type",)
        assert rows["epoch"].status == "T"
        assert [side.name for side in found.only_in_a] == ["args/steps/0", "args/steps/1"]
        assert [side.value for side in found.only_in_b] == [True]

    def test_the_state_of_an_optimizer(self, compare):
        a = trained(Net())
        b = trained(Net())
        assert compare(a, b).identical
        b["optimizer"]["state"][0]["exp_avg"] = b["optimizer"]["state"][0]["exp_avg"] + 1
        b["optimizer"]["param_groups"][0]["lr"] = 1.0
        assert whats(compare(a, b)) == {
            "optimizer/state/0/exp_avg": ("value",),
            "optimizer/param_groups/0/lr": ("value",),
        }

    def test_objects(self, compare):
        import argparse

        a, b = ({"args": argparse.Namespace(lr=lr, inner={"x": [1, lr]})} for lr in (1, 2))
        (row,) = compare(a, b).values
        assert (row.what, row.place) == (("value",), "attributes/lr")
        assert row.a.type == "argparse.Namespace"

    def test_a_tensor_in_place_of_a_value(self, compare):
        (row,) = compare({"x": torch.ones(2)}, {"x": 3}).changed
        assert (row.what, row.status) == (("type",), "T")
        assert row.to_dict()["b"]["type"] == "int"

    def test_storages(self, compare):
        one, other = (torch.tensor([1.0, value]).untyped_storage() for value in (1.0, 2.0))
        assert compare({"it": one}, {"it": one}).identical
        assert whats(compare({"it": one}, {"it": other})) == {"it": ("value",)}

    def test_attributes_of_a_module(self, compare):
        a, b = Net(), Net()
        b.eval()
        found = compare(a, b)
        assert [row.what for row in found.values] == [("value",)]
        assert found.values[0].place.endswith("training")

    def test_buffers_that_a_state_dict_leaves_out(self, compare):
        a, b = Net(), Net()
        for net, value in ((a, 1.0), (b, 2.0)):
            net.register_buffer("hidden", torch.full((3,), value), persistent=False)
        assert not compare(a, b).identical
        assert compare(a, a).identical


class TestQuick:
    def test_checksums_are_taken_and_bytes_are_not_read(self, compare, monkeypatch):
        a = {"l.a": torch.ones(9), "l.b": torch.ones(9), "n": 1}
        b = {"l.a": torch.ones(9), "l.b": torch.zeros(9), "n": 1}

        def read(*arguments):
            pytest.fail("read")

        monkeypatch.setattr(contents, "has_same_content", read)
        found = compare(a, b, quick=True)
        assert (found.by_checksum, found.read) == (2, 0)
        (row,) = found.changed
        assert (row.name, row.what, row.difference) == ("l.b", ("value",), None)

    def test_what_states_none_is_read_without_figures(self, tmp_path):
        a = {"l.a": torch.ones(9), "l.b": torch.ones(9)}
        torch.save(a, tmp_path / "a.pth")
        save_file({**a, "l.b": torch.zeros(9)}, tmp_path / "b.safetensors")
        found = ckptool.diff(tmp_path / "a.pth", tmp_path / "b.safetensors", quick=True)
        assert (found.by_checksum, found.read) == (0, 2)
        assert [(row.what, row.difference) for row in found.changed] == [(("value",), None)]

    def test_values_of_another_dtype_are_not_looked_at(self, compare):
        found = compare({"l.a": torch.ones(2)}, {"l.a": torch.zeros(2).half()}, quick=True)
        assert whats(found) == {"l.a": ("dtype",)}


class TestStructure:
    def test_no_value_is_looked_at(self, compare, monkeypatch):
        monkeypatch.setattr(contents.Contents, "compare", None)
        a, b = trained(Net(), lr=1), trained(Net(), lr=2)
        b["state_dict"]["fc.weight"] += 1
        found = compare(a, b, structure=True)
        assert found.identical
        assert found.structure
        assert (found.read, found.elements) == (0, 0)

    def test_names_types_and_shapes_are(self, compare):
        a = {"l.a": torch.ones(2), "l.b": torch.ones(2), "l.c": torch.ones(2), "n": 1}
        b = {"l.a": torch.ones(3), "l.b": torch.ones(2).half(), "l.d": torch.ones(2), "n": 1.0}
        found = compare(a, b, structure=True)
        assert whats(found) == {"l.a": ("shape",), "l.b": ("dtype",), "n": ("type",)}
        assert found.counts == {"A": 1, "D": 1, "M": 0, "R": 0, "T": 3}


def test_without_torch_there_are_no_figures(compare, monkeypatch):
    def missing(self, a, b, told=None):
        raise TorchMissing("torch is needed and not installed")

    monkeypatch.setattr(Comparer, "compare", missing)
    found = compare({"l.a": torch.ones(2)}, {"l.a": torch.zeros(2)})
    (row,) = found.changed
    assert (row.what, row.difference) == (("value",), None)
    assert "torch is not installed" in found.notes[0]
    for options in ({"atol": 2.0}, {"rtol": 2.0}, {"equal_nan": True}):
        with pytest.raises(TorchMissing):
            compare({"l.a": torch.ones(2)}, {"l.a": torch.zeros(2)}, **options)
    assert compare({"l.a": torch.ones(2)}, {"l.a": torch.ones(2)}, atol=2.0).identical


@pytest.mark.parametrize(
    "options",
    [
        {"structure": True, "quick": True},
        {"structure": True, "rtol": 0.1},
        {"quick": True, "atol": 0.1},
        {"quick": True, "equal_nan": True},
        {"max_diffs": -1},
        {"sort": "name"},
        {"atol": -1.0},
        {"rtol": math.nan},
        {"rename": ["no rule"]},
        {"rename": "a=>b"},
    ],
)
def test_options_that_do_not_fit_are_refused(compare, options):
    with pytest.raises(UsageError):
        compare({"l.a": torch.ones(1)}, {"l.a": torch.ones(1)}, **options)


def test_open_checkpoints_stay_open(tmp_path):
    torch.save({"a.w": torch.ones(2)}, tmp_path / "a.pth")
    with ckptool.open(tmp_path / "a.pth") as opened:
        assert ckptool.diff(opened, tmp_path / "a.pth").identical
        assert opened["a.w"].read()


@pytest.mark.filterwarnings("ignore")
def test_a_storage_is_not_the_call_of_its_class(tmp_path):
    torch.save({"x": torch.ByteStorage(1)}, tmp_path / "a.pth")
    called = b"\x80\x02}X\x01\x00\x00\x00xctorch\nByteStorage\n)Rs."
    (tmp_path / "b.pth").write_bytes(called)
    for pair in (("a.pth", "b.pth"), ("b.pth", "a.pth")):
        assert not ckptool.diff(*(tmp_path / one for one in pair)).identical


def test_errors_name_the_file(tmp_path):
    torch.save({"net._orig_mod.w": torch.ones(1), "net.w": torch.ones(1)}, tmp_path / "a.pth")
    with pytest.raises(NameCollision, match=r"a\.pth"):
        ckptool.diff(tmp_path / "a.pth", tmp_path / "a.pth")
    with pytest.raises(NotFound, match=r"a\.pth"):
        ckptool.diff(tmp_path / "a.pth", tmp_path / "a.pth", strict_names=True, key="nix")


def test_a_view_that_repeats_bytes_without_end_is_refused():
    a, b = (
        checkpoint({"w": tensor(floats(1.0), [1 << 40], stride=[0])}, "pickle") for _ in range(2)
    )
    with pytest.raises(ckptool.CheckpointError, match="repeated bytes"):
        ckptool.diff(a, b)


def test_rules_rename(compare):
    a, b = {"old.w": torch.ones(2)}, {"new.w": torch.zeros(2)}
    assert whats(compare(a, b, rename=["^old=>new"])) == {"old.w": ("value",)}


def test_the_document_has_what_the_contract_says(compare):
    a = {"l.a": torch.tensor([1.0, math.inf]), "l.gone": torch.ones(2), "n": math.nan, "e": 1}
    b = {"l.a": torch.tensor([1.5, math.nan]), "l.new": torch.zeros(3), "n": math.nan, "e": 2}
    document = compare(a, b).to_dict()
    assert document["schema"] == "ckptool.diff/1"
    assert document["identical"] is False
    assert document["only_in_a"] == ["l.gone"]
    assert document["only_in_b"] == ["l.new"]
    (row,) = document["changed"]
    assert (row["name"], row["what"], row["status"]) == ("l.a", ["value"], "M")
    figures = {"max_abs", "max_rel", "mean_abs", "mismatched", "share", "rmse", "cosine"}
    assert figures | {"nan_a", "nan_b", "inf_a", "inf_b", "elements"} <= row.keys()
    (value,) = document["values"]
    assert (value["a"]["value"], value["b"]["value"]) == (1, 2)
    assert json.loads(json.dumps(document, allow_nan=False))


def test_the_example_in_the_documentation_has_every_key(compare):
    text = (PROJECT / "docs" / "json.md").read_text().partition("## `diff`")[2]
    example = json.loads(text.partition("```json")[2].partition("```")[0])
    found = compare(
        {"l.a": torch.ones(2), "epoch": 1}, {"l.a": torch.zeros(2), "epoch": 2}
    ).to_dict()
    assert list(example) == list(found)
    for rows in ("changed", "values"):
        assert list(example[rows][0]) == list(found[rows][0])
        for side in ("a", "b"):
            assert list(example[rows][0][side]) == list(found[rows][0][side])


def test_a_diff_is_neither_true_nor_false(compare):
    found = compare({"a": torch.ones(1)}, {"a": torch.ones(1)})
    with pytest.raises(TypeError, match=r"\.identical"):
        bool(found)


class TestTypesIgnored:
    """A copy in a narrower type is exact if its values are the rounded ones."""

    @pytest.fixture
    def files(self, tmp_path):
        torch.manual_seed(0)
        wide = {"w": torch.randn(300), "big": torch.tensor([1e9, 1.0]), "n": torch.tensor([1, 2])}
        wide["view"] = torch.randn(4, 6).t()

        def write(change):
            torch.save(wide, tmp_path / "wide.pth")
            narrow = {name: change(tensor) for name, tensor in wide.items()}
            torch.save(narrow, tmp_path / "narrow.pth")
            return tmp_path / "wide.pth", tmp_path / "narrow.pth"

        return write

    @pytest.mark.parametrize(
        "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2]
    )
    def test_a_faithful_copy_is_identical(self, files, dtype):
        one, other = files(lambda x: x.to(dtype) if x.is_floating_point() else x)
        for pair in ((one, other), (other, one)):
            assert not ckptool.diff(*pair).identical
            found = ckptool.diff(*pair, ignore_dtype=True)
            assert found.identical, str(found)
            assert "3 tensors compared regardless of dtype" in found.notes

    def test_one_value_that_is_not_the_rounded_one_is_found(self, files):
        def change(tensor):
            made = tensor.half() if tensor.is_floating_point() else tensor
            if len(made) == 300:
                made[7] = torch.nextafter(made[7], torch.tensor(9.0).half())
            return made

        found = ckptool.diff(*files(change), ignore_dtype=True)
        assert [(row.name, row.what) for row in found.changed] == [("w", ("value",))]
        assert found.changed[0].difference.mismatched == 1

    def test_types_of_which_neither_holds_the_other_must_have_equal_values(self, tmp_path):
        for name, dtype in (("a", torch.float16), ("b", torch.bfloat16)):
            tensors = {"same": torch.tensor([0.5, 2.0]), "odd": torch.tensor([1.001])}
            torch.save({k: v.to(dtype) for k, v in tensors.items()}, tmp_path / f"{name}.pth")
        found = ckptool.diff(tmp_path / "a.pth", tmp_path / "b.pth", ignore_dtype=True)
        assert [row.name for row in found.changed] == ["odd"]

    def test_integers_and_shapes_count_as_before(self, files):
        found = ckptool.diff(*files(lambda x: x.to(torch.int32)[:2]), ignore_dtype=True)
        assert {row.name for row in found.changed} == {"w", "view"}

    def test_it_needs_values(self, files):
        with pytest.raises(UsageError, match="need values"):
            ckptool.diff(*files(lambda x: x), ignore_dtype=True, structure=True)
