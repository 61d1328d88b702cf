"""The page in a real browser: its script runs, and draws what it should."""

import pytest

from ckptool.comparison.report import Report, report, summarize_file
from ckptool.inspection.listing import TensorRow
from ckptool.inspection.stats import TensorStats
from ckptool.render.page import render_page
from tests.inspection.handmade import checkpoint, floats, tensor
from tests.render.page.browser import looked_at, used
from tests.render.page.test_document import HOSTILE


def small(**more):
    names = ["conv1.weight", "conv1.bias", "layer.0.weight", "layer.1.weight", "fc.weight"]
    over = {name: floats(*range(1, n + 5), key=str(n)) for n, name in enumerate(names)}
    state = {name: tensor(one, (one.nbytes // 4,)) for name, one in over.items()}
    return {"state_dict": {**state, **more}, "epoch": 7}


def named(found, tag="a"):
    """Full names in the tables of the page."""
    return [
        one.attributes["title"]
        for one in found.elements
        if one.tag == tag and "title" in one.attributes and "td" in one.inside
    ]


def shapes(found, class_):
    return [one for one in found.elements if class_ in one.attributes.get("class", "").split()]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A file whose names are all that a page might fall for, as the browser shows it."""
    over = floats(1.0, 2.0)
    state = {name: tensor(over, (2,)) for name in HOSTILE}
    folder = tmp_path_factory.mktemp("hostile")
    made = checkpoint(small(**state))
    return looked_at(render_page(report(made, values=False)), folder)


def test_the_script_draws_a_row_a_tensor_and_areas(hostile):
    assert len(named(hostile)) == 5 + len(HOSTILE)
    assert len(shapes(hostile, "cell")) == 4  # conv1, layer, fc, and one that has many names
    assert hostile.one("output", **{"class": "found"}).text == str(5 + len(HOSTILE))
    assert "hidden" not in hostile.one("section", id="map").attributes


def test_hostile_names_are_text_and_nothing_else(hostile):
    assert "state_dict/</script><img src=x onerror=alert(1)>" in named(hostile)
    assert any("<!--<script>" in name for name in named(hostile))
    assert not hostile.all("img")
    assert len(hostile.all("script")) == 2
    assert all(name.isprintable() for name in named(hostile))


def test_the_address_says_what_is_searched_sorted_and_looked_at(tmp_path):
    made = render_page(report(checkpoint(small())))
    place = {"at": "state_dict/layer", "tensor": "state_dict/fc.weight"}
    found = looked_at(made, tmp_path, q="*.weight", sort="-size", **place)
    assert named(found) == [
        "state_dict/fc.weight",
        "state_dict/layer.1.weight",
        "state_dict/layer.0.weight",
        "state_dict/conv1.weight",
    ]
    assert found.one("output", **{"class": "found"}).text == "4 of 5"
    crumbs = found.one("nav", **{"class": "crumbs"}).text
    assert crumbs == " \u203a ".join(["all", "state_dict", "layer"])
    assert {one.attributes["aria-label"].split(",")[0] for one in shapes(found, "cell")} == {
        "state_dict/layer.0",
        "state_dict/layer.1",
    }
    assert found.one("h3").text == "state_dict/fc.weight"
    facts = dict(zip((one.text for one in found.all("dt")), found.all("dd"), strict=True))
    assert (facts["min"].text, facts["max"].text, facts["mean"].text) == ("1", "8", "4.5")
    assert len(shapes(found, "histogram")) == 4 + 1


def test_a_search_that_finds_nothing_says_so(tmp_path):
    found = looked_at(render_page(report(checkpoint(small()), values=False)), tmp_path, q="no such")
    assert found.one("output", **{"class": "found"}).text == "0 of 5"
    assert named(found) == []


def test_two_files_give_a_chart_and_a_table_of_changes(tmp_path):
    one = checkpoint(small())
    state = {name: ref for name, ref in one["state_dict"].items() if name != "fc.weight"}
    state["conv1.weight"] = tensor(floats(1.0, 2.0), (2,))
    other = checkpoint({"state_dict": {**state, "<b>": tensor(floats(0.5), (1,))}, "epoch": 8})
    made = render_page(report(one, other, values=False))
    found = looked_at(made, tmp_path, find="conv")
    bars = shapes(found, "bar")
    assert [one.attributes["class"].removeprefix("bar status") for one in bars] == [*"TEEEAD"]
    assert "state_dict/<b>, only in the second" in [one.attributes["aria-label"] for one in bars]
    assert not found.all("b")
    assert named(found, "span")[::2] == ["another shape or type"]
    assert "[4] -> [2]" in " ".join(one.text for one in found.all("td"))
    legend = found.one("p", **{"class": "legend"}).text
    assert "another shape or type (1)" in legend
    assert "same header (3)" in legend
    assert "Values were not compared." in legend
    assert "equal" not in legend


def test_bars_of_many_layers_fill_the_chart(tmp_path):
    names = [f"layers.{n}.{own}" for n in range(1000) for own in ("weight", "bias")]
    one = checkpoint({"model": {name: tensor(floats(1.0), (1,)) for name in names}})
    made = render_page(report(one, one, values=False))
    found = looked_at(made, tmp_path)
    bars = shapes(found, "bar")
    assert len(bars) == 334
    assert bars[0].attributes["aria-label"].startswith("model/layers.0 and 2 after it")
    width = float(found.one("svg", **{"class": "chart"}).attributes["viewbox"].split()[2])
    ends = [
        float(one.attributes["x"]) + float(one.attributes["width"])
        for one in found.all("rect", **{"class": "reach"})
    ]
    assert max(ends) == pytest.approx(width, abs=1)


def test_of_a_hundred_thousand_tensors_those_in_sight_are_drawn(tmp_path):
    names = [f"layers.{n // 100}.experts.{n % 100}.weight" for n in range(100_000)]
    rows = tuple(
        TensorStats(
            TensorRow(("model", name), f"model/{name}", "float32", (n,), (1,), "cpu", 4 * n,
                      "strided", str(n), False, numel=n),
            None,
        )
        for n, name in enumerate(names, 1)
    )  # fmt: skip
    made = render_page(Report(summarize_file(checkpoint({})), rows, measured=False))
    assert len(made) < 30_000_000
    found = looked_at(made, tmp_path, sort="-size")
    assert named(found)[0] == "model/layers.999.experts.99.weight"
    assert len(named(found)) < 60
    assert len(shapes(found, "cell")) == 250
    assert found.one("table", **{"class": "long"}).attributes["aria-rowcount"] == "100001"
    assert found.one("output", **{"class": "found"}).text == "100,000"


def test_it_follows_whoever_uses_it(tmp_path):
    names = [f"layer.{n}.weight" for n in range(300)]
    model, ema = floats(*range(301)), floats(*range(300))
    root = {
        "model": {name: tensor(model, (n,)) for n, name in enumerate(names, 2)},
        "ema": {name: tensor(ema, (n,)) for n, name in enumerate(names, 1)},
    }
    made = render_page(report(checkpoint(root), values=False))
    told = used(
        made,
        tmp_path,
        """
        click(at("a.cell")); await soon();
        tell("into", at("#map .crumbs").textContent);
        history.back(); await soon();
        tell("back", at("#map .crumbs").textContent);
        const first = at("#map [tabindex='0']"); first.focus();
        fire(first, new KeyboardEvent("keydown", { key: "End", bubbles: true }));
        tell("focus", document.activeElement.getAttribute("aria-label"));
        tell("hint", at("#hint").textContent);
        const frame = at(".frame"); frame.scrollTop = 6000; fire(frame, new Event("scroll"));
        tell("row", Number(at(".long tr:nth-child(2)").getAttribute("aria-rowindex")));
        const size = at("th:nth-child(4) button");
        click(size); tell("falling", at("tbody a").title);
        click(size); tell("rising", at("tbody a").title);
        const input = at("input"); input.value = "LAYER.29?.*"; fire(input, new Event("input"));
        tell("found", at(".found").textContent);
        click(at("tbody a")); await soon(); tell("closer", at(".closer h3").textContent);
        tell("address", location.hash);
        click(at(".away")); await soon(); tell("closed", at(".closer").hidden);
        """,
    )
    assert told["into"] == "all \u203a model \u203a layer"
    assert told["back"] == "all"
    assert told["focus"].startswith("ema")
    assert told["hint"].startswith("ema")
    assert 150 < told["row"] < 200
    assert told["falling"] == "model/layer.299.weight"
    assert told["rising"] == "ema/layer.0.weight"
    assert told["found"] == "20 of 600"
    assert told["closer"] == "ema/layer.290.weight"
    assert told["address"] == "#sort=size&q=LAYER.29%3F.*&tensor=ema%2Flayer.290.weight"
    assert told["closed"] is True


DEEP = "transformer.encoder_blocks.layers.{}.self_attention_with_a_long_name.output.weight"


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_cut_and_no_layer_loses_its_number(tmp_path, width, two):
    names = [DEEP.format(n) for n in range(24)]
    over = {name: floats(*range(1000), key=name) for name in names}
    state = {name: tensor(over[name], (10, 10, 10)) for name in names}
    made, other = (
        checkpoint(
            {
                "model_ema": state,
                "a_long_name_of_a_state_dict": {
                    f"l.{n}": tensor(floats(n), (1,)) for n in range(3)
                },
                "a_long_name_of_a_value" * 3: "and_a_long_value" * 9,
                "epoch": epoch,
            },
            writer="written by something with a long name",
        )
        for epoch in range(2)
    )
    told = used(
        render_page(report(*((made, other) if two else (made,)))),
        tmp_path,
        """
        await soon(); await soon();
        const shown = (one) => one.getClientRects().length > 0;
        const cut = (one) => shown(one) && one.scrollWidth > one.clientWidth;
        tell("cut", [...document.querySelectorAll(".scroll, .frame, .long th, .long td")].filter(cut).map((one) => one.textContent));
        tell("wide", document.documentElement.scrollWidth > innerWidth);
        tell("high", [...document.querySelectorAll(".long td.grows")].filter((one) => one.offsetHeight > 31).length);
        tell("names", [...document.querySelectorAll(".long a")].map((one) => [one.title, one.textContent]));
        tell("map", [...document.querySelectorAll(".map text")].map((one) => one.textContent));
        """,  # noqa: E501 - one statement each
        size=(width, 1500),
    )
    assert told["cut"] == []
    assert not told["wide"]
    assert told["high"] == 0  # a taller row would move those below it out of place
    layers = [(title, shown) for title, shown in told["names"] if "layers" in title]
    assert all(title.split(".")[3] in shown.split(".") for title, shown in layers)
    assert len({shown for _, shown in layers}) == len(layers) > 9
    assert {str(n) for n in range(24)} <= set(told["map"])
