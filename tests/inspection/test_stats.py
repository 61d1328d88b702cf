"""Figures of whole files: rows, totals, ties, flags, families."""

import json
import math

import pytest
import torch

import ckptool
from ckptool.errors import AmbiguousName, LimitExceeded, NotFound, UsageError
from ckptool.inspection.stats import stats
from ckptool.limits import Limits
from tests.sources import PROJECT
from tests.tensors import samples

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


@pytest.fixture
def model(fixtures):
    return fixtures / "torch-2.13.0/dp_full_cuda3.pth"


def saved(tmp_path, tree):
    path = tmp_path / "made.pth"
    torch.save(tree, path)
    return path


def measured(tmp_path, tree, **options):
    with ckptool.open(saved(tmp_path, tree)) as checkpoint:
        return stats(checkpoint, **options)


def flags(found):
    return {row.name: row.flags for row in found.tensors}


def layers(count, make, name="layers.{}.mlp.weight"):
    torch.manual_seed(0)
    return {name.format(at): make(at) for at in range(count)}


def test_every_fixture_is_measured_or_says_why_not(fixtures):
    seen = 0
    for oracle in sorted(fixtures.rglob("*.oracle.json")):
        file = oracle.with_name(oracle.name.removesuffix(".oracle.json"))
        try:
            checkpoint = ckptool.open(file)
        except ckptool.CheckpointError:
            continue
        with checkpoint:
            found = stats(checkpoint)
        seen += len(found.tensors)
        assert all((row.measures is None) != (row.reason is None) for row in found.tensors)
    assert seen > 500


def test_rows_are_those_of_the_list_in_its_order(model):
    found = ckptool.stats(model)
    assert [row.row for row in found.tensors] == list(ckptool.list_tensors(model).tensors)
    assert found.format == "torch-zip"


def test_figures_are_torchs(model):
    truth = torch.load(model, map_location="cpu", weights_only=False)["state_dict"]
    for row in ckptool.stats(model, key="state_dict").tensors:
        made = truth[row.row.path[-1]].double()
        assert row.measures.mean == pytest.approx(float(made.mean()), abs=1e-12)
        assert row.measures.std == pytest.approx(float(made.std(correction=0)), abs=1e-12)


def test_a_path_or_an_open_checkpoint(model):
    with ckptool.open(model) as checkpoint:
        assert ckptool.stats(checkpoint) == ckptool.stats(model)


def test_globs_choose(tmp_path):
    tree = {"a": {"x.weight": torch.ones(2), "x.bias": torch.ones(2)}, "b": torch.ones(2)}
    found = measured(tmp_path, tree, include=["*.weight", "a/*"], exclude=["x.b*"])
    assert [row.name for row in found.tensors] == ["a/x.weight"]
    assert found.totals.elements == 2


def test_a_glob_alone_is_no_list_of_globs(tmp_path):
    with pytest.raises(UsageError, match="expected a list of globs"):
        measured(tmp_path, {"w": torch.ones(2)}, include="*.weight")


def test_a_key_is_a_section_or_a_tensor(tmp_path):
    tree = {"ema": {"w": torch.zeros(3)}, "model": {"w": torch.ones(4), "epochs": 3}}
    assert [row.name for row in measured(tmp_path, tree, key="ema").tensors] == ["ema/w"]
    assert [row.name for row in measured(tmp_path, tree, key="model/w").tensors] == ["model/w"]
    with pytest.raises(NotFound, match="no tensor to measure under 'model/epochs'"):
        measured(tmp_path, tree, key="model/epochs")
    with pytest.raises(AmbiguousName):
        measured(tmp_path, tree, key="w")
    with pytest.raises(NotFound):
        measured(tmp_path, tree, key="nothing")


def test_ties_are_read_once_and_count_once(tmp_path):
    weight = torch.arange(6.0)
    told = []
    found = measured(
        tmp_path,
        {"a": weight, "b": weight, "c": weight[:3]},
        progress=lambda done, of: told.append((done, of)),
    )
    assert [row.tie for row in found.tensors] == [None, "a", None]
    assert found.tensors[0].measures == found.tensors[1].measures
    assert (found.totals.tensors, found.totals.elements) == (2, 9)
    assert told[-1] == (36, 36)


def test_totals(tmp_path):
    tree = {
        "a": torch.tensor([3.0, 0.0, math.nan]),
        "b": torch.tensor([4.0, math.inf]),
        "c": torch.tensor([-5, 7]),
        "s": torch.eye(3).to_sparse(),
    }
    totals = measured(tmp_path, tree).totals
    assert (totals.tensors, totals.elements) == (3, 7)
    assert (totals.zeros, totals.nan, totals.infinite) == (1, 1, 1)
    assert totals.norm == pytest.approx(math.sqrt(9 + 16 + 25 + 49))
    ranges = {one.dtype: (one.minimum, one.maximum) for one in totals.dtypes}
    assert ranges == {"float32": (0.0, 4.0), "int64": (-5, 7)}


def test_nothing_to_measure(tmp_path):
    found = measured(tmp_path, {"epoch": 3})
    assert found.tensors == ()
    assert (found.totals.tensors, found.totals.norm) == (0, 0.0)


@pytest.mark.parametrize("make", ["quantized", "sparse", "nested", "meta"])
def test_what_is_no_plain_array_has_a_row_and_the_reason(make, tmp_path):
    found = measured(tmp_path, samples.SAMPLES[make]())
    assert found.tensors
    assert all(row.measures is None and row.reason for row in found.tensors)


def test_own_flags(tmp_path):
    tree = {
        "zero": torch.zeros(3), "ones": torch.ones(3), "scalar": torch.tensor(0),
        "one": torch.ones(1), "empty": torch.zeros(0), "nan": torch.tensor([1.0, math.nan]),
        "minus": torch.tensor([0.0, -0.0]), "inf": torch.tensor([math.inf, math.inf]),
        "fine": torch.arange(3), "no": torch.zeros(2) > 0,
    }  # fmt: skip
    assert flags(measured(tmp_path, tree)) == {
        "zero": ("all-zero",), "ones": ("constant",), "scalar": (), "one": (), "empty": (),
        "nan": ("nan",), "minus": ("all-zero",), "inf": ("inf",), "fine": (), "no": ("all-zero",),
    }  # fmt: skip


def test_one_type_among_others_of_its_role(tmp_path):
    tree = layers(6, lambda at: torch.randn(4, 4).to(torch.float32 if at == 3 else torch.bfloat16))
    found = measured(tmp_path, tree)
    odd = [row for row in found.tensors if row.flags]
    assert [(row.name, row.flags) for row in odd] == [("layers.3.mlp.weight", ("dtype-outlier",))]
    assert odd[0].remarks == ("float32, but 5 of layers.{0..5}.mlp.weight are bfloat16",)


def test_another_shape_or_device(tmp_path):
    tree = layers(4, lambda at: torch.randn(4, 5 if at == 1 else 4))
    assert flags(measured(tmp_path, tree))["layers.1.mlp.weight"] == ("shape-outlier",)
    with ckptool.open(saved(tmp_path, layers(4, lambda at: torch.randn(3)))) as checkpoint:
        path = tmp_path / "moved.pth"
        checkpoint.save(path)
    state = torch.load(path)
    state["layers.2.mlp.weight"] = torch.empty(3, device="meta")
    assert flags(measured(tmp_path, state))["layers.2.mlp.weight"] == ("device-outlier",)


def test_a_norm_or_deviation_far_off_the_others(tmp_path):
    def make(at):
        return torch.randn(50) * (0.001 if at == 2 else 40 if at == 4 else 1)

    found = measured(tmp_path, layers(7, make))
    odd = {name: own for name, own in flags(found).items() if own}
    both = ("norm-outlier", "std-outlier")
    assert odd == {"layers.2.mlp.weight": both, "layers.4.mlp.weight": both}
    assert (
        "norm 277.2, median 7.619 and std 39.08, median 1.076 (7 tensors of"
        in found.tensors[4].remarks[0]
    )


def test_a_shifted_tensor_is_odd_by_its_norm_alone(tmp_path):
    found = measured(tmp_path, layers(5, lambda at: torch.randn(50) + (100 if at == 1 else 0)))
    assert flags(found)["layers.1.mlp.weight"] == ("norm-outlier",)


def test_zeros_are_told_of_once_and_what_differs_from_zeros_is_odd(tmp_path):
    zeros = measured(tmp_path, layers(4, lambda at: torch.randn(9) * (at != 1)))
    assert flags(zeros)["layers.1.mlp.weight"] == ("all-zero",)
    trained = measured(tmp_path, layers(4, lambda at: torch.ones(9) * (at == 1)))
    assert flags(trained)["layers.1.mlp.weight"] == ("constant", "norm-outlier")


def test_no_majority_no_outlier(tmp_path):
    half = layers(4, lambda at: torch.randn(3).to(torch.float16 if at % 2 else torch.float32))
    assert set(flags(measured(tmp_path, half)).values()) == {()}
    two = layers(2, lambda at: torch.randn(3).to(torch.float16 if at else torch.float32))
    assert set(flags(measured(tmp_path, two)).values()) == {()}


def test_roles_are_told_apart_by_name_and_dimensions(tmp_path):
    def make(at):
        return torch.ones(4, dtype=torch.float32) if at == 1 else torch.ones(2, 2).bfloat16()

    mixed = measured(tmp_path, layers(4, make, name="features.{}.weight"))
    assert not any("dtype-outlier" in row.flags for row in mixed.tensors)


def test_optimizer_state_has_no_roles(tmp_path):
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][4]["exp_avg"] *= 1e6
    state["state"][2]["exp_avg"] = state["state"][2]["exp_avg"].half()
    found = measured(tmp_path, {"optimizer": state})
    assert not any("outlier" in flag for row in found.tensors for flag in row.flags)


def test_repeated_bytes_have_a_limit(tmp_path):
    tree = {"w": torch.as_strided(torch.ones(2000), (1000, 1000), (1, 1))}
    with (
        ckptool.open(saved(tmp_path, tree)) as checkpoint,
        pytest.raises(LimitExceeded, match="repeated bytes"),
    ):
        stats(checkpoint, limits=Limits(max_repeated_bytes=1000))


def test_a_stride_of_zero_is_no_repetition(tmp_path):
    found = measured(tmp_path, {"w": torch.ones(1).expand(1 << 50)}, limits=Limits())
    assert found.tensors[0].measures.elements == 1 << 50


def test_sorting(tmp_path):
    tree = {
        "b": torch.tensor([1.0, 9.0]), "a": torch.tensor([0.0, 2.0, 4.0]), "none": torch.zeros(0),
        "s": torch.eye(2).to_sparse(), "nan": torch.tensor([math.nan, 5.0, 5.0, 5.0]),
    }  # fmt: skip
    found = measured(tmp_path, tree)
    order = {
        column: [row.name for row in found.sorted_by(column).tensors]
        for column in ("name", "max", "zeros", "nan", "elements", "flags")
    }
    assert order["name"] == ["a", "b", "nan", "none", "s"]
    assert order["max"] == ["b", "nan", "a", "none", "s"]
    assert order["zeros"][0] == "a"
    assert order["nan"][0] == order["flags"][0] == "nan"
    assert order["elements"] == ["s", "nan", "a", "b", "none"]
    with pytest.raises(UsageError, match="cannot sort by 'color'"):
        found.sorted_by("color")


def test_folded_figures_are_those_of_all_elements(tmp_path):
    tree = layers(5, lambda at: torch.randn(30) + at)
    tree["layers.3.mlp.weight"][7] = math.nan
    tree["head"] = torch.ones(2)
    found = measured(tmp_path, tree).folded()
    one, head = found.tensors
    assert (one.name, one.count, head.name, head.count) == (
        "layers.{0..4}.mlp.weight",
        5,
        "head",
        1,
    )
    every = torch.cat([tree[f"layers.{at}.mlp.weight"] for at in range(5)]).double()
    finite = every[every.isfinite()]
    made = one.measures
    assert (made.elements, made.nan, one.row.numel, one.row.nbytes) == (150, 1, 150, 600)
    assert (made.minimum, made.maximum) == (finite.min().item(), finite.max().item())
    figures = finite.mean(), finite.std(correction=0), finite.norm()
    assert (made.mean, made.std, made.norm) == pytest.approx(tuple(map(float, figures)), rel=1e-9)
    assert sum(made.histogram.counts) == 149
    assert one.flags == ("nan",)


def test_folded_layers_that_are_odd_by_themselves_are_named(tmp_path):
    tree = layers(20, lambda at: torch.zeros(3) if at % 2 else torch.tensor([1.0, math.inf, at]))
    (one,) = measured(tmp_path, tree).folded().tensors
    assert (one.flag_counts["inf"], one.flag_counts["all-zero"]) == (10, 10)
    assert one.to_dict()["flag_counts"] == one.flag_counts
    assert "layers.2.mlp.weight: 1 of 3 elements is infinite" in one.remarks
    assert "layers.3.mlp.weight: all zero" in one.remarks
    assert "layers.{0..19}.mlp.weight: 2 more have the flag inf" in one.remarks
    assert sum(remark.endswith((" infinite", "all zero")) for remark in one.remarks) == 2 * 8


def test_of_folded_layers_that_are_all_alike_none_is_named(tmp_path):
    tree = layers(5, lambda at: torch.full((3,), 2.0))
    (one,) = measured(tmp_path, tree).folded().tensors
    assert (one.flag_counts, one.remarks) == ({"constant": 5}, ())
    tree["layers.3.mlp.weight"] = torch.arange(3.0)
    (one,) = measured(tmp_path, tree).folded().tensors
    assert one.flag_counts["constant"] == 4
    assert "layers.0.mlp.weight: constant, 2" in one.remarks


def test_only_what_is_alike_is_folded(tmp_path):
    tree = layers(6, lambda at: torch.randn(3, dtype=torch.float64 if at == 5 else torch.float32))
    names = [row.name for row in measured(tmp_path, tree).folded().tensors]
    assert names == ["layers.{0..4}.mlp.weight", "layers.5.mlp.weight"]


def test_folding_extremes(tmp_path):
    def make(at):
        ends = [1.5e308, -1.5e308] if at else [math.nan, math.inf]
        return torch.tensor(ends, dtype=torch.float64)

    one = measured(tmp_path, layers(3, make)).folded().tensors[0].measures
    assert (one.minimum, one.maximum, one.nan, one.infinite) == (-1.5e308, 1.5e308, 1, 1)
    assert sum(one.histogram.counts) == 4
    assert (one.histogram.counts[0], one.histogram.counts[-1]) == (2, 2)


def test_the_document(tmp_path):
    tree = {"a": torch.tensor([1.0, math.nan]), "b": torch.tensor([math.inf]), "e": torch.zeros(0)}
    document = measured(tmp_path, tree, bins=2).to_dict()
    assert document["schema"] == "ckptool.stats/1"
    assert document["tensors"][0] == {
        "path": ("a",), "name": "a", "dtype": "float32", "shape": (2,), "device": "cpu",
        "nbytes": 8, "kind": "strided", "elements": 2,
        "min": 1.0, "max": 1.0, "mean": 1.0, "std": 0.0, "zeros": 0, "nan": 1,
        "infinite": 0, "norm": 1.0,
        "histogram": {"low": 1.0, "high": 1.0, "counts": [0, 1]}, "reason": None, "tie": None,
        "count": 1, "flags": ("nan",), "flag_counts": {"nan": 1}, "remarks": (),
    }  # fmt: skip
    assert document["tensors"][1]["min"] is None
    assert document["totals"]["dtypes"][0] == {
        "dtype": "float32", "tensors": 3, "elements": 3, "min": 1.0, "max": 1.0
    }  # fmt: skip


def test_a_norm_beyond_float64_is_a_string(tmp_path):
    tree = {"a": torch.tensor([1.7e308, 1.7e308], dtype=torch.float64)}
    assert measured(tmp_path, tree).to_dict()["totals"]["norm"] == "inf"


def test_the_documented_example(tmp_path):
    text = (PROJECT / "docs" / "json.md").read_text().partition("## `stats`")[2]
    example = json.loads(text.partition("```json")[2].partition("```")[0])
    values = torch.tensor([[-1.5, -1.5, 0.0, 0.5], [0.5, 0.5, 1.0, 2.5]])
    found = measured(tmp_path, {"layers.3.mlp.weight": values}, bins=4).to_dict()
    made = json.loads(json.dumps(found))
    assert list(made) == list(example)
    assert made["totals"] == example["totals"]
    (shown,), (row,) = example["tensors"], made["tensors"]
    assert list(row) == list(shown)
    assert row == {**shown, "flags": [], "flag_counts": {}, "remarks": []}
