"""The page as markup: whole, its own, and nothing fetched."""

import re

import pytest

from ckptool.comparison.report import report
from ckptool.render.page import page
from ckptool.render.page.document import FIRST, SCRIPTS
from tests.inspection.handmade import checkpoint, floats, tensor
from tests.render.page.pages import ADDRESS, Page, digest, names
from tests.render.page.test_markup import HOSTILE
from tests.sources import PROJECT

ASSETS = PROJECT / "ckptool" / "render" / "page" / "assets"
OVER = floats(1.0, 2.0, 3.0, 4.0)


def state(*names):
    return {name: tensor(OVER, (2, 2)) for name in names}


def drawn(*roots, **options):
    return Page(page(report(*map(checkpoint, roots), values=False, **options)))


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
    many = drawn({"state_dict": state(*(f"layer.{n}" for n in range(FIRST + 5)))})
    inside = [one for one in many.elements if "noscript" in one.inside]
    assert sum(one.tag == "tr" for one in inside) == FIRST + 1
    assert f"The first {FIRST} of {FIRST + 5}" in many.one("noscript").text
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


def luminance(colour):
    """As WCAG 2 has it."""
    shares = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
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
    for colours in (light, {**light, **dark}):
        for ground in (colours["page"], colours["card"]):
            for name in ("text", "faint", "link", *"MTADR"):
                assert contrast(colours[name], ground) >= 4.5, name
        for hue in range(8):
            assert contrast(colours[f"hue{hue}"], "#ffffff") >= 4.5
