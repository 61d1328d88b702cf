"""What diff looks like."""

import csv
from dataclasses import replace

from ckptool.comparison.diff import Changed, Diff, Renamed, Side
from ckptool.render.diff import diff_lines, stat_lines, status_lines
from ckptool.render.text import PLAIN, Look, format_share
from ckptool.tensors.comparing import Difference

EVIL = "a\x1b]0;owned\x07|\u202e"
NOTHING = dict.fromkeys("ADMRT", 0)


def tensor(name, dtype="float32", shape=(2, 3), device="cpu", requires_grad=False):
    return Side(name, "tensor", "torch.Tensor", dtype, shape, device, requires_grad, "strided", 24)


def value(name, content):
    return Side(name, "value", type(content).__name__, value=content)


def figures(rel_norm=0.5, **others):
    known = {
        "elements": 6,
        "mismatched": 3,
        "close": None,
        "rel_norm": rel_norm,
        "max_abs": 0.25,
        "mean_abs": 0.0625,
        "max_rel": 2.0,
        "rmse": 0.125,
        "cosine": 0.9999,
        "nan_a": 0,
        "nan_b": 0,
        "inf_a": 0,
        "inf_b": 0,
    }
    return Difference(**{**known, **others})


def changed(name, what=("value",), a=None, b=None, difference=None, **more):
    sides = tensor(name, **(a or {})), tensor(name, **(b or {}))
    return Changed(name, what, *sides, difference, **more)


def made(changes=(), values=(), only_a=(), only_b=(), renamed=(), **more):
    """A result whose numbers fit what is in it."""
    counting = [row.status for row in (*changes, *values) if row.counts]
    counts = {
        "A": len(only_b),
        "D": len(only_a),
        "M": counting.count("M"),
        "R": len(renamed),
        "T": counting.count("T"),
    }
    known = {
        "a": "a.pth",
        "b": "b.safetensors",
        "format_a": "torch-zip",
        "format_b": "safetensors",
        "identical": not any(counts.values()),
        "only_in_a": tuple(only_a),
        "only_in_b": tuple(only_b),
        "changed": tuple(changes),
        "values": tuple(values),
        "renamed": tuple(renamed),
        "changed_in_all": len(changes),
        "counts": counts,
        "tagged": len(changes) + len(values) - len(counting),
        "common": 10,
        "equal": 10 - len(counting),
    }
    return Diff(**{**known, **more})


def everything():
    return made(
        changes=[
            changed("head.w", ("shape",), b={"shape": (4, 3)}),
            *(
                changed(f"l.{n}.w", difference=figures(n / 8, max_abs=n), is_weight=True)
                for n in range(4)
            ),
            changed("n.w", difference=figures(float("nan"), cosine=None, nan_b=2, inf_a=1)),
        ],
        values=[Changed("epoch", ("value",), value("epoch", 3), value("epoch", 4))],
        only_a=[tensor("l.0.b", shape=(3,)), tensor("l.1.b", shape=(3,)), value("note", "x" * 50)],
        only_b=[value("seed", None)],
        renamed=[Renamed(tensor(f"l.{n}.k"), tensor(f"h.{n}.key")) for n in range(2)],
    )


def text(found, look=PLAIN):
    return "\n".join(diff_lines(found, look))


def test_the_screen_has_everything_with_the_largest_change_first_and_layers_folded():
    assert text(everything()) == (
        "A  a.pth  torch-zip, 15 entries\n"
        "B  b.safetensors  safetensors, 13 entries\n"
        "7 of 10 common entries differ, 3 only in A, 1 only in B, 2 renamed; 3 equal\n"
        "\n"
        "weight          what   rel norm  max abs  mean abs  max rel   rmse    cosine  differing\n"
        "l.{0..3}.w  x4  value     0.375        3    0.0625        2  0.125  0.999900      50.0%\n"
        "\n"
        "tensor  what   in A    in B\n"
        "head.w  shape  [2, 3]  [4, 3]\n"
        "\n"
        "tensor  what   rel norm  max abs  mean abs  max rel   rmse  differing  NaN, Inf\n"
        "n.w     value       nan     0.25    0.0625        2  0.125      50.0%  NaN 0 -> 2, Inf"
        " 1 -> 0\n"
        "\n"
        "value  what   in A  in B\n"
        "epoch  value  3     4\n"
        "\n"
        "only in A       what\n"
        "l.{0..1}.b  x2  float32 [3]\n"
        f"note            str '{'x' * 18}...{'x' * 17}'\n"
        "\n"
        "only in B  what\n"
        "seed       None\n"
        "\n"
        "renamed from      what            in B\n"
        "l.{0..1}.k    x2  float32 [2, 3]  h.{0..1}.key"
    )


def test_a_container_that_only_one_file_has_is_one_line():
    optimizer = [
        tensor("optim/state/0/exp_avg"),
        tensor("optim/state/1/exp_avg"),
        value("optim/lr", 0.1),
    ]
    found = made(
        only_a=[*(replace(side, container="optim") for side in optimizer), value("epoch", 1)],
        only_b=[
            *(replace(value(f"loop/{n}", n), container="loop") for n in range(2)),
            replace(value("args/lr", 3), container="args"),
        ],
    )
    assert text(found).split("\n")[4:] == [
        "only in A: optim, 2 tensors",
        "only in B: loop, 2 entries",
        "",
        "only in A  what",
        "epoch      int 1",
        "",
        "only in B  what",
        "args/lr    int 3",
    ]
    assert sum("optim/" in line for line in diff_lines(found, PLAIN, fold=False)) == 3
    assert sum(line.startswith("D\toptim/") for line in status_lines(found)) == 3


def test_weights_come_first_and_integers_after_floats():
    whole = {"dtype": "int64"}
    rows = [
        changed("optim.nan", difference=figures(float("nan"))),
        changed("steps", a=whole, b=whole, difference=figures(float("inf")), is_weight=True),
        changed("w.small", difference=figures(0.1, max_abs=9), is_weight=True),
        changed("w.large", difference=figures(0.2, max_abs=1), is_weight=True),
        changed("w.zero", difference=figures(float("inf")), is_weight=True),
    ]

    def names(**more):
        lines = text(made(rows, **more)).split("\n")
        return [line.split()[0] for line in lines[5:] if line and not line.startswith("tensor")]

    assert names() == ["w.zero", "w.large", "w.small", "steps", "optim.nan"]
    by_gap = ["w.small", "w.large", "w.zero", "steps", "optim.nan"]
    assert names(sort="max_abs") == by_gap


def test_nothing_is_wider_than_the_terminal():
    long = "deep." * 60
    found = made(
        changes=[
            changed(long, difference=figures(-0.123456e-12, nan_a=10**6, inf_b=10**9)),
            changed(long, ("dtype", "value"), b={"dtype": "bfloat16"}, difference=figures()),
            changed(f"{long}w", ("shape",), {"shape": (1,) * 30}, {"shape": (2,) * 30}),
            changed("t", ("device",), {"device": "cuda:0"}, {"device": "x" * 99}, counts=False),
        ],
        values=[Changed(long, ("value",), value(long, "a" * 99), value(long, "b" * 99))],
        only_a=[tensor(long)],
        only_b=[value(long, "c" * 99)],
        renamed=[Renamed(tensor(long), tensor(f"{long}b"))],
        a=long,
        notes=("word " * 60,),
    )
    for width in [60, 80, 100, 200]:
        for lines in (diff_lines(found, Look(width)), stat_lines(found, Look(width))):
            assert max(map(len, lines)) <= width, width


def test_a_narrow_terminal_is_told_what_a_wide_one_shows():
    found = text(made([changed("l.0.mlp.weight.of.a.layer", difference=figures())]), Look(70))
    assert "(a wider terminal shows names in full, rmse, mean abs, cosine)" in found
    assert "rel norm" in found


def test_other_dtypes_stand_beside_the_figures():
    row = changed("w", ("dtype", "value"), b={"dtype": "bfloat16"}, difference=figures())
    assert "w       float32 -> bfloat16       0.5     0.25" in text(made([row]))


def test_a_family_has_the_worst_of_each_figure_whatever_the_order():
    rows = [
        changed("l.0.w", difference=figures(0.9, nan_a=1, nan_b=1)),
        changed("l.1.w", difference=figures(0.1, max_abs=10, cosine=-0.5, nan_a=2, nan_b=3)),
        changed("l.2.w", difference=figures(None, rmse=7, cosine=None, nan_a=1, nan_b=1)),
        changed("l.3.w", difference=figures(0.2, mean_abs=4, mismatched=6, nan_a=1, nan_b=1)),
    ]
    for order in (rows, rows[::-1]):
        (line,) = (line for line in text(made(order)).split("\n") if line.startswith("l."))
        said = " ".join(line.split())
        assert said == "l.{0..3}.w x4 value 0.9 10 4 2 7 -0.500000 100% NaN 5 -> 6"


def test_without_folding_each_tensor_is_a_row():
    lines = list(diff_lines(everything(), PLAIN, fold=False))
    assert not any("{" in line for line in lines)
    assert sum(line.startswith("l.") for line in lines) == 8
    assert sum(line.startswith("l.") for line in stat_lines(everything(), PLAIN, fold=False)) == 4


def test_what_has_no_finite_pair_has_no_figures():
    none = dict.fromkeys(("max_abs", "mean_abs", "max_rel", "rmse", "cosine"))
    row = changed("w", difference=figures(None, **none, nan_b=6))
    line = text(made([row])).split("\n")[5]
    assert " ".join(line.split()) == "w value 50.0% NaN 0 -> 6"


def test_what_became_nan_stands_before_any_number():
    rows = [
        changed("big", difference=figures(float("inf"))),
        changed("nan", difference=figures(float("nan"), nan_b=1)),
        changed("nan.in.both", difference=figures(0.1, nan_a=1, nan_b=1)),
    ]
    lines = text(made(rows)).split("\n")
    assert [line.split()[0] for line in lines[5:8]] == ["nan", "big", "nan.in.both"]


def test_a_layer_with_nan_is_not_hidden_among_others():
    rows = [changed(f"l.{n}.w", difference=figures(nan_b=3 * (n == 1))) for n in range(3)]
    found = text(made(rows))
    assert "l.{0,2}.w  x2" in found
    assert found.count("NaN 0 -> 3") == 1


def test_a_type_that_changed_is_told_with_the_value():
    row = Changed("n", ("type", "value"), value("n", 1), value("n", 1.0))
    assert "n      type, value  int 1  float 1.0" in text(made(values=[row]))
    inside = Changed("o", ("value",), value("o", "x"), value("o", "y"), place="args[0]")
    assert "o      value at args[0]  'x'   'y'" in text(made(values=[inside]))


def test_devices_are_a_line_and_no_rows():
    rows = [
        changed(f"l.{n}.w", ("device",), {"device": "cuda:3"}, counts=False) for n in range(3)
    ] + [changed("l.3.w", ("device", "value"), {"device": "cuda:1"}, difference=figures())]
    found = text(made(rows))
    assert "device: cuda:3 -> cpu (3), cuda:1 -> cpu (1), ignored without --strict" in found
    assert "l.{0..2}" not in found
    assert "l.3.w   value" in found


def test_devices_that_count_are_told_without_ignored():
    found = text(made([changed("w", ("device",), {"device": "cuda:3"})]))
    assert found.endswith("\n\ndevice: cuda:3 -> cpu (1)")
    assert "1 of 10 common entries differ" in found


def test_many_devices_are_cut():
    rows = [changed(f"w{n}", ("device",), {"device": f"cuda:{n}"}, counts=False) for n in range(9)]
    assert "cuda:4 -> cpu (1), and 4 more" in text(made(rows))


def test_identical_is_one_line_that_says_what_that_rests_on():
    for more, line in [
        ({}, "identical: 10 entries"),
        ({"common": 1}, "identical: 1 entry"),
        ({"by_checksum": 7}, "identical: 10 entries (7 tensors compared only by CRC-32)"),
        ({"close": 2}, "equal: 10 entries (2 within the tolerance)"),
        ({"structure": True}, "the same structure: 10 entries (values not compared)"),
    ]:
        assert text(made(**more)) == line, more


def test_identical_but_for_devices_says_so_in_its_line():
    rows = [changed(f"{n}.w", ("device",), {"device": "cuda:3"}, counts=False) for n in range(2)]
    assert text(made(rows)) == "identical: 10 entries (ignored device: cuda:3 -> cpu (2))"


def test_notes_and_what_was_cut_off_are_told():
    found = text(made([changed("w", difference=figures())], changed_in_all=4, notes=(EVIL,)))
    assert "note: a\\x1b]0;owned\\x07|\\u202e\n" in found
    assert "and 3 more tensors (--max-diffs)" in found


def test_nothing_in_common():
    found = text(made(only_a=[tensor("a")], common=0, equal=0))
    assert found.split("\n")[2] == "no keys in common: 1 only in A"


def test_names_of_a_file_do_not_reach_the_terminal_as_they_are():
    found = made(
        [changed(f"{EVIL}.w", difference=figures()), changed(EVIL, ("shape",), {"shape": (1,)})],
        [Changed(EVIL, ("value",), value(EVIL, EVIL), value(EVIL, 1))],
        [tensor(EVIL)],
        [value(EVIL, EVIL)],
        [Renamed(tensor(EVIL), tensor(EVIL))],
        a=EVIL,
    )
    for lines in (diff_lines(found, PLAIN), stat_lines(found, PLAIN), status_lines(found)):
        said = "\n".join(lines)
        assert "owned" in said
        assert "\x1b" not in said
        assert "\u202e" not in said


def test_renames_that_do_not_go_in_step_are_not_folded():
    rows = [Renamed(tensor(f"a.{n}.w"), tensor(f"b.{1 - n}.w")) for n in range(2)]
    found = text(made(renamed=rows))
    assert "a.0.w         float32 [2, 3]  b.1.w" in found
    assert "x2" not in found


def test_with_a_format_it_is_one_table_with_whole_cells():
    rows = list(csv.reader(diff_lines(everything(), Look(fmt="csv"))))
    assert rows[0][:5] == ["status", "name", "what", "in A", "in B"]
    assert rows[0][5:] == [
        *("rel norm", "max abs", "mean abs", "max rel", "rmse", "cosine", "differing", "NaN, Inf")
    ]
    assert {len(row) for row in rows} == {13}
    by_name = {row[1]: row for row in rows[1:]}
    assert not any("{" in name for name in by_name)
    assert by_name["l.3.w"][:3] == ["M", "l.3.w", "value"]
    assert by_name["l.3.w"][5:12] == ["0.375", "3", "0.0625", "2", "0.125", "0.9999", "50.0%"]
    assert by_name["l.1.w"][5:8] == ["0.125", "1", "0.0625"]
    assert by_name["note"][:4] == ["D", "note", "", f"str '{'x' * 50}'"]
    assert by_name["seed"][4] == "None"
    assert by_name["l.1.k"][:5] == ["R", "l.1.k", "float32 [2, 3]", "l.1.k", "h.1.key"]
    assert list(diff_lines(made(), Look(fmt="csv"))) == [",".join(rows[0][:-1]) + ',"NaN, Inf"']


def test_name_status_is_a_line_an_entry():
    found = everything()
    assert list(status_lines(found)) == [
        "T\thead.w",
        *(f"M\tl.{n}.w" for n in range(4)),
        "M\tn.w",
        "M\tepoch",
        "D\tl.0.b",
        "D\tl.1.b",
        "D\tnote",
        "A\tseed",
        "R\tl.0.k\th.0.key",
        "R\tl.1.k\th.1.key",
    ]
    tagged = made([changed("w", ("device",), {"device": "cuda:3"}, counts=False)])
    assert list(status_lines(tagged)) == []


def test_names_for_programs_are_quoted_as_git_does():
    names = {
        'say "it"': r'"say \"it\""',
        "a\\b": r'"a\\b"',
        "tab\tnew\nline\x1b": r'"tab\tnew\nline\033"',
        "\u202e": r'"\342\200\256"',
        "\ud800": r'"\355\240\200"',
        " two words, größe": " two words, größe",
    }
    assert list(status_lines(made(only_a=[tensor(name) for name in names]))) == [
        f"D\t{name}" for name in names.values()
    ]
    moved = made(renamed=[Renamed(tensor("a\tb"), tensor("c"))])
    assert list(status_lines(moved)) == [r'R	"a\tb"	c']


def test_another_type_is_told_with_its_value():
    sides = [
        (value("x", None), value("x", 0), "None  int 0"),
        (value("x", 1), Side("x", "container", "dict", value="dict of 0"), "int 1  dict of 0"),
    ]
    for a, b, said in sides:
        assert f"x      type  {said}" in text(made(values=[Changed("x", ("type",), a, b)]))
    row = Changed("x", ("type",), tensor("x"), value("x", 3))
    assert "x       type  torch.Tensor float32 [2, 3]  int 3" in text(made([row]))
    assert "1 of 10 common entries differs" in text(made([row]))


def test_what_stands_inside_is_told_of_both():
    row = changed("q", ("quantizer",), place="quantizer/scale", change=("0.1", "0.2"))
    assert "q       quantizer at scale  0.1   0.2" in text(made([row]))
    entries = changed("s", change=("3 entries", "2 entries"))
    assert "s       value  3 entries  2 entries" in text(made([entries]))


def test_stat_counts_by_module():
    assert list(stat_lines(everything(), PLAIN)) == [
        "7 of 10 common entries differ, 3 only in A, 1 only in B, 2 renamed; 3 equal",
        "",
        "module           differing",
        "head                     1  ~",
        "l.{0..1}     x2          4  ~~--",
        "l.{2..3}     x2          2  ~~",
        "n                        1  ~",
        "(top level)              3  ~-+",
        "h.{0..1}     x2          2  >>",
    ]
    assert list(stat_lines(made(), PLAIN)) == ["identical: 10 entries"]


def test_a_bar_keeps_its_length_and_hides_nothing():
    rows = [changed(f"m.w{n}", difference=figures()) for n in range(1000)]
    (_, _, _, line, *_) = stat_lines(made(rows, only_a=[tensor("m.x")]), PLAIN)
    assert line.split() == ["m", "1,001", "~" * 32 + "-"]


def test_a_share_is_neither_all_nor_nothing_where_it_is_not():
    for part, whole, said in [
        (0, 0, "0%"),
        (0, 5, "0%"),
        (5, 5, "100%"),
        (1, 8, "12.5%"),
        (1, 10**6, "<0.1%"),
        (10**6 - 1, 10**6, ">99.9%"),
    ]:
        assert format_share(part, whole) == said, part
