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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_coverage", float("nan")),
        ("min_coverage", -1),
        ("min_coverage", 2),
        ("min_coverage", "1"),
        ("min_coverage", True),
        ("allow_missing", 5),
        ("allow_unexpected", [1]),
        ("strict", "no"),
        ("strict", None),
        ("assign", "x"),
        ("verify", "q"),
        ("verify", 1),
        *((name, value) for name in ("rules", "prefixes") for value in SLIPS),
    ],
)
def test_a_slip_is_refused_with_the_name_of_the_argument(name, value):
    model = nn.Linear(1, 1)
    with untouched_by(UsageError, model) as caught:
        load_into(model, nn.Linear(1, 1).state_dict(), **{name: value})
    assert any(word in str(caught.value) for word in (name.rstrip("s"), "OLD=NEW"))


@pytest.mark.parametrize("value", SLIPS)
@pytest.mark.parametrize("name", ["rules", "prefixes"])
def test_match_looks_at_its_arguments_as_load_into_does(name, value):
    state = nn.Linear(1, 1).state_dict()
    told = []
    for asked in (lambda **given: match(state, nn.Linear(1, 1), **given),
                  lambda **given: load_into(nn.Linear(1, 1), state, **given)):  # fmt: skip
        with pytest.raises(UsageError) as caught:
            asked(**{name: value})
        told.append((caught.value.message, caught.value.hint))
    assert told[0] == told[1]


def test_a_text_in_the_place_of_a_list_is_shown_as_one():
    with pytest.raises(UsageError, match="rules='a=>b' is not a list") as caught:
        match({}, nn.Linear(1, 1), rules="a=>b")
    assert caught.value.hint == "rules=['a=>b']"


@pytest.mark.parametrize("value", ["nope", 5])
def test_a_place_that_is_none_is_noticed_where_it_is_of_no_use(value):
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
