"""Live objects on their way into a file: every kind of tensor; what is refused, with its place."""

import argparse
import collections
import dataclasses
import datetime
import enum
import pathlib
import random
import re

import numpy
import pytest
import torch

from ckptool import save
from ckptool.errors import NotRepresentable
from ckptool.tensors.live import freeze
from tests.tensors.judge import assert_same


def both(tmp_path, tree):
    """What torch reads of our file, and of its own."""
    save(tmp_path / "ours.pth", values=tree)
    torch.save({"values": tree}, tmp_path / "theirs.pth")
    return [torch.load(tmp_path / f"{name}.pth", weights_only=True) for name in ("ours", "theirs")]


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    torch.complex32, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_every_type_of_elements(tmp_path):
    raw = torch.arange(96, dtype=torch.uint8)
    made = {str(one): (raw % 2 if one is torch.bool else raw).view(one).clone() for one in DTYPES}
    assert_same(*both(tmp_path, made))


BASE = torch.arange(24.0).reshape(2, 3, 4)
KINDS = {
    "scalar": lambda: torch.tensor(3),
    "empty": lambda: torch.empty(0, 3),
    "transposed": lambda: BASE.transpose(0, 2),
    "channels last": lambda: torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "expanded": lambda: torch.ones(3, 1).expand(3, 4),
    "ties": lambda: [BASE, BASE, BASE.view(-1), BASE[1]],
    "coordinates": lambda: torch.eye(3).to_sparse(),
    "coordinates twice": lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,)),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "csc": lambda: torch.eye(3).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "quantized": lambda: torch.quantize_per_tensor(torch.eye(3), 0.1, 2, torch.quint8),
    "quantized by channel": lambda: torch.quantize_per_channel(
        torch.eye(2), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
    ),
}


@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:Sparse")
def test_every_kind_of_tensor(tmp_path):
    assert_same(*both(tmp_path, {kind: make() for kind, make in KINDS.items()}))


def test_lazy_bits_are_resolved(tmp_path):
    values = torch.tensor([1 + 2j, 3 - 4j])
    save(tmp_path / "f.pth", values=[values.conj(), values.conj().imag])
    conjugated, negated = torch.load(tmp_path / "f.pth", weights_only=True)["values"]
    assert (conjugated.is_conj(), negated.is_neg()) == (False, False)
    assert conjugated.tolist() == [1 - 2j, 3 + 4j]
    assert negated.tolist() == [-2, 4]


class Marked(torch.Tensor):
    """A class whose elements are where any tensor has them."""


@pytest.mark.parametrize(
    "tensor",
    [
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True),
        torch.ones(2, requires_grad=True) * 1,
        torch.ones(2).as_subclass(Marked),
        torch.nn.Buffer(torch.ones(2)),
    ],
    ids=["parameter", "leaf", "computed", "subclass", "buffer"],
)
def test_what_is_written_is_a_plain_detached_tensor(tmp_path, tensor):
    save(tmp_path / "f.pth", value=tensor)
    found = torch.load(tmp_path / "f.pth", weights_only=True)["value"]
    assert type(found) is torch.Tensor
    assert not found.requires_grad
    assert torch.equal(found, torch.ones(2))


def test_tensors_of_inference_mode_too(tmp_path):
    with torch.inference_mode():
        tensor = torch.ones(2)
    save(tmp_path / "f.pth", value=tensor)
    assert torch.equal(torch.load(tmp_path / "f.pth")["value"], torch.ones(2))


def test_one_storage_seen_as_two_types_is_written_once_for_each(tmp_path):
    raw = torch.arange(8, dtype=torch.uint8)
    save(tmp_path / "f.pth", raw=raw, wide=raw.view(torch.int32), rest=torch.arange(7).byte()[4:])
    tree = torch.load(tmp_path / "f.pth", weights_only=True)
    assert torch.equal(tree["raw"], raw)
    assert torch.equal(tree["wide"], raw.view(torch.int32))
    assert tree["rest"].tolist() == [4, 5, 6]


def test_bytes_that_make_no_whole_element_are_not_written(tmp_path):
    raw = torch.arange(10, dtype=torch.uint8)
    save(tmp_path / "f.pth", wide=raw[:8].view(torch.int32))
    tree = torch.load(tmp_path / "f.pth", weights_only=True)
    assert torch.equal(tree["wide"], raw[:8].view(torch.int32))


def jagged():
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def freed():
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED = {
    "meta": (
        lambda: torch.empty(2, device="meta"),
        r"state_dict/layer\.weight: a tensor on "
        "the meta device has no data",
    ),
    "lazy": (lambda: torch.nn.LazyLinear(2).weight, "a lazy parameter has no shape"),
    "jagged": (jagged, "NestedTensor is a tensor that only its class can read"),
    "freed": (freed, "the memory of this tensor has been freed"),
    "small": (lambda: torch.empty(2, dtype=torch.int4), "a tensor of int4 cannot be written"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_elements_to_write_is_refused_with_its_place(tmp_path, kind):
    make, text = REFUSED[kind]
    with pytest.raises(NotRepresentable, match=text) as caught:
        save(tmp_path / "f.pth", model={"layer.weight": make()})
    assert "state_dict/layer.weight: " in str(caught.value)
    assert not (tmp_path / "f.pth").exists()


def test_elements_that_are_repeated_are_no_others(tmp_path):
    save(tmp_path / "f.pth", x=torch.arange(4.0)[:2].expand(2, 2))
    found = torch.load(tmp_path / "f.pth")["x"]
    assert found.tolist() == [[0, 1], [0, 1]]
    assert found.untyped_storage().nbytes() == 8


def test_all_of_a_storage_in_another_order_is_not_copied():
    turned = torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert not freeze(
        [turned, torch.ones(3, 1, 4).permute(2, 1, 0)], replacements={}, file="f"
    ).changes


class Color(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Settings:
    lr: float = 0.1


class Text(str):
    """Of a class of its own."""


class Bare:
    __slots__ = ()


Pair = collections.namedtuple("Pair", "a b")

REFUSED_TREES = {
    "namespace": (argparse.Namespace(a=1), "argparse.Namespace", "vars(args)"),
    "dataclass": (Settings(), "Settings", "dataclasses.asdict(args)"),
    "named tuple": (Pair(1, 2), "Pair", "args._asdict()"),
    "enumeration": (Color.RED, "Color", "args.value"),
    "path": (pathlib.PurePosixPath("a"), "PurePosixPath", "str(args)"),
    "date": (datetime.date(2024, 1, 1), "datetime.date", "str(args)"),
    "array": (numpy.zeros(2), "numpy.ndarray", "args.tolist()"),
    "frozen set": (frozenset(), "frozenset", "list(args)"),
    "default dict": (collections.defaultdict(int), "collections.defaultdict", "dict(args)"),
    "deque": (collections.deque(), "collections.deque", "list(args)"),
    "range": (range(3), "range", "list(args)"),
    "bytes that change": (bytearray(b"a"), "bytearray", "list(args)"),
    "text of another class": (Text("a"), "Text", "str(args)"),
    "function": (len, "builtin_function_or_method", "repr(args)"),
    "function without a name": (lambda: 1, "function", "repr(args)"),
    "class": (Settings, "type", "vars(args)"),
    "generator of numbers": (torch.Generator(), "torch._C.Generator", "args.get_state()"),
    "anything": (Bare(), "Bare", "repr(args)"),
    "huge number": (1 << 3000, "int has 3,001 bits", "str(args)"),
}


def test_the_place_the_class_and_what_helps_are_told(tmp_path):
    path = tmp_path / "new" / "f.pth"
    for kind, (value, name, remedy) in REFUSED_TREES.items():
        with pytest.raises(NotRepresentable, match=re.escape(name)) as caught:
            save(path, epoch=1, config={"args": value})
        assert str(caught.value).startswith(f"{path}: config/args: "), kind
        assert caught.value.hint == f"save {remedy} instead", kind
        assert not path.parent.exists(), kind


def test_what_helps_names_the_object(tmp_path):
    for value, name in [
        ({"a": numpy.zeros(2)}, "a.tolist()"),
        (("MT19937", numpy.zeros(2)), "value.tolist()"),
        ({"a b": len}, "repr(value)"),
    ]:
        with pytest.raises(NotRepresentable) as caught:
            save(tmp_path / "f.pth", v=value)
        assert caught.value.hint == f"save {name} instead", value


def test_a_place_is_an_address(tmp_path):
    for value, place in [
        ([0, {"a b": object()}], "config/1/a b: object"),
        ({"a.b": (object(),)}, "config/a.b/0: object"),
        ({3: object()}, "config/3: object"),
        ({"a\x1b[2J": object()}, r"config/a\x1b[2J: object"),
        ({Color.RED: 1}, "Color"),
        ({torch.ones(1): 1}, "is a key, but not a plain one"),
        ({object()}, "object"),
    ]:
        with pytest.raises(NotRepresentable) as caught:
            save(tmp_path / "f.pth", config=value)
        assert place in str(caught.value), value


def test_an_extra_state_is_saved_where_it_is_plain(tmp_path):
    class Extra(torch.nn.Linear):
        def __init__(self, state):
            super().__init__(1, 1)
            self.state = state

        def get_extra_state(self):
            return self.state

        def set_extra_state(self, state):
            self.state = state

    save(tmp_path / "f.pth", model=torch.nn.DataParallel(Extra({"scale": [1, torch.ones(1)]})))
    fresh = Extra(None)
    fresh.load_state_dict(torch.load(tmp_path / "f.pth", weights_only=True)["state_dict"])
    assert fresh.state == {"scale": [1, torch.ones(1)]}
    with pytest.raises(NotRepresentable, match="state_dict/_extra_state: object is not plain"):
        save(tmp_path / "g.pth", model=Extra(object()))


def test_what_a_scheduler_keeps_is_looked_at_too(tmp_path):
    class Scale:
        def __init__(self):
            self.made_by = argparse.Namespace()

        def __call__(self, epoch):
            return 1.0

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, Scale())
    with pytest.raises(NotRepresentable, match=r"scheduler/lr_lambdas/0/made_by: argparse"):
        save(tmp_path / "f.pth", scheduler=scheduler)


def test_circles_and_depths_that_no_pickle_has_are_refused(tmp_path):
    inner = []
    circle = (inner,)
    inner.append(circle)
    with pytest.raises(NotRepresentable, match="tuple contains itself"):
        save(tmp_path / "f.pth", value=circle)
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(NotRepresentable, match="nested deeper"):
        save(tmp_path / "f.pth", value=deep)
    while deep:  # bit by bit: Python's own way to free it is as deep
        deep = deep.pop()


FOLLOWED = {
    "masked": numpy.ma.array([1, 2]),
    "error": KeyError("x"),
    "generator": numpy.random.default_rng(0),
    "bits": numpy.random.PCG64(0),
    "seeds": numpy.random.SeedSequence(0),
    "random": random.Random(0),
    "torch": torch.Generator(),
    "dtype": numpy.dtype("f4"),
    "object": object(),
    "range": range(3),
}


def test_what_is_told_to_help_is_taken(tmp_path):
    for kind, value in FOLLOWED.items():
        with pytest.raises(NotRepresentable) as caught:
            save(tmp_path / f"{kind}.pth", v=value)
        told = caught.value.hint.removeprefix("save ").removesuffix(" instead")
        save(tmp_path / f"{kind}.pth", v=eval(told, {"v": value}))
