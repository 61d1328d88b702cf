"""Nodes as JSON values and as a few words."""

import math

from ckptool.core.model import DeviceValue, Global, Opaque, OrderedMap, Size
from ckptool.core.values import class_name_of, format_shape, summarize, to_json_value
from tests.inspection.handmade import floats, tensor


def test_a_value_as_json_holds_it():
    for value, wanted in [
        (1, 1), (True, True), (None, None), ("x", "x"), (1.5, 1.5), (math.nan, "nan"),
        (math.inf, "inf"), (1j, "1j"), (b"x", "b'x'"),
    ]:  # fmt: skip
        assert to_json_value(value) == wanted, value
        assert type(to_json_value(value)) is type(wanted), value


def test_a_node_in_a_few_words():
    for node, words in [
        (tensor(floats(1.0, device="cuda:1"), [1]), "tensor float32 [1] on cuda:1"),
        (Opaque(Global("net", "Net")), "net.Net object"),
        (Opaque(Global("np", "scalar"), plain=("float64", 0.5)), "0.5"),
        (Opaque(Global("pathlib", "PosixPath"), args=("a", "b")), "pathlib.PosixPath('a', 'b')"),
        (Opaque(Global("net", "Net"), args=([],)), "net.Net object"),
        (OrderedMap(a=1), "dict of 1"),
        ([1] * 1000, "list of 1,000"),
        ([1, 2], "[1, 2]"),
        (Size((2, 3)), "(2, 3)"),
        (DeviceValue("cuda:0"), "cuda:0"),
        (Global("net", "Net"), "net.Net"),
        (b"bytes", "b'bytes'"),
        (Opaque(Global("builtins", "set"), args=(["b", "a"],)), "{'a', 'b'}"),
        (Opaque(Global("builtins", "set"), steps=[("add", [2, 1])]), "{1, 2}"),
        (Opaque(Global("builtins", "frozenset"), args=([1],)), "frozenset({1})"),
        (Opaque(Global("builtins", "set"), args=(list(range(1000)),)), "set of 1,000"),
        (Opaque(Global("builtins", "set"), args=([(1, 2)],)), "set of 1"),
        (Opaque(Global("builtins", "set"), args=([],)), "set of 0"),
        ("text", "'text'"),
    ]:  # fmt: skip
        assert summarize(node) == words, node


def test_words_are_few_however_long_the_value():
    for node in (
        "x" * 10**6,
        b"x" * 10**6,
        [10**1000],
        Opaque(Global("a", "b"), args=("y" * 999,)),
    ):
        assert len(summarize(node)) <= 60


def test_a_ragged_dimension_is_a_question_mark():
    assert format_shape((2, None, 3)) == "[2, ?, 3]"
    assert format_shape(()) == "[]"


def test_the_class_of_plain_python():
    assert class_name_of(b"") == "builtins.bytes"
    assert class_name_of(DeviceValue("cpu")) == "torch.device"
