"""What `load_into` is asked must be what it can mean."""

import pytest
import torch
from torch import nn

from ckptool.errors import DeviceError, MatchError, UsageError
from ckptool.loading.load_into import load_into
from ckptool.loading.plan import match
from tests.loading.bits import untouched_by

SLIPS = (None, "a=>b", b"a=>b", "", 5, {"a": "b"}, [None], [5], [b"a=>b"], nn.Linear)
"""Given where a list of rules is wanted."""


VALUES = {
    "min_coverage": (float("nan"), -1, 2, "1", True), "allow_missing": (5,),
    "allow_unexpected": ([1],), "strict": ("no", None), "assign": ("x",), "verify": ("q", 1),
    "rules": SLIPS, "prefixes": SLIPS,
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_a_slip_is_refused_with_the_name_of_the_argument_by_match_too(name):
    state = nn.Linear(1, 1).state_dict()
    for value in VALUES[name]:
        model = nn.Linear(1, 1)
        with untouched_by(UsageError, model) as caught:
            load_into(model, state, **{name: value})
        assert any(word in str(caught.value) for word in (name.rstrip("s"), "OLD=NEW")), value
        if VALUES[name] is SLIPS:
            with pytest.raises(UsageError) as again:
                match(state, model, **{name: value})
            told = (caught.value.message, caught.value.hint)
            assert (again.value.message, again.value.hint) == told, value


def test_a_text_in_the_place_of_a_list_is_shown_as_one():
    with pytest.raises(UsageError, match="rules='a=>b' is not a list") as caught:
        match({}, nn.Linear(1, 1), rules="a=>b")
    assert caught.value.hint == "rules=['a=>b']"


def test_a_place_that_is_none_is_noticed_where_it_is_of_no_use():
    for value in ("nope", 5):
        with pytest.raises(DeviceError, match="map_location"):
            load_into(nn.Linear(1, 1), nn.Linear(1, 1).state_dict(), map_location=value)


def test_what_can_be_meant_is_taken():
    load_into(
        nn.Linear(1, 1),
        nn.Linear(1, 1).state_dict(),
        min_coverage=1,
        allow_missing=("a*",),
        allow_unexpected={"b"},
        map_location=torch.device("cpu"),
        assign=False,
        verify=True,
        rules=iter(["^x=>y"]),
    )


def test_statistics_alone_are_nothing_of_the_model():
    model = nn.BatchNorm1d(2)
    state = {"running_mean": torch.ones(2), "running_var": torch.ones(2)}
    with untouched_by(MatchError, model):
        load_into(model, state, strict=False)
    load_into(model, state, strict=False, min_coverage=0)
    assert model.running_mean.tolist() == [1, 1]
