"""What is written back is what was read: for Python's unpickler and for torch's safe one."""

import argparse
import collections
import datetime
import enum
import functools
import io
import pathlib
import pickle
import pickletools
from itertools import product

import numpy as np
import pytest
from hypothesis import given

from ckptool.core.model import Opaque
from ckptool.errors import NotRepresentable
from ckptool.formats import open_checkpoint
from ckptool.symbolic.encoder import encode, find_blockers
from tests.symbolic.pickles import read
from tests.symbolic.test_machine import trees

ACCEPTED = {
    "PROTO", "STOP", "GLOBAL", "NEWOBJ", "REDUCE", "BUILD", "APPEND", "APPENDS", "SETITEM",
    "SETITEMS", "MARK", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE", "EMPTY_LIST",
    "EMPTY_DICT", "EMPTY_SET", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2",
    "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING", "LONG1", "BINGET", "LONG_BINGET", "BINPUT",
    "LONG_BINPUT", "BINPERSID",
}  # fmt: skip


def rewritten(value, protocol=2):
    return pickle.loads(encode(read(pickle.dumps(value, protocol)).root).data)


@given(trees)
def test_plain_data_survives_and_uses_accepted_opcodes_alone(tree):
    for protocol in range(6):
        data = encode(read(pickle.dumps(tree, protocol)).root).data
        assert pickle.loads(data) == tree, protocol
        assert {opcode.name for opcode, _, _ in pickletools.genops(data)} <= ACCEPTED, protocol


class Color(enum.Enum):
    RED = 1


class Outer:
    class Inner:
        def __init__(self):
            self.value = 3

        def __eq__(self, other):
            return isinstance(other, Outer.Inner) and other.value == self.value

        __hash__ = None


class Slots:
    __slots__ = ("a", "b")

    def __init__(self):
        self.a, self.b = 1, [2]

    def __eq__(self, other):
        return (self.a, self.b) == (other.a, other.b)

    __hash__ = None


class WithKeywords:
    def __new__(cls, *, size):
        made = super().__new__(cls)
        made.size = size
        return made

    def __getnewargs_ex__(self):
        return (), {"size": self.size}

    def __eq__(self, other):
        return self.size == other.size

    __hash__ = None


class Items(list):
    """A list with an attribute."""


Point = collections.namedtuple("Point", "x y")

OBJECTS = [
    argparse.Namespace(lr=0.1, deep={"a": [1]}),
    pathlib.PurePosixPath("/a/b"),
    datetime.datetime(2020, 1, 2, 3),
    slice(1, 2),
    range(3),
    bytearray(b"abc\xff"),
    {1, 2},
    frozenset("ab"),
    collections.Counter("aab"),
    collections.defaultdict(list, {1: [2]}),
    collections.deque([1, 2], maxlen=5),
    Point(1, 2),
    Color.RED,
    Outer.Inner(),
    Slots(),
    WithKeywords(size=3),
    2**1000,
    -(2**63),
    "\ud800 lone",
    int,
    np.float64(3.5),
    np.int64(-3),
    np.dtype("f4"),
]


def test_objects_come_back_as_they_were():
    for value in OBJECTS:
        # Python itself cannot write some in the older protocols.
        first = 2 if isinstance(value, (Slots, WithKeywords)) else 0
        for protocol in range(first, 6):
            assert rewritten(value, protocol) == value, (value, protocol)


def test_arrays_come_back_as_they_were():
    for protocol, array in product(
        [0, 1, 2, 3, 4, 5],
        [
            np.arange(6.0).reshape(2, 3),
            np.asfortranarray(np.arange(6).reshape(2, 3)),
            np.arange(3, dtype=">i4"),
            np.array(["a", "bc"]),
            np.array([1, "x", None], dtype=object),
            np.zeros((0, 3)),
            np.array(5, dtype=np.float16),
        ],
    ):
        again = rewritten({"a": array}, protocol)["a"]
        assert again.dtype == pickle.loads(pickle.dumps(array, protocol)).dtype, (protocol, array)
        np.testing.assert_array_equal(again, array)
        assert again.flags.f_contiguous == array.flags.f_contiguous, (protocol, array)


def test_partial_and_subclasses_keep_function_state_and_items():
    again = rewritten(functools.partial(int, base=2))
    assert (again.func, again.keywords) == (int, {"base": 2})
    items = Items([1, 2])
    items.note = "x"
    again = rewritten(items)
    assert (type(again), list(again), again.note) == (Items, [1, 2], "x")


def test_sharing_and_cycles_survive():
    for protocol in [0, 2, 4]:
        loop = argparse.Namespace()
        loop.me, loop.list = loop, [1]
        loop.again = loop.list
        tuple_loop: tuple = ([],)
        tuple_loop[0].append(tuple_loop)
        again = rewritten([loop, tuple_loop], protocol)
        assert again[0].me is again[0], protocol
        assert again[0].list is again[0].again, protocol
        assert again[1][0][0] is again[1], protocol


def test_deep_nesting_takes_no_recursion():
    data = b"\x80\x02" + b"]" * 5001 + b"a" * 5000 + b"."
    lists = [code for code, _, _ in pickletools.genops(encode(read(data).root).data)]
    assert sum(code.name == "EMPTY_LIST" for code in lists) == 5001


def test_an_object_that_holds_itself_among_its_arguments_is_refused():
    items: list = []
    made = Opaque(read(b"\x80\x02cbuiltins\nset\n.").root, (items,))
    items.append(made)
    with pytest.raises(
        NotRepresentable, match=r"an object of class builtins\.set contains itself in its arguments"
    ):
        encode(made)


def test_a_name_with_a_line_break_cannot_be_written():
    bad = read(b"\x80\x04\x8c\x03a\nb\x8c\x01c\x93.").root
    with pytest.raises(NotRepresentable):
        encode(bad)


def test_blockers_are_the_classes_that_weights_only_refuses():
    tree = read(pickle.dumps({"a": argparse.Namespace(), "b": {1}, "c": b"x"}, 2)).root
    assert find_blockers(tree) == ("argparse.Namespace",)


def test_storages_are_named_by_position_or_by_a_key_of_the_callers(fixtures):
    with open_checkpoint(fixtures / "torch-1.6.0" / "odd.pth") as checkpoint:
        own = encode(checkpoint.root, key_of=lambda storage: storage.key)
        numbered = encode(checkpoint.root)
    assert own.storages == numbered.storages
    keys = [storage.key for storage in own.storages]
    assert keys_in(own.data) == keys
    assert keys_in(numbered.data) == [str(position) for position in range(len(keys))]
    assert keys != keys_in(numbered.data)


def keys_in(data):
    """The storage keys that a pickle mentions, each once, in order."""
    keys = {}

    class Reader(pickle.Unpickler):
        def persistent_load(self, pid):
            return keys.setdefault(pid[2])

        def find_class(self, module, name):
            return lambda *args: dict(*args) if name == "OrderedDict" else None

    Reader(io.BytesIO(data)).load()
    return list(keys)
