"""What the report of a match looks like."""

import csv
import itertools
from dataclasses import replace

from ckptool.matching import (
    Allowance,
    Ambiguity,
    DtypeChange,
    Judgement,
    MatchReport,
    Mismatch,
    OptimizerReport,
    Renaming,
)
from ckptool.remedies import Remedy
from ckptool.render.match import match_lines, note_lines
from ckptool.render.text import PLAIN, Look

LAYERS = [f"layers.{n}.attn.weight" for n in range(32)]
EVIL = "a\x1b]0;owned\x07\u202e"


def report(**fields):
    known = {"file": "model.pth", "model": "Net", "loaded": 981, "fitting": 60, "names": 62}
    return MatchReport(**{**known, **fields})


def lines(found, look=PLAIN, **options):
    return list(match_lines(found, look, **options))


def rows(found, **options):
    """The table's rows, as cells."""
    text = "\n".join(match_lines(found, Look(fmt="csv"), **options))
    return list(csv.reader(text.splitlines()))[1:]


def test_what_fits_as_it_is_is_one_line():
    assert lines(report(parameters=981)) == [
        "model.pth fits Net: all 62 tensors match (100% of the parameters)"
    ]


def test_ties_of_what_fits_are_told_in_a_line():
    found = report(parameters=981, tied=(("embed.weight", "head.weight"),))
    assert lines(found)[1:] == ["tied: embed.weight = head.weight"]


def test_a_report_has_the_form_that_transformers_made_familiar():
    found = report(
        parameters=1000,
        missing_keys=[*LAYERS, "head.bias"],
        unexpected_keys=["aux.weight"],
        mismatched=(Mismatch("fc.weight", "module.fc.weight", (1000, 512), (10, 512)),),
    )
    assert str(found) == "\n".join(match_lines(found))
    assert lines(found)[:7] == [
        "model.pth does not fit Net: 60 of 62 tensors match (98.1% of the parameters)",
        "",
        "Key                        | Status     | Details",
        "---------------------------+------------+----------------------------------",
        "layers.{0..31}.attn.weight | MISSING    |",
        "head.bias                  | MISSING    |",
        "aux.weight                 | UNEXPECTED |",
    ]
    mismatch = "fc.weight                  | MISMATCH   | file [1000, 512], model [10, 512]"
    assert lines(found)[7] == mismatch


def test_each_status_is_explained_with_what_helps():
    found = report(
        parameters=1000,
        missing_keys=["a"],
        unexpected_keys=["b"],
        mismatched=(Mismatch("c", "c", (1,), (2,)),),
        cast=(DtypeChange("d", "d", "float32", "float16", lossy=True),),
    )
    library, options = (list(note_lines(found, PLAIN, options=value)) for value in (False, True))
    words = ("missing", "unexpected", "mismatched", "lossy_cast")
    for word, text, other in zip(words, library, options, strict=True):
        assert f" allow_{word} " in text
        assert f" --allow-{word.replace('_', '-')} " in other
        assert "=" not in text


def test_where_no_rule_is_known_none_is_told():
    asked = Ambiguity(("a",), ("b",))
    (text,) = note_lines(report(ambiguous=(asked,)), PLAIN, options=True)
    assert text.endswith("by name and shape; add a --rename rule to choose one")


def test_a_rename_is_a_row_for_its_rule():
    renaming = Renaming(
        "wrapper",
        "module. taken off",
        (*((f"module.{name}", name) for name in LAYERS), ("module.fc.bias", "fc.bias")),
    )
    found = report(parameters=981, renamed=(renaming,))
    assert lines(found)[0] == "model.pth fits Net: all 62 tensors match (100% of the parameters)"
    (row,) = [line for line in lines(found) if "| RENAMED |" in line]
    assert row == "module.layers.{0..31}.attn.weight and 1 more | RENAMED | module. taken off"
    assert rows(found)[-1] == ["module.fc.bias", "RENAMED", "fc.bias (module. taken off)"]
    assert len(rows(found)) == 33
    assert len([line for line in lines(found, fold=False) if "| RENAMED |" in line]) == 33


def test_casts_of_the_same_types_are_one_row_unless_more_is_known():
    casts = [
        DtypeChange(name, name, "float32", "float16", lossy=True) for name in (*LAYERS, "fc.bias")
    ]
    casts.append(
        DtypeChange("norm", "norm", "float32", "float16", lossy=True, loss="3 of 64 overflow")
    )
    casts.append(DtypeChange("out", "out", "bfloat16", "float32", lossy=False))
    found = report(parameters=981, cast=tuple(casts))
    shown = [line.split(" | ") for line in lines(found) if "| CAST " in line]
    assert [[cell.strip() for cell in row] for row in shown] == [
        ["layers.{0..31}.attn.weight and 1 more", "CAST", "float32 -> float16 (lossy)"],
        ["norm", "CAST", "float32 -> float16 (lossy: 3 of 64 overflow)"],
        ["out", "CAST", "bfloat16 -> float32"],
    ]


def test_exact_casts_alone_need_no_permission():
    found = report(
        parameters=981, cast=(DtypeChange("a", "a", "bfloat16", "float32", lossy=False),)
    )
    assert found.fits
    assert "allow" not in str(found)


def test_what_is_ambiguous_is_folded_in_step_and_its_rule_is_told():
    unclear = tuple(
        Ambiguity((f"l.{n}.q",), (f"l.{n}.a", f"l.{n}.b"), (r"\.q$=>.a",)) for n in range(8)
    )
    found = report(
        parameters=1000,
        unexpected_keys=[f"l.{n}.q" for n in range(8)],
        missing_keys=[f"l.{n}.{k}" for n in range(8) for k in "ab"],
        ambiguous=unclear,
    )
    text = str(found)
    (row,) = [line for line in text.splitlines() if "| AMBIGUOUS |" in line]
    assert row.startswith("l.{0..7}.q ")
    assert row.endswith("could be l.{0..7}.a, l.{0..7}.b")
    assert "UNEXPECTED" not in text
    assert r"add `rename=[r'\.q$=>.a']` to choose one" in text
    shown = "\n".join(lines(found, options=True))
    assert "add a --rename rule to choose one" in shown  # the hint has it
    noted = replace(found, notes=("l.{1..4} may be l.{0..3}",))
    assert "to choose one\nnote: l.{1..4} may be l.{0..3}" in str(noted)


def test_ambiguities_that_do_not_change_in_step_stay_apart():
    unclear = tuple(Ambiguity((f"l.{n}.q",), (f"m.{(7 * n) % 5}.a",)) for n in range(1, 4))
    found = report(parameters=1000, unexpected_keys=["l.1.q", "l.2.q", "l.3.q"], ambiguous=unclear)
    assert [row[0] for row in rows(found)] == ["l.1.q", "l.2.q", "l.3.q"]
    assert sum("| AMBIGUOUS |" in line for line in lines(found)) == 3


def test_of_many_candidates_some_are_named():
    names = tuple(f"{letter}.weight" for letter in "abcdefg")
    found = report(parameters=1000, ambiguous=(Ambiguity(("x.weight",), names),))
    (row,) = [line for line in lines(found) if "| AMBIGUOUS |" in line]
    assert row.endswith("could be a.weight, b.weight, c.weight and 4 more")


def test_what_is_allowed_is_said_to_fit_with_it():
    found = report(parameters=1000, missing_keys=["head.bias"])
    allowed = Judgement((), Remedy())
    assert lines(found, judgement=allowed)[0] == (
        "model.pth fits Net with the allowed differences: "
        "60 of 62 tensors match (98.1% of the parameters)"
    )


def test_a_coverage_is_never_rounded_to_all_or_nothing():
    for loaded, parameters, said in [
        (0, 1000, "0%"),
        (999_999, 1_000_000, ">99.9%"),
        (1, 1_000_000, "<0.1%"),
        (0, 0, "100%"),
        (2, 2, "100%"),
    ]:
        found = report(loaded=loaded, parameters=parameters, missing_keys=["a"])
        assert lines(found)[0].endswith(f" ({said} of the parameters)"), loaded


def test_what_is_untied_kept_and_left_out_says_why():
    found = report(
        parameters=981,
        untied=(("embed.weight", "head.weight"),),
        kept=(("bn.num_batches_tracked", "old files have none"),),
        left_out=(("n_averaged", "counts what was averaged"),),
    )
    assert rows(found) == [
        ["embed.weight", "UNTIED", "!= head.weight"],
        ["bn.num_batches_tracked", "KEPT", "old files have none"],
        ["n_averaged", "LEFT OUT", "counts what was averaged"],
    ]


def test_the_optimizer_has_the_last_lines():
    optimizer = OptimizerReport("names", 161, 163, ("the file has 1 group, the optimizer 2",))
    found = report(parameters=981, optimizer=optimizer)
    assert lines(found)[-2:] == [
        "optimizer: matched the state of 161 of 163 parameters by name",
        "optimizer: the file has 1 group, the optimizer 2",
    ]
    helped = report(parameters=981, optimizer=replace(optimizer, remedy="optimizer_key='a'"))
    assert lines(helped)[-1] == "hint: optimizer_key='a'"


def test_a_state_dict_in_memory_and_an_unnamed_model_have_words():
    found = MatchReport(loaded=1, parameters=1, fitting=1, names=1)
    assert lines(found) == [
        "the state dict fits the model: 1 tensor matches (100% of the parameters)"
    ]


def test_nothing_of_a_file_reaches_the_terminal_raw():
    found = MatchReport(
        file=EVIL,
        model=EVIL,
        missing_keys=[EVIL],
        unexpected_keys=[EVIL, "x"],
        mismatched=(Mismatch(EVIL, EVIL, (1,), (2,)),),
        renamed=(Renaming(EVIL, EVIL, ((EVIL, EVIL),), EVIL),),
        cast=(DtypeChange(EVIL, EVIL, EVIL, EVIL, True, EVIL),),
        tied=((EVIL, EVIL),),
        ambiguous=(Ambiguity(("x",), (EVIL,), (EVIL,)),),
        kept=((EVIL, EVIL),),
        optimizer=OptimizerReport(EVIL, 1, 1, (EVIL,), (), (EVIL,), EVIL),
        notes=(EVIL,),
        parameters=1,
    )
    for options in (False, True):
        assert all(line.isprintable() for line in lines(found, options=options))
    assert all(line.isprintable() for line in lines(found, fold=False))


def test_it_fits_a_terminal():
    found = report(
        parameters=1000,
        missing_keys=["deep." * 40 + f"{n}" for n in range(3)],
        renamed=(Renaming("rule", "x" * 200, (("a" * 200, "b"),)),),
        notes=("word " * 100,),
    )
    for width in [72, 80, 120]:
        assert max(map(len, lines(found, Look(width=width)))) <= width, width


def test_a_hundred_thousand_names_are_a_few_rows():
    places = itertools.product(range(100), range(100), range(10))
    names = [f"blocks.{n}.experts.{k}.part{j}.w" for n, k, j in places]
    found = report(parameters=1000, missing_keys=names)
    assert sum("| MISSING" in line for line in lines(found)) == 10


def test_of_a_long_table_the_beginning_is_shown_and_the_rest_counted():
    names = [f"{'x' * 400}.{chr(97 + n % 26)}{n}a" for n in range(5000)]
    found = report(parameters=1000, missing_keys=names, kept=(("norm", "as it is"),))
    text = str(found)
    assert len(text) < 100_000
    (row,) = [line for line in text.splitlines() if line.startswith("and ")]
    assert row.split(" | ")[0].strip() == "and 4,900 more"
    assert "note: some rows are not shown; the fields of the report have all keys" in text
    assert "| KEPT" in text
    assert any("--no-fold shows all keys" in line for line in lines(found, options=True))
    assert sum("| MISSING" in line for line in lines(found, fold=False)) == 5000
    assert len(rows(found)) == 5001


def test_numbers_without_end_do_not_make_a_cell_without_end():
    found = report(parameters=1000, missing_keys=[f"l.{n * n}.w" for n in range(5000)])
    assert max(map(len, lines(found))) < 400


def test_a_question_is_not_said_to_have_several_answers():
    one = Ambiguity(("a.w", "a.b"), ("c.w", "c.b"), ("^a=>c",))
    text = str(report(parameters=1000, ambiguous=(one,)))
    assert "AMBIGUOUS: several keys could match by name and shape; add `rename=" in text


def test_where_all_of_the_model_is_met_the_first_line_has_the_reason():
    cast = DtypeChange("a.w", "a.w", "float64", "float32", lossy=True, loss="2 of 4 overflow")
    found = report(cast=(cast,), names=9, fitting=9)
    reason = "1 tensor is changed by a cast: a.w float64 -> float32 (2 of 4 overflow)"
    assert str(found).splitlines()[0] == f"model.pth does not fit Net: {reason}"
    error = Allowance().refusal_error(found)
    assert str(error) == f"model.pth does not fit Net: {reason}"
    more = Allowance().refusal_error(replace(found, unexpected_keys=["x"]))
    assert str(more).splitlines() == [
        "model.pth does not fit Net: 1 tensor is not in the model: x", reason,
    ]  # fmt: skip
