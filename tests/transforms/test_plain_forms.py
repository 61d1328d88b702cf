"""Objects as plain data: against Python itself, whichever protocol pickled them."""

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import pickle
import types
import uuid

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.files import ByteRange, MemorySource
from ckptool.model import Global, Opaque, OrderedMap
from ckptool.symbolic import unpickle
from ckptool.transforms.plain import plain_form

protocols = st.integers(0, 5)


def read(value, protocol=2):
    """What ckptool makes of a pickled object."""
    data = pickle.dumps(value, protocol)
    return unpickle(ByteRange(MemorySource(data, "in.pkl"), 0, len(data))).root


def form(value, protocol=2):
    node = read(value, protocol)
    return plain_form(node) if isinstance(node, Opaque) else node


def remains(value, protocol=2):
    node = read(value, protocol)
    return plain_form(node) is node


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 3


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self):
        self.a, self.b = 1, [2]


class Both:
    """Attributes in a dict and in slots."""

    __slots__ = ("__dict__", "a")

    def __init__(self):
        self.a, self.b = 1, 2


class Empty:
    pass


class Attributes(dict):
    """As easydict and its like: the items are the attributes."""

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


class Noted(collections.OrderedDict):
    """Attributes beside the items."""


class Items(list):
    pass


class Pair(tuple):
    pass


class Odd:
    """A state that is no dict."""

    def __getstate__(self):
        return [1, 2]

    def __setstate__(self, state):
        pass


class Called:
    """Arguments whose meaning only it knows."""

    def __reduce__(self):
        return Called, (1, 2)


Point = collections.namedtuple("Point", "x y")


@given(
    st.datetimes(
        timezones=st.none()
        | st.integers(-1439, 1439).map(lambda m: datetime.timezone(datetime.timedelta(minutes=m)))
    )
    | st.dates()
    | st.times(),
    protocols,
)
def test_moments_become_the_text_that_gives_them_back(moment, protocol):
    if getattr(moment, "fold", 0) and protocol > 3:  # older ones do not have it
        assert remains(moment, protocol)
    else:
        assert form(moment, protocol) == moment.isoformat()


@given(st.timedeltas(), protocols)
def test_spans_become_seconds_where_a_float_holds_them(span, protocol):
    seconds = span.total_seconds()
    if datetime.timedelta(seconds=seconds) == span:
        assert form(span, protocol) == seconds
    else:
        assert remains(span, protocol)


@given(st.decimals(), protocols)
def test_decimals_keep_every_digit(number, protocol):
    assert form(number, protocol) == str(number)


@given(st.fractions(), protocols)
def test_fractions_give_themselves_back(number, protocol):
    assert fractions.Fraction(form(number, protocol)) == number


@given(st.uuids(), protocols)
def test_uuids_are_spelled_as_usual(number, protocol):
    assert form(number, protocol) == str(number)


@given(st.lists(st.text("ab./\\", min_size=1)), protocols, st.booleans())
def test_paths_become_their_text(parts, protocol, windows):
    path = (pathlib.PureWindowsPath if windows else pathlib.PurePosixPath)(*parts)
    assert form(path, protocol) == str(pickle.loads(pickle.dumps(path)))


@given(st.binary(min_size=10, max_size=10) | st.binary(max_size=12))
def test_damaged_moments_remain(packed):
    node = Opaque(Global("datetime", "datetime"), (packed,))
    found = plain_form(node)
    if found is not node:
        assert datetime.datetime.fromisoformat(found) == datetime.datetime(packed)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (argparse.Namespace(lr=0.1, gpus=[0, 1]), {"lr": 0.1, "gpus": [0, 1]}),
        (argparse.Namespace(), {}),
        (types.SimpleNamespace(a=1), {"a": 1}),
        (Empty(), {}),
        (Color.RED, "red"),
        (Level.LOW, 3),
        (Items([1, 2]), [1, 2]),
        (collections.deque([1, 2], maxlen=3), [1, 2]),
        (collections.deque(), []),
        (collections.defaultdict(list, a=1), {"a": 1}),
        (collections.defaultdict(int), {}),
        (range(2, 11, 4), [2, 6, 10]),
        (Noted(a=1), {"a": 1}),
    ],
)
def test_what_an_object_holds(value, expected, protocol):
    found = form(value, protocol)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_slots_are_attributes(protocol):
    assert form(Slotted(), protocol) == {"a": 1, "b": [2]}
    assert form(Both(), protocol) == {"a": 1, "b": 2}


@pytest.mark.parametrize("protocol", range(2, 6))
def test_attributes_that_are_the_items_are_told_once(protocol):
    found = form(Attributes(a=1, b=2), protocol)
    assert type(found) is dict
    assert found == {"a": 1, "b": 2}


@pytest.mark.parametrize("protocol", range(6))
def test_attributes_of_a_dict_stay_attributes(protocol):
    value = Noted(a=1)
    value.note = "x"
    found = form(value, protocol)
    assert isinstance(found, OrderedMap)
    assert found == {"a": 1}
    assert found.attributes == {"note": "x"}


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("items", [(), ("a",), (1, 2, 3)])
def test_a_frozen_set_becomes_a_set(items, protocol):
    found = form(frozenset(items), protocol)
    assert found.class_name == "builtins.set"
    assert set(found.args[0]) == set(items)


@pytest.mark.parametrize(
    "value",
    [
        Point(1, 2), Pair([1, 2]), Odd(), Called(), functools.partial(int, base=8), slice(1, 2),
        range(10**9), datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(
            datetime.timedelta(hours=1), "CET")),
        np.array(["ab"]), np.array([1, None], dtype=object), np.dtype([("a", "i4")]),
        np.dtype("M8[ns]"), np.datetime64("2024-01-01"), np.longdouble(1),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_would_lose_something_remains(value):
    assert remains(value)
    assert remains(value, 4)


def test_a_call_of_a_function_is_no_value():
    for func in (Global("operator", "itemgetter"), Global("net", "make_thing")):
        node = Opaque(func, (1,))
        assert plain_form(node) is node
    made = Opaque(Global("net", "get_backend"), ())
    assert plain_form(made) is made


def test_what_is_accepted_stays():
    for value in ({1, 2}, collections.Counter("aab"), bytearray(b"ab")):
        assert remains(value)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "value",
    [np.float32(0.1), np.float64("nan"), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True),
     np.complex64(1 + 2j), np.float16(0.25), np.dtype(">f8").type(1.5)],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_numbers_of_numpy(value, protocol):
    found = form(value, protocol)
    assert type(found) in (int, float, bool, complex)
    assert found == value.item() or value != value


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("text", ["", "abc", "é中😀", "a\0b"])
def test_text_of_numpy(text, protocol):
    assert form(np.str_(text), protocol) == text
    assert form(np.bytes_(text.encode()), protocol) == text.encode()


@pytest.mark.parametrize("code", ["<f4", ">f4", "i1", "?", "<U5", "S3", "<c16", "O"])
def test_types_of_numpy_become_the_text_that_makes_them(code):
    for protocol in range(6):
        assert np.dtype(form(np.dtype(code), protocol)) == np.dtype(code)


def test_uuids_that_are_none_remain():
    node = Opaque(Global("uuid", "UUID"), (), maker="newobj", steps=[("build", {"int": 1 << 128})])
    assert plain_form(node) is node
    assert form(uuid.UUID(int=(1 << 128) - 1)) == "ffffffff-ffff-ffff-ffff-ffffffffffff"
    assert form(decimal.Decimal("1.50")) == "1.50"
