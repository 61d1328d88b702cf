"""`ckptool stats` as text."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, strategies as st

import ckptool
from ckptool.inspection.stats import stats
from ckptool.render.figures import ASCII, BLOCKS, choose_ramp, draw_histogram, stats_lines
from ckptool.render.text import PLAIN, Look


@pytest.fixture
def drawn(tmp_path):
    def draw(tree, look=PLAIN, *, fold=False, **options):
        path = tmp_path / "made.pth"
        torch.save(tree, path)
        with ckptool.open(path) as checkpoint:
            found = stats(checkpoint, **options)
        return list(stats_lines(found.folded() if fold else found, look))

    return draw


def test_bars():
    assert draw_histogram([0, 1, 4, 8]) == " ▁▄█"
    assert draw_histogram([0, 1, 4, 8], ASCII) == " :+@"
    assert draw_histogram([]) == ""
    assert draw_histogram([0, 0]) == "  "


@given(st.lists(st.integers(0, 1 << 70), max_size=30), st.sampled_from([BLOCKS, ASCII]))
def test_bars_are_as_long_as_the_bins_and_in_their_order(counts, ramp):
    heights = [ramp.index(mark) for mark in draw_histogram(counts, ramp)]
    assert len(heights) == len(counts)
    for one, height in zip(counts, heights, strict=True):
        assert (height == 0) == (one == 0)
        assert height < len(ramp) - 1 or one > 0
        assert all(
            height <= other for count, other in zip(counts, heights, strict=True) if count > one
        )
    assert not any(counts) or max(heights) == len(ramp) - 1


def test_blocks_where_the_encoding_has_them():
    assert choose_ramp("utf-8") == BLOCKS
    for encoding in ("ascii", "latin-1", None, "cp437", "no-such"):
        assert choose_ramp(encoding) == ASCII, encoding


def test_a_row_a_tensor_and_totals(drawn):
    tree = {"w": torch.tensor([0.0, 1.0, 2.0, 3.0]), "n": torch.tensor([1, 5])}
    assert drawn(tree, bins=4) == [
        "name  dtype    elements  min  max  mean    std  zeros   norm  histogram",
        "w     float32         4    0    3   1.5  1.118  25.0%  3.742  ████",
        "n     int64           2    1    5     3      2      0  5.099  █  █",
        "",
        "2 tensors, 6 elements, 16.7% zeros, norm 6.325",
        "float32: 1 tensor, 4 elements, from 0 to 3",
        "int64: 1 tensor, 2 elements, from 1 to 5",
    ]


def test_columns_of_what_is_odd_only_where_something_is(drawn):
    lines = drawn({"w": torch.tensor([1.0, math.nan, math.inf, math.inf])})
    assert lines[0].split() == [
        "name", "dtype", "elements", "min", "max", "mean", "std", "zeros", "nan", "inf", "norm",
        "histogram", "flags",
    ]  # fmt: skip
    assert lines[1].endswith("nan inf")
    assert "1 tensor, 4 elements, 0 zeros, 1 NaN, 2 infinite, norm 1" in lines


def test_reasons_and_remarks_in_words(drawn):
    tree = {f"layers.{at}.w": torch.randn(9) * (1000 if at == 2 else 1) for at in range(5)}
    tree |= {"s": torch.eye(3).to_sparse(), "s2": torch.eye(3).to_sparse(), "e": torch.zeros(0)}
    text = "\n".join(drawn(tree))
    assert "layers.2.w: norm " in text
    assert "no statistics for s, s2: sparse_coo: not a plain array of elements" in text


def test_many_remarks_end_with_how_many_more(drawn):
    tree = {f"a.{n}.layers.{at}.w": torch.ones(2, dtype=torch.float16 if at == n else torch.float32)
            for n in range(30) for at in range(30)}  # fmt: skip
    lines = drawn(tree)
    assert "and 10 more (--json lists all)" in lines


def test_ties_are_marked(drawn):
    weight = torch.arange(3.0)
    lines = drawn({"a": weight, "b": weight})
    assert [line.endswith("tied") for line in lines[1:3]] == [False, True]
    assert "1 tensor, 3 elements, 33.3% zeros, norm 2.236" in lines


def test_folded_layers_are_one_row(drawn):
    tree = {f"layers.{at}.w": torch.arange(4.0) + at for at in range(3)}
    lines = drawn(tree, fold=True)
    assert lines[1].split()[:5] == ["layers.{0..2}.w", "float32", "12", "0", "5"]


def test_rows_fit_the_terminal_and_the_histogram_goes_first(drawn):
    tree = {f"encoder.layers.{at}.attention.weight": torch.randn(9) / 1000 for at in range(3)}
    for width in range(40, 200, 8):
        lines = drawn(tree, Look(width=width))
        assert max(map(len, lines)) <= width, width
        shown = lines[0].split()
        assert shown[0] == "name", width
        assert width < 70 or {"min", "max", "std"} <= set(shown), width
        if "histogram" in shown:
            assert {"elements", "dtype", "norm"} <= set(shown), width


def test_flags_and_remarks_fit_the_terminal(drawn):
    for width, fold in product([40, 60, 80, 100], [False, True]):
        tree = {f"model.layers.{at}.mlp.up_proj.weight": torch.randn(9) for at in range(12)}
        tree["model.layers.4.mlp.up_proj.weight"] *= 1000
        tree["model.layers.7.mlp.up_proj.weight"] = torch.randn(9).half()
        lines = drawn(tree, Look(width=width), fold=fold)
        assert max(map(len, lines)) <= width, (width, fold)
        text = "\n".join(lines)
        assert "norm!" in text, (width, fold)
        assert "(a wider terminal shows " in text, (width, fold)
        assert "model.layers.4.mlp.up_proj.weight: norm" in text, (width, fold)


def test_flags_of_some_of_the_folded_say_of_how_many(drawn):
    tree = {f"layers.{at}.w": torch.randn(9) for at in range(6)}
    tree["layers.1.w"][0] = tree["layers.4.w"][3] = tree["layers.4.w"][4] = math.nan
    tree |= {f"layers.{at}.b": torch.zeros(3) for at in range(6)}
    lines = drawn(tree, fold=True)
    assert lines[1].endswith("  nan(2)")
    assert lines[2].endswith("  all-zero")
    assert lines[4:6] == [
        "layers.1.w: 1 of 9 elements is NaN",
        "layers.4.w: 2 of 9 elements are NaN",
    ]


def test_a_name_that_is_empty_or_none_at_all(drawn):
    assert drawn(torch.ones(2))[1].startswith("(the whole file)  float32")
    assert drawn({"": torch.ones(2)})[1].startswith("''  ")
    assert "no statistics for '': sparse_coo: not a plain array of elements" in drawn(
        {"": torch.eye(2).to_sparse()}
    )


def test_a_wide_terminal_shortens_nothing(drawn):
    name = "encoder.layers.0.attention.query.weight"
    lines = drawn({name: torch.randn(9)}, Look(width=200))
    assert lines[1].startswith(name)
    assert "histogram" in lines[0]


def test_names_of_the_file_are_made_harmless(drawn):
    name = "evil\x1b[31m\n"
    tree = {name: torch.eye(2).to_sparse(), f"{name}.0.w": torch.ones(2)}
    tree |= {f"{name}.{at}.w": torch.ones(2).half() for at in range(1, 5)}
    text = "".join(drawn(tree))
    assert "\x1b" not in text
    assert "no statistics for evil\\x1b[31m" in text


def test_a_format_has_the_table_alone_and_every_column(drawn):
    lines = drawn({"w": torch.tensor([1.0, 2.0])}, Look(fmt="csv"), bins=2)
    assert lines == [
        "name,dtype,elements,min,max,mean,std,zeros,norm,histogram",
        "w,float32,2,1,2,1.5,0.5,0,2.236,██",
    ]
    assert drawn({}, Look(fmt="csv")) == ["name,dtype,elements,min,max,mean,std,zeros,norm"]


def test_nothing_to_show(drawn):
    assert drawn({"epoch": 3}) == ["0 tensors, 0 elements, norm 0"]


def test_shares_of_zeros_never_round_to_none_or_all(drawn):
    some, most = torch.ones(10_000), torch.zeros(10_000)
    some[0], most[0] = 0, 1
    lines = drawn({"some": some, "most": most, "all": torch.zeros(2)})
    assert [word for line in lines[1:4] for word in line.split() if "%" in word] == [
        "<0.1%", ">99.9%", "100%",
    ]  # fmt: skip
