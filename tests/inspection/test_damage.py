"""`verify` finds what is damaged, and says so in a sentence: a sample of what `make soak` does."""

import random

import pytest

from tests.damage import SAMPLES, Damaged

EACH = 8
"""Of each format, of each way to damage it: more than 100 in all."""

every_kind = pytest.mark.parametrize("kind", SAMPLES)


@pytest.fixture
def damaged(kind, memory_path):
    return Damaged(kind, memory_path)


def chance(kind):
    return random.Random(f"{kind} 1")


@every_kind
def test_a_bit_that_is_turned_over_is_found_where_anything_covers_it(kind, damaged):
    code, said = damaged.verified(damaged.files[0], damaged.whole[damaged.files[0]])
    assert code == 0, said
    faults = [damaged.flip(found) for found in [chance(kind)] for _ in range(EACH)]
    assert not list(filter(None, faults))


@every_kind
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_cut_short_is_never_called_fine(kind, damaged):
    found = chance(kind)
    assert not list(filter(None, [damaged.cut(found) for _ in range(EACH)]))


@every_kind
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_spliced_is_never_called_fine_with_other_tensors(kind, damaged):
    found, others = chance(kind), list(damaged.whole.values())
    assert not list(filter(None, [damaged.splice(found, others) for _ in range(EACH)]))
