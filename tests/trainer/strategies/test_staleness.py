"""Which gradients may be on their way so that none gets too old, in whatever order they come."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.trainer.strategies.parameter_server import InFlight


@given(st.integers(0, 6), st.integers(1, 5), st.data())
def test_no_gradient_is_older_than_the_limit_in_any_order_of_arrival(limit, workers, data):
    in_flight, open_steps, ages = InFlight(limit), [], []
    for number in range(30):
        while not in_flight.has_room or len(open_steps) == workers:
            arrived = data.draw(st.sampled_from(open_steps))
            open_steps.remove(arrived)
            ages.append(in_flight.end(arrived))
        in_flight.begin(number)
        open_steps.append(number)
    ages += [in_flight.end(number) for number in open_steps]
    assert max(ages) <= limit
    assert len(ages) == 30 == in_flight.applied
    assert len(in_flight) == 0


@pytest.mark.parametrize("limit", [0, 1, 4])
def test_as_many_as_the_limit_and_one_more_are_in_flight_at_once(limit):
    in_flight = InFlight(limit)
    while in_flight.has_room:
        in_flight.begin(len(in_flight))
    assert len(in_flight) == limit + 1


def test_one_that_does_not_come_back_gets_as_old_as_it_may():
    in_flight = InFlight(3)
    in_flight.begin(0)
    number = 0
    while in_flight.has_room:
        number += 1
        in_flight.begin(number)
        in_flight.end(number)
    assert in_flight.end(0) == 3
