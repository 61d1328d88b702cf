"""The report: what of a model is loaded, counted, and all of it as JSON."""

from __future__ import annotations

import json

from ckptool.matching import (
    Ambiguity,
    Cast,
    MatchReport,
    Mismatch,
    OptimizerReport,
    Overlap,
    Renaming,
)
from ckptool.matching.report import EXTRA, Slot, casts_of, counted


def test_an_empty_report_fits_and_covers_all():
    assert MatchReport().fits
    assert MatchReport().coverage == 1.0


def test_every_field_is_in_the_document():
    report = MatchReport(
        file="a.pth",
        model="Net",
        missing_keys=["a"],
        unexpected_keys=["b"],
        mismatched=(Mismatch("c", "m.c", (None, 2), (3,)),),
        renamed=(Renaming("prefix", "m. taken off", (("m.c", "c"),)),),
        cast=(Cast("d", "d", "float32", "float16", True, "1 of 2 overflow"),),
        tied=(("e", "f"),),
        untied=(("g", "h"),),
        overlapping=(Overlap(("j", "k"), "j"),),
        ambiguous=(Ambiguity(("b",), ("a", "i"), ("^b=>a",)),),
        left_out=(("n_averaged", "a counter"),),
        kept=(("bn.num_batches_tracked", "a counter"),),
        loaded=1,
        parameters=4,
        optimizer=OptimizerReport("names", 1, 2, ("it has two groups",)),
        notes=("one",),
    )
    document = report.to_dict()
    assert json.loads(json.dumps(document)) == document
    assert set(document) == {"schema", "fits", "coverage", *MatchReport.__dataclass_fields__}
    assert document["schema"] == "ckptool.match/1"
    assert (document["fits"], document["coverage"]) == (False, 0.25)
    assert document["renamed"][0]["rule"] is None
    assert document["mismatched"] == [
        {"name": "c", "own": "m.c", "shape": [None, 2], "wanted": [3]}
    ]
    assert document["optimizer"]["problems"] == ["it has two groups"]


def parameter(*shape, tie=None):
    return Slot(shape, "float32", "parameter", tie)


def test_ties_count_once_and_as_loaded_where_one_of_them_is():
    want = {"a": parameter(4, 4, tie=1), "b": parameter(4, 4, tie=1), "c": parameter(10)}
    assert counted(want, {"c"}, ()) == {"loaded": 10, "parameters": 26, "fitting": 1, "names": 3}
    assert counted(want, {"b", "c"}, ())["loaded"] == 26


def test_buffers_count_as_names_alone_where_there_are_parameters():
    want = {"w": parameter(2), "mean": Slot((5,), "float32", "buffer"), "_extra_state": EXTRA}
    assert counted(want, {"mean"}, ()) == {"loaded": 0, "parameters": 2, "fitting": 1, "names": 3}
    del want["w"]
    assert counted(want, {"mean"}, ())["loaded"] == 5


def test_what_is_kept_is_not_asked_for():
    want = {"w": parameter(2), "v": parameter(3)}
    assert counted(want, {"w"}, {"v"}) == {"loaded": 2, "parameters": 2, "fitting": 1, "names": 1}


def test_names_count_where_nothing_has_elements():
    want = {"a": parameter(0), "b": parameter(0)}
    assert counted(want, {"a"}, ())["loaded"] == 1


def test_a_cast_is_lossy_by_what_the_types_hold():
    have = {"a": Slot((1,), "float16"), "b": Slot((1,), "float64"), "c": Slot((1,), "float32")}
    want = {name: Slot((1,), "float32") for name in "abc"}
    assert [
        (one.name, one.lossy) for one in casts_of({name: name for name in want}, have, want)
    ] == [
        ("a", False),
        ("b", True),
    ]
