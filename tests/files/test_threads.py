"""Jobs of several threads: results in order, errors, and no more begun than needed."""

import itertools

import pytest

from ckptool.files.threads import in_order


def test_results_come_in_the_order_of_the_jobs():
    assert list(in_order(lambda number: number * number, range(100))) == [n * n for n in range(100)]
    assert list(in_order(str, [])) == []


def test_jobs_without_end_are_begun_as_their_results_are_wanted():
    begun = []
    results = in_order(begun.append, itertools.count())
    for _ in range(50):
        next(results)
    results.close()
    assert 50 <= len(begun) < 100


def test_an_error_ends_it_and_what_has_not_begun_is_dropped():
    begun = []

    def work(number):
        begun.append(number)
        if number == 20:
            raise ZeroDivisionError
        return number

    results = in_order(work, range(10_000))
    assert list(itertools.islice(results, 20)) == list(range(20))
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert len(begun) < 100
