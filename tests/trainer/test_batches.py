"""Which samples make which batch, and whose share they are."""

import torch
from hypothesis import given, strategies as st

from ckptool.trainer.data import Batches, select_share

sizes = st.integers(1, 60)
seeds = st.integers(0, 2**40)
plans = st.builds(Batches, st.integers(1, 300), sizes, st.integers(1, 5), seeds)


def rows(steps):
    return [row for step in steps for batch in step for row in batch]


@given(plans, st.integers(0, 2000))
def test_every_row_comes_once_an_epoch(batches, epoch):
    steps = list(batches.iterate_epoch(epoch))
    assert sorted(rows(steps)) == list(range(batches.samples))
    assert len(steps) == batches.steps
    every = [batch for step in steps for batch in step]
    assert all(len(step) == batches.accumulate for step in steps[:-1])
    assert all(len(batch) == batches.batch_size for batch in every[:-1])
    assert all(every)


@given(plans, st.integers(0, 2000), st.data())
def test_who_goes_on_in_the_middle_sees_the_rest(batches, epoch, data):
    first = data.draw(st.integers(0, batches.steps))
    assert list(batches.iterate_epoch(epoch, first)) == list(batches.iterate_epoch(epoch))[first:]


@given(plans, st.integers(0, 2000))
def test_the_order_follows_from_seed_and_epoch_alone(batches, epoch):
    other = Batches(batches.samples, batches.samples, 1, batches.seed)
    torch.manual_seed(epoch)
    assert rows(batches.iterate_epoch(epoch)) == rows(other.iterate_epoch(epoch))
    assert torch.initial_seed() == epoch


@given(seeds, st.integers(0, 2000))
def test_another_epoch_or_seed_is_another_order(seed, epoch):
    order = rows(Batches(50, 7, 1, seed).iterate_epoch(epoch))
    assert order != rows(Batches(50, 7, 1, seed).iterate_epoch(epoch + 1))
    assert order != rows(Batches(50, 7, 1, seed + 1).iterate_epoch(epoch))


@given(st.integers(0, 200), st.integers(1, 20))
def test_shares_make_the_batch_and_are_those_of_torch(length, processes):
    batch = list(range(1000, 1000 + length))
    shares = [select_share(batch, rank, processes) for rank in range(processes)]
    assert [row for part in shares for row in part] == batch
    chunks = torch.tensor(batch).chunk(processes) if batch else ()
    assert [part for part in shares if part] == [chunk.tolist() for chunk in chunks]
    assert shares == sorted(shares, key=lambda part: not part)  # those without any are the last


def test_the_shares_of_the_tutorial():
    for samples, processes, wanted in [
        (30, 1, [30]),
        (30, 2, [15, 15]),
        (30, 3, [10, 10, 10]),
        (30, 4, [8, 8, 8, 6]),
        (30, 8, [4, 4, 4, 4, 4, 4, 4, 2]),
        (10, 8, [2, 2, 2, 2, 2, 0, 0, 0]),
        (2, 3, [1, 1, 0]),
    ]:
        batch = list(range(samples))
        assert [len(select_share(batch, rank, processes)) for rank in range(processes)] == wanted, (
            samples
        )
