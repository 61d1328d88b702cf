"""Names of random models, changed at random: what is concluded is never another tensor."""

import random

import torch
from hypothesis import given, settings, strategies as st

import ckptool
from ckptool.matching import Slot, match_keys

WORDS = ["encoder", "decoder", "attn", "mlp", "fc1", "fc2", "q", "k", "v", "norm", "model", "net"]
NEW = {
    "file": ["enc", "self_attn", "ffn", "lin1", "query", "stage", "body", "core", "module_list"],
    "model": ["dec", "key", "blocks", "trunk", "out", "c1", "bert", "first", "mlp_module"],
}
"""No word of one side is one of the other: equal names are one tensor's."""

sizes = st.sampled_from([2, 3, 4, 19, 23])


@st.composite
def leaves(draw):
    out, into = draw(sizes), draw(sizes)
    return draw(
        st.sampled_from(
            [
                {"weight": (out, into), "bias": (out,)},
                {"weight": (out,), "bias": (out,)},
                {"weight": (out, into)},
            ]
        )
    )


def below(name, shapes):
    return {f"{name}.{inner}": shape for inner, shape in shapes.items()}


@st.composite
def lists(draw, inside):
    """Some modules alike, numbered."""
    child, count, step = draw(inside), draw(st.integers(2, 4)), draw(st.sampled_from([1, 1, 2]))
    return {k: v for n in range(count) for k, v in below(str(n * step), child).items()}


@st.composite
def branches(draw, inside):
    """Some modules, named."""
    names = draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=4, unique=True))
    return {k: v for name in names for k, v in below(name, draw(inside)).items()}


def models_of(leaf):
    """Models of such layers, nested and numbered."""
    return branches(st.recursive(leaf, lambda inner: lists(inner) | branches(inner), max_leaves=6))


@st.composite
def changes(draw, names, side):
    """The names as another writer has them; None for one that he has not."""
    names = list(names)
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["word", "place", "prefix", "wrapper"]))
        new = draw(st.sampled_from(NEW[side]))
        paths = sorted({n.rpartition(".")[0] for n in names})
        place = draw(st.sampled_from(paths))
        parts = place.split(".")
        depth = draw(st.integers(1, len(parts)))
        old = parts[depth - 1]
        if kind == "prefix":
            names = [f"{new}.{name}" for name in names]
        elif kind == "wrapper":
            names = [f"module.{name}" for name in names]
        elif old.isdigit() or any(new in name.split(".") for name in names):
            continue
        elif kind == "word":
            names = [
                ".".join([*(new if part == old else part for part in path.split(".")), leaf])
                for path, _, leaf in (name.rpartition(".") for name in names)
            ]
        else:
            before = ".".join(parts[:depth]) + "."
            after = ".".join([*parts[: depth - 1], new]) + "."
            names = [
                after + name[len(before) :] if name.startswith(before) else name for name in names
            ]
    return names


def told_apart(shapes):
    """The same, no two modules of one name but those of one list."""
    words = {}

    def spelled(parts):
        found = []
        for depth, part in enumerate(parts):
            place = tuple("#" if one.isdigit() else one for one in parts[: depth + 1])
            found.append(part if part.isdigit() else f"{part}{words.setdefault(place, len(words))}")
        return found

    split = ((name.rpartition("."), shape) for name, shape in shapes.items())
    return {".".join([*spelled(path.split(".")), leaf]): shape for (path, _, leaf), shape in split}


@st.composite
def cases(draw, leaf=None):
    """Shapes by the file's names and by the model's, and which is which.

    Of names that tell modules apart a part may be missing on one side. Of others it may not: what
    is left would be named like it.
    """
    shapes = draw(models_of(leaves() if leaf is None else leaf))
    gone = draw(st.sampled_from(["file", "model", None]))
    shapes = told_apart(shapes) if gone else shapes
    own = draw(changes(shapes, "file"))
    wanted = draw(changes(shapes, "model"))
    names = list(own if gone == "file" else wanted)
    place = draw(st.sampled_from(names)).split(".")
    lost = ".".join(place[: draw(st.integers(1, len(place)))])
    kept = {name for name in names if gone is None or not f"{name}.".startswith(f"{lost}.")}
    rows = list(zip(own, wanted, shapes.values(), strict=True))
    have = {mine: shape for mine, _, shape in rows if gone != "file" or mine in kept}
    want = {theirs: shape for _, theirs, shape in rows if gone != "model" or theirs in kept}
    return have, want, {theirs: mine for mine, theirs, _ in rows}


@settings(max_examples=300)
@given(cases())
def test_what_is_concluded_is_true(case):
    have, want, truth = case
    state = {name: torch.full(shape, float(n)) for n, (name, shape) in enumerate(have.items())}
    matched, report = ckptool.match(state, want)
    for name, tensor in matched.items():
        assert tensor is state.get(truth[name]), (name, [one.rule for one in report.renamed])
    told = {name for one in report.mismatched for name in (one.name,)}
    assert set(report.missing_keys) == set(want) - set(matched) - told
    taken = {truth[name] for name in matched} | {one.own for one in report.mismatched}
    left = {name for name, _ in report.left_out}
    assert set(report.unexpected_keys) == set(have) - taken - left


BLOCKS = {
    "norm": {"norm.weight": (4,), "fc1.weight": (8, 4), "fc2.weight": (4, 8)},
    "attn": {"q.weight": (4, 4), "k.weight": (4, 4), "out.weight": (4, 4), "out.bias": (4,)},
    "conv": {"conv1.weight": (4, 4), "bn1.weight": (4,), "bn1.bias": (4,)},
}
PARTS = ["encoder", "decoder", "actor", "critic", "student", "teacher", "left", "right"]
FRONTS = ["", "model.", "backbone.", "module."]
LEAST_CONCLUDED = 320
"""Plain cases that are met in all; there may be more, but not fewer."""


def tree(chance):
    """Shapes of two to five parts by their names: blocks, lists of blocks, and heads."""
    shapes = {}
    for part in chance.sample(PARTS, chance.randint(2, 5)):
        block = BLOCKS[chance.choice([*BLOCKS])]
        heads = [""] if chance.random() < 0.4 else [f"{n}." for n in range(chance.randint(2, 3))]
        shapes |= {f"{part}.{head}{name}": s for head in heads for name, s in block.items()}
        if chance.random() < 0.4:
            shapes[f"{part}.head.weight"] = (chance.choice([7, 9]), 4)
    return shapes


def some_of(chance, shapes):
    """Without a part, or without one module of a part."""
    place = chance.choice([*shapes]).split(".")[:-1]
    lost = ".".join(place[: chance.randint(1, len(place))])
    return {name: shape for name, shape in shapes.items() if not name.startswith(f"{lost}.")}


def slots(shapes, front):
    return {front + name: Slot(shape, "float32") for name, shape in shapes.items()}


def test_a_part_that_is_missing_is_not_filled_with_another():
    chance = random.Random(0)
    for _ in range(800):
        whole = tree(chance)
        have, want = some_of(chance, whole), some_of(chance, whole)
        if have.keys().isdisjoint(want):
            continue  # one part alone may well be the other, under a new name
        fronts = chance.sample(FRONTS, 2)
        found = match_keys(slots(have, fronts[0]), slots(want, fronts[1])).pairs
        for name, own in found.items():
            assert name.removeprefix(fronts[1]) == own.removeprefix(fronts[0]), (name, own)


def test_with_nothing_missing_another_front_is_all_that_differs():
    chance, concluded = random.Random(0), 0
    for _ in range(400):
        whole = tree(chance)
        fronts = chance.sample(FRONTS, 2)
        match = match_keys(slots(whole, fronts[0]), slots(whole, fronts[1]))
        concluded += match.report.fits
    assert concluded >= LEAST_CONCLUDED
