"""Bytes of a file in tensors: which can be read into, in what blocks; and new tensors for old."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from ckptool.errors import CorruptFile
from ckptool.files import FileSource
from ckptool.formats import open_checkpoint
from ckptool.loading import fill as reading
from ckptool.loading.fill import (
    Fill,
    ReplacementMaker,
    can_fill,
    check_bytes,
    count_stored_bytes,
    fill,
    have_separate_memory,
)
from ckptool.loading.load_into import load_into
from ckptool.tensors.live import is_expanded, iterate_blocks, span_of_strides


@pytest.fixture
def stored(tmp_path):
    """Opens what a state dict becomes in a file."""
    opened = []

    def store(state, name="f.pth"):
        torch.save(state, tmp_path / name)
        opened.append(open_checkpoint(tmp_path / name))
        return opened[-1].root

    yield store
    for checkpoint in opened:
        checkpoint.close()


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 7), (2, 3, 4, 5), (1, 1, 9)])
def test_every_element_goes_to_its_place(stored, monkeypatch, shape):
    source = torch.randn(shape)
    refs = stored({"plain": source, "turned": turned(source)})
    for block in (1, 3, 6, 1 << 20):
        monkeypatch.setattr(reading, "_BLOCK_ELEMENTS", block)
        for ref, wanted in ((refs["plain"], source), (refs["turned"], turned(source))):
            for dtype in (torch.float32, torch.float64):
                plain = torch.full(wanted.shape, 9, dtype=dtype)
                other = turned(torch.full(turned(wanted).shape, 9, dtype=dtype))
                for target in (plain, other):
                    assert can_fill(target, ref)
                    fill([Fill(target, ref)])
                    assert torch.equal(target, wanted.to(dtype)), block


def turned(tensor):
    """The same elements, the last dimension first."""
    return tensor.permute(tuple(reversed(range(tensor.dim()))))


def test_two_threads_read_what_is_large(stored, monkeypatch):
    monkeypatch.setattr(reading, "_MIN_PARALLEL_BYTES", 1)
    monkeypatch.setattr(reading, "_BYTES_PER_READ", 100)
    state = {str(at): torch.randn(at * 10) for at in range(12)}
    refs = stored(state)
    targets = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    fill([Fill(targets[name], refs[name]) for name in state])
    assert all(torch.equal(targets[name], state[name]) for name in state)


@pytest.mark.parametrize("least", [1, 1 << 30], ids=["two threads", "one thread"])
def test_an_error_ends_it(stored, monkeypatch, least):
    monkeypatch.setattr(reading, "_MIN_PARALLEL_BYTES", least)
    refs, begun = stored({str(at): torch.ones(4) for at in range(10)}), []

    def fail(self, offset, buffer):
        begun.append(offset)
        raise CorruptFile("no")

    monkeypatch.setattr(FileSource, "read_into", fail)
    with pytest.raises(CorruptFile):
        fill([Fill(torch.zeros(4), ref) for ref in refs.values()])
    assert len(begun) == 1 or least == 1


def test_what_is_not_plain_is_not_filled(stored):
    refs = stored({"a": torch.ones(2, 2), "sparse": torch.eye(2).to_sparse()})
    plain = torch.zeros(2, 2)
    assert can_fill(plain, refs["a"])
    assert can_fill(plain, torch.ones(4))
    assert not can_fill(plain, None)
    assert not can_fill(plain, refs["sparse"])
    assert not can_fill(plain[:1], refs["a"])
    assert not can_fill(plain.to_sparse(), refs["a"])
    assert not can_fill(torch.empty(2, 2, device="meta"), refs["a"])
    assert not can_fill(nn.UninitializedParameter(), refs["a"])
    assert not can_fill(type("Sub", (torch.Tensor,), {})(plain), refs["a"])
    with torch.inference_mode():
        frozen = torch.zeros(2, 2)
    assert not can_fill(frozen, refs["a"])


def test_tensors_that_share_memory_are_found():
    memory = torch.zeros(10)
    first, over, rest, touching, other = (
        memory[:4], memory[2:3], memory[4:8], memory[8:], torch.zeros(4)
    )  # fmt: skip
    assert have_separate_memory([first, rest, touching, other, torch.zeros(0), memory[1:1]])
    assert not have_separate_memory([first, rest, over])
    assert not have_separate_memory([memory, memory[1:2]])


def test_bytes_are_held_against_their_checksum(stored, tmp_path):
    refs = stored({"a": torch.arange(9.0), "b": torch.zeros(3)})
    check_bytes(refs.items())
    assert count_stored_bytes(refs.items()) == 48
    where = refs["a"].data
    data = bytearray((tmp_path / "f.pth").read_bytes())
    data[where.offset + 5] ^= 8
    (tmp_path / "f.pth").write_bytes(data)
    with pytest.raises(CorruptFile, match="CRC-32 is 4cec0ade, expected 3bd34c56") as caught:
        check_bytes(refs.items())
    assert "ckptool verify" in caught.value.hint
    check_bytes([("b", refs["b"])])


def test_parts_of_a_tensor_are_checked_and_a_storage_only_once(stored):
    whole = torch.zeros(6)
    refs = stored({"a": whole[:2], "b": whole[3:], "s": torch.eye(3).to_sparse()})
    sparse = sum(tensor.nbytes for tensor in refs["s"].tensors_inside())
    assert count_stored_bytes(refs.items()) == 24 + sparse


@given(st.lists(st.integers(0, 6), max_size=4), st.integers(1, 40), st.randoms())
def test_cuts_take_every_element_once_and_in_order(shape, most, random):
    axes = list(range(len(shape)))
    random.shuffle(axes)
    whole = torch.arange(torch.Size(shape).numel()).view(shape).permute(axes)
    blocks = [whole[at].reshape(-1) for at in iterate_blocks(whole.shape, most)]
    assert all(0 < len(block) <= most for block in blocks)
    assert [number for block in blocks for number in block.tolist()] == whole.reshape(-1).tolist()


BASE = torch.zeros(6, 8)


def test_an_expanded_tensor_has_a_smaller_extent_than_elements_and_repeats_them():
    row = torch.zeros(3)
    for view, elements in ((row.expand(4, 3), 3), (row[:1].expand(5), 1), (row[:, None], 3)):
        assert span_of_strides(view.shape, view.stride()) == elements
        assert is_expanded(view.shape, view.stride()) == (view.numel() > elements)


def parameter(*shape, **options):
    return nn.Parameter(torch.empty(shape, device="meta", **options))


def test_a_tie_is_one_object_and_another_tensor_another():
    made = ReplacementMaker(cast=True)
    value = torch.ones(2)
    one = made.make(parameter(2), "tie", value)
    assert made.make(parameter(2), "tie", torch.zeros(2)) is one
    other = made.make(parameter(2), None, value)
    assert one.data_ptr() == value.data_ptr() != other.data_ptr()
    assert other.tolist() == [1, 1]


def test_memory_is_given_away_once():
    made = ReplacementMaker(cast=True)
    memory = torch.arange(10.0)
    cuts = [memory[2:5], memory[5:], memory[:2], memory[4:6], memory[0:1], torch.ones(1).expand(3)]
    wanted = [parameter(*cut.shape) for cut in cuts]
    got = [made.make(one, None, cut) for one, cut in zip(wanted, cuts, strict=True)]
    assert [one.data_ptr() == cut.data_ptr() for one, cut in zip(got, cuts, strict=True)] == [
        True, True, True, False, False, False
    ]  # fmt: skip
    assert all(torch.equal(one, cut) for one, cut in zip(got, cuts, strict=True))


def test_types_are_the_models_unless_they_are_to_be_the_files():
    wide = parameter(2, dtype=torch.float64)
    assert ReplacementMaker(cast=True).make(wide, None, torch.ones(2)).dtype == torch.float64
    assert ReplacementMaker(cast=False).make(wide, None, torch.ones(2)).dtype == torch.float32


def test_parameters_and_buffers_stay_what_they_are():
    frozen = parameter(1)
    frozen.requires_grad_(False)
    made = ReplacementMaker(cast=True).make(frozen, None, torch.ones(1))
    assert (type(made), made.requires_grad) == (nn.Parameter, False)
    buffer = torch.empty(1, device="meta")
    made = ReplacementMaker(cast=True).make(buffer, None, nn.Parameter(torch.ones(1)))
    assert (type(made), made.requires_grad) == (torch.Tensor, False)
    held = nn.Parameter(torch.ones(1))
    assert ReplacementMaker(cast=True).make(parameter(1), None, held) is held


@pytest.mark.parametrize("trained", [True, False])
def test_what_is_trained_is_the_models_choice_as_in_torch(tmp_path, trained):
    state = {"weight": nn.Parameter(torch.ones(2, 2), requires_grad=not trained)}
    torch.save(state, tmp_path / "f.pth")
    for source in (state, tmp_path / "f.pth"):
        by_torch, own = (nn.Linear(2, 2, bias=False).requires_grad_(trained) for _ in range(2))
        load_into(own, source, assign=True)
        assert state["weight"].requires_grad != trained
        by_torch.load_state_dict(torch.load(tmp_path / "f.pth"), assign=True)
        assert own.weight.requires_grad == by_torch.weight.requires_grad == trained
        assert torch.equal(own.weight, by_torch.weight)


def test_a_scalar_that_was_a_list_of_one():
    assert ReplacementMaker(cast=True).make(parameter(), None, torch.ones(1)).shape == ()


def test_what_is_assigned_in_inference_mode_can_be_trained(tmp_path):
    source = nn.Linear(2, 2)
    torch.save(source.state_dict(), tmp_path / "f.pth")
    for held in (tmp_path / "f.pth", source.state_dict()):
        with torch.device("meta"):
            model = nn.Linear(2, 2)
        with torch.inference_mode():
            load_into(model, held)
        assert not model.weight.is_inference()
        model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad is not None
