"""Digests of objects, and of tensors that are made of parts."""

import argparse
import collections
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptool
from ckptool.errors import LimitExceeded
from ckptool.inspection.fingerprint import Fingerprints
from ckptool.inspection.listing import list_tensors
from ckptool.limits import Limits
from ckptool.model import DeviceValue, Global, Opaque, OrderedMap
from tests.tensors import samples

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
    return Fingerprints(lambda ref: ref.read().hex()).of(node)


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


@pytest.mark.parametrize(
    ("one", "other"),
    [
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
    ],
)  # fmt: skip
def test_what_differs_has_another(one, other):
    assert of(one) != of(other)
    assert of({"x": [one]}) != of({"x": [other]})


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
    for _ in range(100_000):
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


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.tensor([0.0, x]).to_sparse(),
        lambda x: torch.tensor([[0.0, x]]).to_sparse_csr(),
        lambda x: torch.quantize_per_tensor(torch.tensor([1.0, x]), 0.5, 0, torch.qint8),
        lambda x: torch.quantize_per_tensor(torch.ones(2), x, 0, torch.qint8),
        lambda x: torch.nested.nested_tensor([torch.ones(2), torch.tensor([x])]),
        lambda x: {"is", x},
        lambda x: argparse.Namespace(lr=x),
        lambda x: b"x" * 1000 + str(x).encode(),
    ],
)  # fmt: skip
def test_another_value_deep_inside_is_another_digest(tmp_path, make):
    one, same, other = (digests(tmp_path, {"it": make(x)})["it"] for x in (1.0, 1.0, 2.0))
    assert one == same
    assert one is not None
    assert one != other


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
