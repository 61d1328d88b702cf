"""The report as JSON."""

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
