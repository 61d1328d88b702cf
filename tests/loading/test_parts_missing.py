"""Trees of parts that are made alike, of which each side has only some: none gets another's."""

import random

from ckptool.matching import Slot, matched

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
        found = matched(slots(have, fronts[0]), slots(want, fronts[1])).pairs
        for name, own in found.items():
            assert name.removeprefix(fronts[1]) == own.removeprefix(fronts[0]), (name, own)


def test_with_nothing_missing_another_front_is_all_that_differs():
    chance, concluded = random.Random(0), 0
    for _ in range(400):
        whole = tree(chance)
        fronts = chance.sample(FRONTS, 2)
        match = matched(slots(whole, fronts[0]), slots(whole, fronts[1]))
        concluded += match.report.fits
    assert concluded >= LEAST_CONCLUDED
