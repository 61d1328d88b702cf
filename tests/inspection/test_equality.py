"""Values and objects compared structurally."""

import argparse
import collections
import math
import pathlib
import pickle
import warnings
from collections import OrderedDict
from itertools import product

import pytest
import torch
from hypothesis import given, strategies as st

import ckptool
from ckptool.core.model import DeviceValue, Global, Opaque, OrderedMap, Size
from ckptool.errors import LimitExceeded
from ckptool.inspection.equality import Fingerprints, find_first_difference, raw_elements, type_name
from ckptool.inspection.listing import list_tensors
from ckptool.limits import Limits
from tests.inspection.handmade import floats, tensor
from tests.tensors import samples

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(
            st.text(max_size=2) | st.integers(0, 3) | st.booleans(), inner, max_size=3
        )
    ),
    max_leaves=12,
)


def difference(a, b, *rest, **options):
    """The place of the first difference; None: there is none."""
    found = find_first_difference(a, b, *rest, **options)
    return None if found is None else found.place


def shape(value):
    """A value with its types spelled out, so that Python's own `==` tells what is meant."""
    if isinstance(value, dict):
        return "dict", {repr(key): shape(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [shape(item) for item in value]
    return type(value).__name__, repr(value) if value != 0 else "0"


@given(plain, plain)
def test_plain_data_is_equal_where_values_and_types_are(a, b):
    assert (difference(a, b) is None) == (shape(a) == shape(b))


@given(plain)
def test_plain_data_is_equal_to_a_copy(value):
    assert difference(value, pickle.loads(pickle.dumps(value))) is None


def test_types_tell_apart():
    for a, b in [
        (1, 1.0),
        (1, True),
        (0.0, False),
        ([1], (1,)),
        ("a", b"a"),
        (None, False),
        ({}, []),
        (1, "1"),
    ]:
        assert difference({"x": a}, {"x": b}) == "x", a
        assert difference(a, b) == ".", a


def test_nan_is_equal_to_itself():
    for value in [math.nan, complex(math.nan, 1.0), [math.nan]]:
        assert difference(value, pickle.loads(pickle.dumps(value))) is None, value


def test_the_order_of_a_dict_is_no_matter_nor_its_kind():
    assert difference({"a": 1, "b": 2}, OrderedMap({"b": 2, "a": 1})) is None
    assert difference(Size((1, 2)), (1, 2)) is None


def test_keys_of_other_types_are_other_keys():
    assert difference({1: "x"}, {True: "x"}) == "."
    assert difference({1: "x"}, {"1": "x"}) == "."
    assert difference({(1, "a"): "x"}, {(1, "a"): "x"}) is None


def test_the_first_difference_is_told_by_its_place():
    a = {"x": [1, {"deep": 2}], "y": 3}
    b = {"x": [1, {"deep": 5}], "y": 4}
    assert difference(a, b) == "x/1/deep"
    assert difference([1, 2], [1, 2, 3]) == "."


def test_cycles_end():
    def ring(last):
        node = {"here": []}
        node["here"].append(node)
        node["last"] = last
        return node

    assert difference(ring(1), ring(1)) is None
    assert difference(ring(1), ring(2)) == "last"


def test_no_depth_is_too_deep():
    def nest(inner):
        for _ in range(10_000):
            inner = [inner]
        return inner

    assert difference(nest(1), nest(1)) is None
    assert difference(nest(1), nest(2)).count("/") == 9_999


def test_each_pair_is_looked_at_once():
    a, b = [1], [1]
    for _ in range(40):
        a, b = [a, a], [b, b]
    assert difference(a, b) is None  # each pair once


def test_one_container_held_against_many_is_refused():
    shared = []
    with pytest.raises(LimitExceeded, match="the same containers are referenced too many times"):
        difference([shared] * 100, [[] for _ in range(100)], limits=Limits(max_repeats=10))


class Kept:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def opened(tmp_path, name, value, protocol=2):
    path = tmp_path / f"{name}.pth"
    torch.save({"it": value}, path, pickle_protocol=protocol)
    with ckptool.open(path) as checkpoint:
        return checkpoint.root["it"]


def test_objects_are_equal_whatever_protocol_wrote_them(tmp_path):
    for protocol, (value, other) in product(
        [0, 1, 2, 4, 5],
        [
            (argparse.Namespace(lr=0.1, arch="r18"), argparse.Namespace(lr=0.2, arch="r18")),
            (pathlib.PurePosixPath("/a/b"), pathlib.PurePosixPath("/a/c")),
            (collections.Counter("aab"), collections.Counter("abb")),
            (collections.defaultdict(list, a=[1]), collections.defaultdict(list, a=[2])),
            (collections.deque([1, 2], 5), collections.deque([1, 3], 5)),
            ({"a", "b", "c"}, {"a", "b", "d"}),
            (frozenset({1, 2}), frozenset({1, 3})),
            (range(3), range(4)),
            (Kept(a=1, inner=Kept(b=2)), Kept(a=1, inner=Kept(b=3))),
        ],
    ):
        one = opened(tmp_path, "a", value)
        again = opened(tmp_path, "b", value, protocol)
        changed = opened(tmp_path, "c", other, protocol)
        assert difference(one, again) is None, (protocol, value)
        assert difference(one, changed) is not None, (protocol, value)


def test_a_set_has_no_order():
    def made(*items, step=False):
        if step:
            return Opaque(Global("builtins", "set"), ([],), steps=[("add", list(items))])
        return Opaque(Global("builtins", "set"), (list(items),))

    assert difference(made("a", "b"), made("b", "a")) is None
    assert difference(made("a", "b"), made("b", "a", step=True)) is None
    assert difference(made("a"), made("b")) == "."
    assert difference(made(1), made(True)) == "."
    assert difference(made(("a", 1), "b"), made("b", ("a", 1))) is None
    assert difference(made(["no", "key"]), made(["no", "key"])) is None
    assert difference(made("a"), made("a", "b")) == "."


def test_a_class_and_its_arguments_tell_apart():
    def made(name="Thing", args=(), state=None):
        return Opaque(Global("lib", name), args, steps=[] if state is None else [("build", state)])

    assert difference(made(), made("Other")) == "."
    assert difference(made(args=(1,)), made(args=(2,))) == "arguments/0"
    assert difference(made(state={"x": 1}), made(state={"x": 2})) == "attributes/x"
    assert difference(made(state={"x": 1}), made()) == "."
    assert difference(made(), 3) == "."


def test_items_of_the_object_itself_can_be_left_out():
    def made(item):
        func = Global("collections", "deque")
        return Opaque(func, ([],), steps=[("append", [1]), ("append", [item])])

    assert difference(made(1), made(2)) == "items/1"
    assert difference(made(1), made(2), items=False) is None
    portions = Opaque(Global("collections", "deque"), ([],), steps=[("append", [1, 2])])
    assert difference(made(2), portions) is None


def test_devices_count_where_asked():
    a, b = DeviceValue("cuda:0"), DeviceValue("cpu")
    assert difference([a], [b]) == "0"
    assert difference([a], [b], devices=False) is None
    one, other = (tensor(floats(1.0, device=tag), [1]) for tag in ("cuda:0", "cpu"))
    assert difference([one], [other]) == "0"
    assert difference([one], [other], devices=False) is None


def test_tensors_inside_are_asked_about():
    one, other = tensor(floats(1.0), [1]), tensor(floats(2.0), [1])
    asked = []

    def same(a, b, exact):
        asked.append((a, b, exact))
        return False

    assert difference({"w": one}, {"w": other}, same) == "w"
    assert asked == [(one, other, False)]
    assert difference({"w": one}, {"w": other}) is None
    assert difference({"w": one}, {"w": tensor(floats(1.0, 2.0), [2])}) == "w"
    listed = {id(one), id(other)}
    assert difference({"w": one}, {"w": other}, same, listed=listed) is None


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about quantized tensors
def test_quantized_elements_are_their_integers(tmp_path):
    weight = torch.quantize_per_tensor(torch.tensor([0.5, 1.0]), 0.5, 3, torch.qint8)
    torch.save(weight, tmp_path / "q.pth")
    with ckptool.open(tmp_path / "q.pth") as checkpoint:
        found = raw_elements(checkpoint.root)
        assert (found.dtype, found.read()) == ("int8", weight.int_repr().numpy().tobytes())


def test_types_have_the_names_that_list_gives_them(tmp_path):
    for value, name in [
        (1, "int"),
        (None, "NoneType"),
        (OrderedDict(a=1), "OrderedDict"),
        (torch.Size([1]), "torch.Size"),
        (torch.device("cpu"), "torch.device"),
        (torch.float32, "torch.dtype"),
        (torch.ones(1), "torch.Tensor"),
        (torch.ones(1).untyped_storage(), "torch.storage.UntypedStorage"),
        (argparse.Namespace(), "argparse.Namespace"),
        ((1, 2), "tuple"),
    ]:
        assert type_name(opened(tmp_path, "t", value)) == name, value


pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore:.*nested tensors"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per"),
]

PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary())
NODES = st.recursive(
    PLAIN, lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)), max_leaves=9
)


def of(node):
    return Fingerprints(Limits()).compute((), node)


def digests(tmp_path, tree, **options):
    path = tmp_path / "made.pth"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(tree, path, **options)
    found = ckptool.list_tensors(path, hash=True)
    return {row.name: row.digest for row in (*found.tensors, *found.objects)}


def a_set(*items, frozen=False):
    return Opaque(Global("builtins", "frozenset" if frozen else "set"), args=(list(items),))


@given(NODES)
def test_it_is_16_digits_and_does_not_change(node):
    assert of(node) == of(node)
    assert len(of(node)) == 16
    assert of([node]) != of(node)


@given(st.dictionaries(st.text(), PLAIN, min_size=2))
def test_the_order_of_mappings_and_sets_does_not_count(entries):
    turned = dict(reversed(entries.items()))
    assert of(entries) == of(turned) == of(OrderedMap(turned))
    assert of(a_set(*entries)) == of(a_set(*turned))
    assert of(list(entries)) != of(list(turned))


def test_what_differs_has_another():
    for one, other in [
        (1, 1.0), (1, True), (0.0, -0.0), ("a", b"a"), ([1, 2], [2, 1]), ([1], (1,)),
        ({1: 2}, {2: 1}),
        ({"a": [1]}, {"a": [2]}), ([[1], 2], [1, [2]]), (["ab"], ["a", "b"]), (None, []),
        (a_set(1, 2), a_set(1, 3)), (a_set(1), a_set(1, frozen=True)),
        (DeviceValue("cpu"), DeviceValue("cuda:0")),
        (Global("torch", "int8"), Global("torch", "uint8")),
        (Opaque(Global("n", "A")), Opaque(Global("n", "B"))),
        (Opaque(Global("n", "A"), args=(1,)), Opaque(Global("n", "A"), args=(2,))),
        (Opaque(Global("n", "A"), steps=[("build", {"a": 1})]),
         Opaque(Global("n", "A"), steps=[("build", {"a": 2})])),
        (Opaque(Global("n", "A"), steps=[("append", [1, 2])]),
         Opaque(Global("n", "A"), steps=[("append", [1])])),
    ]:  # fmt: skip
        assert of(one) != of(other), one
        assert of({"x": [one]}) != of({"x": [other]}), one


def test_how_items_were_added_in_portions_does_not_count():
    whole = Opaque(Global("n", "A"), steps=[("append", [1, 2, 3])])
    parted = Opaque(Global("n", "A"), steps=[("append", [1, 2]), ("append", [3])])
    assert of(whole) == of(parted)


def test_attributes_of_an_ordered_dict_count():
    one = OrderedMap(a=1)
    one.attributes["_metadata"] = {"": {"version": 2}}
    assert of(one) != of(OrderedMap(a=1))


def test_what_holds_itself_ends():
    one, other = [1], [2]
    one.append(one)
    other.append({"x": other})
    assert of(one) != of(other)


def test_what_is_shared_or_nested_without_end_is_looked_at_once():
    shared = deep = [0]
    for _ in range(200):
        shared = [shared, shared]
    for _ in range(10_000):
        deep = [deep]
    assert of(shared) != of(deep)


def test_every_sample_has_one_digest_in_every_format_and_protocol(tmp_path):
    def tree():
        torch.manual_seed(0)
        made = {name: make() for name, make in samples.SAMPLES.items() if name != "modules"}
        return made | {
            "words": set(map(str, range(50))), "space": argparse.Namespace(a=1, b={1, 2}),
            "default": collections.defaultdict(list, {1: [2]}), "bytes": b"x" * 100,
        }  # fmt: skip

    found = digests(tmp_path, tree())
    assert found == digests(tmp_path, tree(), _use_new_zipfile_serialization=False)
    assert found == digests(tmp_path, tree(), pickle_protocol=4)
    assert all(
        found[name] for name in ("sparse/coo", "quantized/tensor", "nested/strided", "words")
    )


def test_another_value_deep_inside_is_another_digest(tmp_path):
    for make in [
        lambda x: torch.tensor([0.0, x]).to_sparse(),
        lambda x: torch.tensor([[0.0, x]]).to_sparse_csr(),
        lambda x: torch.quantize_per_tensor(torch.tensor([1.0, x]), 0.5, 0, torch.qint8),
        lambda x: torch.quantize_per_tensor(torch.ones(2), x, 0, torch.qint8),
        lambda x: torch.nested.nested_tensor([torch.ones(2), torch.tensor([x])]),
        lambda x: {"is", x},
        lambda x: argparse.Namespace(lr=x),
        lambda x: b"x" * 1000 + str(x).encode(),
    ]:  # fmt: skip
        one, same, other = (digests(tmp_path, {"it": make(x)})["it"] for x in (1.0, 1.0, 2.0))
        assert one == same, make
        assert one is not None, make
        assert one != other, make


def test_plain_tensors_have_none_and_those_inside_objects_count_by_their_own_hash(tmp_path):
    found = digests(tmp_path, {"w": torch.ones(2), "o": argparse.Namespace(w=torch.ones(2))})
    changed = digests(tmp_path, {"w": torch.ones(2), "o": argparse.Namespace(w=torch.zeros(2))})
    assert found["w"] is found["o/w"] is None
    assert found["o"] == changed["o"]


def test_repeated_bytes_of_parts_have_a_limit(tmp_path):
    values = torch.ones(1).expand(1 << 20)
    tree = torch.sparse_coo_tensor(torch.arange(1 << 20)[None], values, check_invariants=False)
    torch.save(tree, tmp_path / "made.pth")
    with ckptool.open(tmp_path / "made.pth") as checkpoint, pytest.raises(LimitExceeded):
        list_tensors(checkpoint, hash=True, limits=Limits(max_repeated_bytes=1 << 10))


def test_without_hash_nothing_is_read(tmp_path):
    torch.save({"s": torch.eye(2).to_sparse(), "o": {1}}, tmp_path / "made.pth")
    found = ckptool.list_tensors(tmp_path / "made.pth")
    assert [row.digest for row in (*found.tensors, *found.objects)] == [None, None]
