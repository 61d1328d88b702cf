"""`verify` finds what is damaged, and says so in a sentence: a sample of what `make soak` does."""

import random

import pytest

from tests.damage import SAMPLES, Damaged

EACH = 8
"""Of each format, of each way to damage it: more than 100 in all."""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", SAMPLES)
def test_what_is_turned_over_cut_or_spliced_is_found_where_anything_covers_it(kind, memory_path):
    damaged = Damaged(kind, memory_path)
    code, said = damaged.verified(damaged.files[0], damaged.whole[damaged.files[0]])
    assert code == 0, said
    chance = random.Random(f"{kind} 1")
    for damage in (damaged.flip, damaged.cut):
        assert not list(filter(None, [damage(chance) for _ in range(EACH)]))
    others = list(damaged.whole.values())
    assert not list(filter(None, [damaged.splice(chance, others) for _ in range(EACH)]))
