"""Objects as plain data: against Python itself, whichever protocol pickled them."""

import argparse
import collections
import datetime
import decimal
import enum
import functools
import ipaddress
import pathlib
import pickle
import types
import uuid
from itertools import product

import numpy as np
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


@given(st.lists(st.text("ab./\\", min_size=1)), protocols, st.booleans())
def test_paths_become_their_text(parts, protocol, windows):
    path = (pathlib.PureWindowsPath if windows else pathlib.PurePosixPath)(*parts)
    assert form(path, protocol) == str(pickle.loads(pickle.dumps(path)))


def test_what_an_object_holds():
    for protocol, (value, expected) in product(
        range(6),
        [
            (argparse.Namespace(lr=0.1, gpus=[0, 1]), {"lr": 0.1, "gpus": [0, 1]}),
            (argparse.Namespace(), {}),
            (types.SimpleNamespace(a=1), {"a": 1}),
            (Empty(), {}),
            (Items([1, 2]), [1, 2]),
            (collections.deque([1, 2], maxlen=3), [1, 2]),
            (collections.deque(), []),
            (collections.defaultdict(list, a=1), {"a": 1}),
            (collections.defaultdict(int), {}),
            (Noted(a=1), {"a": 1}),
        ],
    ):
        found = form(value, protocol)
        assert found == expected, (protocol, value)
        assert type(found) is type(expected), (protocol, value)


def test_slots_are_attributes():
    for protocol in range(2, 6):
        assert form(Slotted(), protocol) == {"a": 1, "b": [2]}, protocol
        assert form(Both(), protocol) == {"a": 1, "b": 2}, protocol


def test_attributes_that_are_the_items_are_told_once():
    for protocol in range(2, 6):
        found = form(Attributes(a=1, b=2), protocol)
        assert type(found) is dict, protocol
        assert found == {"a": 1, "b": 2}, protocol


def test_attributes_of_a_dict_stay_attributes():
    for protocol in range(6):
        value = Noted(a=1)
        value.note = "x"
        found = form(value, protocol)
        assert isinstance(found, OrderedMap), protocol
        assert found == {"a": 1}, protocol
        assert found.attributes == {"note": "x"}, protocol


def test_a_frozen_set_becomes_a_set():
    for protocol, items in product(range(6), [(), ("a",), (1, 2, 3)]):
        found = form(frozenset(items), protocol)
        assert found.class_name == "builtins.set", (protocol, items)
        assert set(found.args[0]) == set(items), (protocol, items)


def test_what_would_lose_something_remains():
    for value in [
        Point(1, 2), Pair([1, 2]), Odd(), Called(), functools.partial(int, base=8), slice(1, 2),
        range(3), Color.RED, Level.LOW, decimal.Decimal("1.50"), ipaddress.ip_address("10.0.0.1"),
        uuid.SafeUUID.safe, datetime.datetime(2024, 1, 1), datetime.timedelta(1),
        np.array(["ab"]), np.array([1, None], dtype=object), np.dtype([("a", "i4")]),
        np.dtype("M8[ns]"), np.datetime64("2024-01-01"), np.longdouble(1),
    ]:  # fmt: skip
        assert remains(value), value
        assert remains(value, 4), value


def test_a_call_of_a_function_is_no_value():
    for func in (Global("operator", "itemgetter"), Global("net", "make_thing")):
        node = Opaque(func, (1,))
        assert plain_form(node) is node
    made = Opaque(Global("net", "get_backend"), ())
    assert plain_form(made) is made


def test_what_is_accepted_stays():
    for value in ({1, 2}, collections.Counter("aab"), bytearray(b"ab")):
        assert remains(value)


def test_numbers_of_numpy():
    numbers = (
        np.float32(0.1), np.float64("nan"), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True),
        np.complex64(1 + 2j), np.float16(0.25), np.dtype(">f8").type(1.5),
    )  # fmt: skip
    for protocol, value in product(range(6), numbers):
        found = form(value, protocol)
        assert type(found) in (int, float, bool, complex), (protocol, value)
        assert found == value.item() or value != value, (protocol, value)


def test_text_of_numpy():
    for protocol, text in product(range(6), ["", "abc", "é中😀", "a\0b"]):
        assert form(np.str_(text), protocol) == text, (protocol, text)
        assert form(np.bytes_(text.encode()), protocol) == text.encode(), (protocol, text)


def test_types_of_numpy_become_the_text_that_makes_them():
    for code in ["<f4", ">f4", "i1", "?", "<U5", "S3", "<c16", "O"]:
        for protocol in range(6):
            assert np.dtype(form(np.dtype(code), protocol)) == np.dtype(code), code
