"""A dict that reads its values when it is asked: for all other code a dict like any."""

import copy
import pickle
from collections import OrderedDict

import pytest
import torch

from ckptool.loading.live.unread import Unread, UnreadDict, is_unread, raw

TENSOR = torch.ones(1)


def held():
    return UnreadDict(a=Unread(TENSOR, lambda: 10), b=2)


def into(empty):
    def updated(state):
        empty.clear()
        empty.update(state)
        return empty

    return updated


WAYS = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "stars": lambda state: {**state},
    "or": lambda state: dict(state | {}),
    "reversed or": lambda state: dict({} | state),
    "update": into({}),
    "update of an OrderedDict": into(OrderedDict()),
    "copy": lambda state: state.copy(),
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "items": lambda state: dict(state.items()),
    "items backwards": lambda state: dict(reversed(state.items())),
    "values": lambda state: dict(zip(state, state.values(), strict=True)),
    "values backwards": lambda state: dict(
        zip(reversed(state), reversed(state.values()), strict=True)
    ),
    "pop": lambda state: {name: state.pop(name) for name in list(state)},
    "popitem": lambda state: dict([state.popitem(), state.popitem(last=False)]),
    "get": lambda state: {name: state.get(name) for name in state},
    "setdefault": lambda state: {name: state.setdefault(name) for name in state},
    "read": lambda state: (state.read(), dict(raw(state)))[1],
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_whoever_asks_gets_the_values(way):
    assert dict.__eq__(dict(way(held())), {"a": 10, "b": 2})


def test_it_is_equal_to_what_has_the_same_values():
    assert held() == {"a": 10, "b": 2}
    assert held() != {"a": 10, "b": 3}
    assert "10" in str(held())


def test_it_behaves_as_dicts_do_where_a_name_is_not_in_it():
    state = held()
    with pytest.raises(KeyError):
        state["c"]
    with pytest.raises(KeyError):
        state.pop("c")
    assert (state.get("c"), state.get("c", 1), state.pop("c", 2)) == (None, 1, 2)
    assert (state.setdefault("c", 3), state["c"]) == (3, 3)


def test_a_value_is_read_once_and_is_the_same_for_all():
    read = []

    def value():
        read.append(1)
        return object()

    state = UnreadDict(a=Unread(TENSOR, value))
    part = UnreadDict(raw(state))
    assert is_unread(dict.get(part, "a"), TENSOR)
    assert not is_unread(dict.get(part, "a"), torch.ones(1))
    assert list(part) == ["a"]
    assert len(part) == 1
    assert "a" in part
    assert not read
    assert state["a"] is part["a"] is part["a"]
    assert len(read) == 1
    assert not is_unread(dict.get(part, "a"), TENSOR)
    assert dict(raw({"a": 1})) == {"a": 1}
