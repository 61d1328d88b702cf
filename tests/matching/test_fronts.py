"""Subtrees that have another name, and below which there are numbers alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.matching import Slot, matched

SAME = {0: (4, 4), 1: (4, 4), 2: (4, 4)}
CONVS = {0: (8, 3), 2: (8, 8), 5: (16, 8)}
LINEARS = {0: (32, 16), 3: (10, 32)}


def listed(front, shapes):
    """The parameters of numbered modules."""
    weights = {f"{front}.{number}.weight": shape for number, shape in shapes.items()}
    return weights | {f"{front}.{number}.bias": shape[:1] for number, shape in shapes.items()}


def match(have, want):
    sides = ({n: Slot(shape, "float32") for n, shape in side.items()} for side in (have, want))
    return matched(*sides)


def rules(have, want):
    return [one.text for one in match(have, want).report.renamed]


def test_a_whole_front_that_is_another_word_is_concluded():
    have, want = listed("backbone", SAME), listed("encoder", SAME)
    found = match(have, want)
    assert found.pairs == dict(zip(want, have, strict=True))
    (rule,) = found.report.renamed
    assert (rule.text, rule.rule) == ("backbone. -> encoder.", r"^backbone\.=>encoder.")


def test_so_it_is_beside_what_is_equal_and_beside_other_fronts():
    rest = listed("classifier", LINEARS)
    assert rules(listed("features", CONVS) | rest, listed("backbone", CONVS) | rest) == [
        "features. -> backbone."
    ]
    have = listed("features", CONVS) | rest
    want = listed("backbone", CONVS) | listed("head", LINEARS)
    assert rules(have, want) == ["features. -> backbone.", "classifier. -> head."]


def test_in_every_layer_as_well():
    sides = (
        {f"layers.{n}.{at}": shape for n in range(3) for at, shape in listed(part, SAME).items()}
        for part in ("mlp", "ffn")
    )
    assert rules(*sides) == ["layers.*.mlp. -> layers.*.ffn."]


def test_counters_that_an_old_file_lacks_may_lack():
    want = listed("encoder", SAME) | {"encoder.1.running_mean": (4,)}
    have = {name.replace("encoder", "backbone"): shape for name, shape in want.items()}
    want["encoder.1.num_batches_tracked"] = ()
    assert match(have, want).report.fits


@pytest.mark.parametrize(
    ("have", "want"),
    [
        (listed("mlp_module", {0: (4, 4)}), listed("mlp", {0: (4, 4)})),
        ({"backbone.weight": (4, 4)}, {"encoder.weight": (4, 4)}),
        (listed("backbone", {0: (4, 4), 1: (4, 4)}), listed("encoder", {1: (4, 4), 2: (4, 4)})),
        (listed("backbone", SAME), listed("encoder", SAME | {3: (4, 4)})),
        (listed("backbone", SAME | {3: (4, 4)}), listed("encoder", SAME)),
        (listed("backbone", CONVS), listed("encoder", CONVS | {5: (17, 8)})),
        (listed("stage1", SAME) | listed("stage2", CONVS),
         listed("stage2", SAME) | listed("stage3", CONVS)),
        (listed("0", SAME), listed("1", SAME)),
    ],
)  # fmt: skip
def test_what_is_not_whole_or_has_one_module_is_a_question(have, want):
    found = match(have, want)
    assert found.pairs == {}
    assert found.report.ambiguous


@pytest.mark.parametrize(
    ("have", "want"),
    [
        (listed("encoder", SAME), listed("encoder_q", SAME) | listed("encoder_k", SAME)),
        (listed("student", SAME) | listed("teacher", SAME), listed("net", SAME)),
        (listed("model", SAME) | listed("ema", {0: (4, 4), 1: (4, 4)}), listed("net", SAME)),
        (listed("net", SAME), listed("model", SAME) | listed("ema", {0: (4, 4), 1: (4, 4)})),
        (listed("a", SAME) | listed("b", SAME), listed("x", SAME) | listed("y", SAME)),
    ],
)  # fmt: skip
def test_where_another_subtree_is_like_it_it_is_a_question(have, want):
    found = match(have, want)
    assert found.pairs == {}
    assert found.report.ambiguous


def test_one_that_is_met_by_its_name_is_another_too():
    both = listed("q", SAME) | listed("k", SAME)
    found = match(listed("q", SAME) | listed("old", SAME), both)
    assert set(found.pairs) == set(listed("q", SAME))


NUMBERS = st.dictionaries(
    st.integers(0, 4), st.sampled_from([(4, 4), (4, 3), (3, 4)]), min_size=1, max_size=4
)
FRONTS = st.dictionaries(st.sampled_from("abcd"), NUMBERS, min_size=1, max_size=4)


@given(FRONTS, st.data())
def test_nothing_that_is_concluded_is_another_tensor(fronts, data):
    renamed = data.draw(
        st.lists(st.sampled_from("uvwxyz"), min_size=4, max_size=4, unique=True)
    )  # fmt: skip
    moved = data.draw(st.sets(st.sampled_from(sorted(fronts)), min_size=1))
    new = {at: fresh if at in moved else at for at, fresh in zip(fronts, renamed, strict=False)}
    have: dict[str, tuple[int, ...]] = {}
    want: dict[str, tuple[int, ...]] = {}
    for at, shapes in fronts.items():
        have |= listed(at, shapes)
        want |= listed(new[at], shapes)
    true = dict(zip(want, have, strict=True))
    for side in (have, want):
        if data.draw(st.booleans()):
            for name, shape in listed("more", data.draw(NUMBERS)).items():
                side.setdefault(name, shape)
    for one, other, pairs in (
        (have, want, true),
        (want, have, {own: name for name, own in true.items()}),
    ):
        found = match(one, other).pairs
        assert {name: own for name, own in found.items() if name in pairs} == {
            name: pairs[name] for name in found if name in pairs
        }
