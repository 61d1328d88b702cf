"""The page: its markup, numbers and names; whole, its own, nothing fetched; and written."""

import json
import math
import os
import re
import shutil

import pytest
from hypothesis import given, strategies as st

from ckptool.comparison.report import report, summarize_file
from ckptool.core.tree import name_of
from ckptool.errors import TargetExists, UnreadableFile, WriteDenied
from ckptool.formats import open_checkpoint
from ckptool.render.figures import draw_histogram
from ckptool.render.page import render_page, write_page
from ckptool.render.page.data import DIGITS, Names, to_json_number
from ckptool.render.page.document import (
    MAX_FIRST_ROWS,
    SCRIPTS,
    render_element,
    render_table,
    script_json,
    to_html,
)
from ckptool.render.verdicts import verdict_text
from ckptool.words import clean
from tests.inspection.handmade import checkpoint, floats, tensor
from tests.render.page.pages import ADDRESS, Page, digest, names
from tests.sources import PROJECT

ASSETS = PROJECT / "ckptool" / "render" / "page" / "assets"
OVER = floats(1.0, 2.0, 3.0, 4.0)


def state(*names):
    return {name: tensor(OVER, (2, 2)) for name in names}


def drawn(*roots, **options):
    return Page(render_page(report(*map(checkpoint, roots), values=False, **options)))


@pytest.fixture(scope="module")
def hostile():
    one = {"state_dict": state(*HOSTILE), **dict.fromkeys(HOSTILE, "value")}
    two = {"state_dict": state(*reversed(HOSTILE[1:])), **dict.fromkeys(HOSTILE, "other")}
    return drawn(one, two)


def test_style_and_script_are_the_ones_that_the_policy_names(hostile):
    assert hostile.policy == {
        "default-src": "'none'",
        "style-src": digest(hostile.one("style").text),
        "script-src": digest(hostile.script),
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_nothing_is_fetched_and_nothing_is_inline_that_the_policy_would_refuse(hostile):
    for one in hostile.elements:
        assert one.tag not in {"link", "img", "iframe", "object", "embed", "base"}
        assert not {"src", "href", "style"} & set(one.attributes)
        assert not [name for name in one.attributes if name.startswith("on")]


@pytest.mark.parametrize("name", [*SCRIPTS, "page.css"])
def test_an_asset_names_no_address_and_parses_no_markup(name):
    text = (ASSETS / name).read_text(encoding="utf-8")
    assert not ADDRESS.search(text.replace("http://www.w3.org/2000/svg", ""))
    for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "</"):
        assert way not in text


def test_every_asset_is_in_the_page():
    assert {path.name for path in ASSETS.iterdir()} == {*SCRIPTS, "page.css"}


def test_what_a_file_names_makes_no_element(hostile):
    harmless = drawn({"state_dict": state("a")}, {"state_dict": state("b")})
    assert {one.tag for one in hostile.elements} == {one.tag for one in harmless.elements}
    assert len(hostile.all("script")) == 2


def test_names_and_values_of_a_hostile_file_are_printable(hostile):
    assert all(name.isprintable() for name in names(hostile.data))
    changes = hostile.data["diff"]["changes"]
    assert all(text.isprintable() for text in changes["what"])
    assert all(cell.text.isprintable() for cell in hostile.all("td"))


def test_the_data_tells_of_every_tensor_in_the_order_of_the_file():
    data = drawn({"state_dict": state("fc.weight", "conv.weight"), "epoch": 3}).data
    assert names(data) == ["state_dict/fc.weight", "state_dict/conv.weight"]
    tensors, words = data["tensors"], data["words"]
    assert [words["shape"][i] for i in tensors["shape"]] == ["[2, 2]", "[2, 2]"]
    assert words["dtype"] == ["float32"]
    assert tensors["bytes"] == [16, 16]
    assert tensors["tie"] == [[1, 0]]
    assert [words["marks"][i] for i in tensors["marks"]] == ["tied", "tied"]
    assert data["values"] is None
    assert data["diff"] is None


def test_without_the_script_there_are_a_summary_and_the_first_rows():
    many = drawn({"state_dict": state(*(f"layer.{n}" for n in range(MAX_FIRST_ROWS + 5)))})
    inside = [one for one in many.elements if "noscript" in one.inside]
    assert sum(one.tag == "tr" for one in inside) == MAX_FIRST_ROWS + 1
    assert (
        f"Only the first {MAX_FIRST_ROWS} of {MAX_FIRST_ROWS + 5} rows" in many.one("noscript").text
    )
    (summary,) = many.all("section", id="summary")
    assert "torch-zip" in summary.text


def test_a_part_of_a_file_is_all_that_tensors_are_told_of():
    root = {"state_dict": state("a"), "ema": state("b")}
    found = drawn(root, key="ema")
    assert names(found.data) == ["ema/b"]
    assert "only ema" in found.one("p", **{"class": "by"}).text


def test_two_files_are_compared_in_words_and_in_rows():
    found = drawn({"w": state("a", "b")["a"], "epoch": 7}, {"w": tensor(OVER, (4,)), "epoch": 7})
    changes = found.one("section", id="changes")
    assert "1 of 2 common entries differs" in changes.text
    assert "[2, 2] -> [4]" in changes.text
    assert found.data["diff"]["chart"]["status"] == "T"


def test_the_summary_has_the_parameters_the_verdict_and_the_values():
    one, two = ({"state_dict": state("module.a"), "epoch": n, "<b>": "</td>"} for n in (7, 8))
    found = drawn(one)
    assert found.one("h1").text == "made.pth 4 parameters"
    facts = dict(
        zip((th.text for th in found.all("th", scope="row")), found.all("td"), strict=False)
    )
    diagnosis = summarize_file(checkpoint(one)).diagnosis
    assert [complaint.severity for complaint in diagnosis.complaints] == ["fails", "fails"]
    first, second = diagnosis.complaints
    told = (verdict_text(diagnosis), f"1. error: {first.text}", f"2. error: {second.text}")
    assert facts["doctor"].text == "".join(told) + diagnosis.first_command
    assert found.one("code").text.startswith("ckptool convert made.pth")
    values = found.one("section", id="values").text
    assert values == "Valuesnamevalueepoch7<b>'</td>'"
    both = drawn(one, two)
    assert both.one("h1").text == "made.pth and made.pth 4 parameters"
    values = both.one("section", id="values").text
    assert values == "Valuesnamemade.pthmade.pthepoch78<b>'</td>''</td>'"
    assert drawn({"state_dict": state("a")}).all("section", id="values") == []


def test_optimizer_state_has_the_names_of_the_parameters():
    root = {
        "model": {name: tensor(floats(*range(4)), (2, 2)) for name in ("w.weight", "a.weight")},
        "optimizer": {
            "state": {n: {"exp_avg": tensor(floats(n, 1, 2, 3), (2, 2))} for n in range(2)},
            "param_groups": [{"params": [0, 1]}],
        },
    }
    changed = {**root, "optimizer": {**root["optimizer"], "state": {}}}
    found = drawn(root, changed)
    expected = [f"optimizer/state/{name}/exp_avg" for name in ("w.weight", "a.weight")]
    assert names(found.data)[2:] == expected
    assert found.data["tensors"]["path"] == [
        [2, "optimizer/state/0/exp_avg"],
        [3, "optimizer/state/1/exp_avg"],
    ]
    assert names(found.data["diff"], "chart")[2:] == expected
    assert names(found.data["diff"], "changes")[:2] == expected


def test_two_equal_files_have_a_chart_and_no_rows():
    root = {"state_dict": state("a", "b")}
    found = drawn(root, root)
    assert "the same structure: 2 entries" in found.one("section", id="changes").text
    assert found.data["diff"]["chart"]["status"] == "=="
    assert found.data["diff"]["changes"]["status"] == ""


def test_an_empty_file_has_a_page():
    found = drawn({})
    assert names(found.data) == []
    assert "hidden" in found.one("section", id="map").attributes


def test_the_same_file_gives_the_same_page():
    root = {"state_dict": state("a", "b")}
    assert drawn(root).source == drawn(root).source


def luminance(color):
    """As WCAG 2 has it."""
    shares = [int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return sum(part * weight for part, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_every_text_stands_out():
    style = (ASSETS / "page.css").read_text(encoding="utf-8")
    light, dark = (
        dict(re.findall(r"--(\w+): (#\w{6});", block))
        for block in re.findall(r":root \{\n(.*?)\n *(?:font|\})", style, re.DOTALL)[:2]
    )
    for colors in (light, {**light, **dark}):
        for ground in (colors["page"], colors["card"]):
            for name in ("text", "faint", "link", *"MTADR"):
                assert contrast(colors[name], ground) >= 4.5, name
        for hue in range(8):
            assert contrast(colors[f"hue{hue}"], "#ffffff") >= 4.5


HOSTILE = [
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "]]>",
    "a\u2028b\u2029c",
    "\ud800",
    "\u202egnp.exe",
    "\x1b[31m\x00",
    "&lt;b&gt;",
    "\"'` onload=x",
]


def test_text_of_a_file_stays_text():
    for text in HOSTILE:
        page = Page(render_element("p", to_html(text), title=to_html("x")).encode())
        assert [one.tag for one in page.elements] == ["p"], text
        assert page.one("p").text.isprintable(), text


@given(st.text())
def test_an_attribute_stays_within_its_quotes(text):
    page = Page(render_element("p", "", class_=text).encode("utf-8", "replace"))
    assert [one.tag for one in page.elements] == ["p"]
    assert set(page.one("p").attributes) <= {"class"}


@given(st.recursive(st.text() | st.integers(), st.lists, max_leaves=5))
def test_data_in_a_script_comes_back_and_cannot_end_it(document):
    text = script_json(document)
    assert json.loads(text) == document
    assert not set(text) & set("<>&\u2028\u2029")
    assert text.isascii()


def test_what_json_has_no_word_for_is_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        script_json([float("nan")])


def test_a_table_has_headers_of_its_columns_and_numbers_to_the_right():
    page = Page(render_table(["a", "b"], [["1", "2"]], right={1}, class_="x", caption="c").encode())
    assert [one.attributes.get("class") for one in page.all("th")] == [None, "right"]
    assert [one.text for one in page.all("td")] == ["1", "2"]
    assert page.one("caption").text == "c"


def test_a_figure():
    for value, shown in [
        (None, None),
        (0, 0),
        (True, 1),
        (-7, -7),
        (2**53 - 1, 2**53 - 1),
        (2**63 - 1, 9.22337e18),
        (0.1234567890, 0.123457),
        (3.0, 3),
        (-0.0, 0),
        (1e300, 1e300),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, "nan"),
        (1 + 2j, None),
    ]:
        assert to_json_number(value) == shown, value


@given(st.one_of(st.floats(), st.integers(-(1 << 80), 1 << 80)))
def test_json_takes_every_figure_and_it_is_right_to_six_digits(value):
    shown = to_json_number(value)
    json.dumps(shown, allow_nan=False)
    if math.isfinite(value):
        assert float(shown) == pytest.approx(value, rel=1e-5)


def test_bars_are_drawn_against_the_fullest_and_none_that_has_elements_is_empty():
    drawn = draw_histogram((0, 1, 500_000, 1_000_000), DIGITS)
    assert [DIGITS.index(digit) for digit in drawn] == [0, 1, 32, 63]


def test_a_histogram_of_nothing_is_flat():
    assert draw_histogram((0, 0), DIGITS) == "00"
    assert draw_histogram((), DIGITS) == ""


def placed(paths):
    tree = Names()
    rows = tree.to_columns(paths)
    return {"names": tree.to_dict(), "tensors": rows}


def test_what_names_begin_with_is_stored_once():
    document = placed([("state_dict", "a.b.weight"), ("state_dict", "a.b.bias"), ("epoch",)])
    assert document == {
        "names": {"label": ["", "state_dict", "/a", ".b"], "parent": [0, 0, 1, 2]},
        "tensors": {"label": [".weight", ".bias", "epoch"], "module": [3, 3, 0]},
    }


def test_a_file_that_is_one_tensor_has_no_name():
    assert placed([()])["tensors"] == {"label": [""], "module": [0]}


def test_a_dot_and_a_slash_make_different_modules():
    document = placed([("a", "b.c"), ("a.b", "c")])
    assert len(document["names"]["label"]) == 4
    assert names(document) == ["a/b.c", "a.b/c"]


@given(st.lists(st.lists(st.one_of(st.text(alphabet="ab/.", max_size=5), st.integers(0, 3)))))
def test_the_parts_make_the_name_again(paths):
    assert names(placed(paths)) == [name_of(tuple(path)) for path in paths]


@given(st.lists(st.text(min_size=1), min_size=1, max_size=3))
def test_what_a_screen_might_obey_is_spelled_out(path):
    (name,) = names(placed([path]))
    assert clean(name) == name


def test_a_million_dots_make_no_million_modules():
    assert len(placed([("." * 1_000_000,)])["names"]["label"]) < 200


MODEL = PROJECT / "fixtures" / "torch-2.13.0" / "dp_full.pth"


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.pth"
    shutil.copy(MODEL, path)
    return path


@pytest.fixture
def opened(model):
    with open_checkpoint(model) as checkpoint:
        yield checkpoint


@pytest.fixture
def made(opened):
    return report(opened, values=False)


def test_the_file_is_the_page_and_the_receipt_says_so(opened, made, tmp_path):
    target = tmp_path / "new" / "folder" / "page.html"
    receipt = write_page(made, target, [opened])
    assert target.read_bytes() == render_page(made)
    assert receipt.size == target.stat().st_size
    assert receipt.tensors == len(list(opened.tensors()))
    assert receipt.measured == 0
    assert receipt.identical is None


def test_a_file_that_is_there_is_replaced_only_when_asked(opened, made, tmp_path):
    target = tmp_path / "page.html"
    target.write_text("old")
    with pytest.raises(TargetExists, match="already exists"):
        write_page(made, target, [opened])
    assert target.read_text() == "old"
    write_page(made, target, [opened], overwrite=True)
    assert target.read_bytes() == render_page(made)


@pytest.mark.parametrize("make", [None, os.symlink, os.link], ids=["itself", "symlink", "link"])
def test_a_source_is_never_written_over(opened, made, model, tmp_path, make):
    target = model
    if make is not None:
        target = tmp_path / "page.html"
        make(model, target)
    before = model.read_bytes()
    with pytest.raises(TargetExists, match="is the source itself"):
        write_page(made, target, [opened], overwrite=True)
    assert model.read_bytes() == before


def test_the_second_source_is_never_written_over_either(opened, made, tmp_path):
    other = tmp_path / "other.pth"
    shutil.copy(MODEL, other)
    with open_checkpoint(other) as second, pytest.raises(TargetExists, match="source itself"):
        write_page(made, other, [opened, second], overwrite=True)


def test_a_folder_and_a_device_are_no_page(opened, made, tmp_path):
    with pytest.raises(TargetExists, match="is a folder"):
        write_page(made, tmp_path, [opened], overwrite=True)
    with pytest.raises(WriteDenied, match="not a regular file"):
        write_page(made, os.devnull, [opened], overwrite=True)


def test_a_source_that_changes_meanwhile_leaves_the_old_page(opened, made, model, tmp_path):
    target = tmp_path / "page.html"
    target.write_text("old")
    with model.open("ab") as file:
        file.write(b"more")
    with pytest.raises(UnreadableFile):
        write_page(made, target, [opened], overwrite=True)
    assert target.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pth", "page.html"]
