"""Live tensors on their way into a file: every kind that a bare `torch.load` gives back."""

import pytest
import torch

from ckptool import save
from ckptool.errors import NotRepresentable
from ckptool.tensors.live import frozen
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
    "meta": (lambda: torch.empty(2, device="meta"), "on the meta device has no elements"),
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
    assert not frozen([turned, torch.ones(3, 1, 4).permute(2, 1, 0)], instead={}, file="f").changes
