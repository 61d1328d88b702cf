"""Bytes of a file straight into tensors: which can be, in what blocks, and checked before."""

import pytest
import torch
from torch import nn

from ckptool.errors import CorruptFile
from ckptool.files import FileSource
from ckptool.formats import open_checkpoint
from ckptool.loading import fill as reading
from ckptool.loading.fill import Fill, alone, can_fill, check_bytes, fill, stored_bytes


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
        monkeypatch.setattr(reading, "_BLOCK", block)
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
    monkeypatch.setattr(reading, "_SHARED", 1)
    monkeypatch.setattr(reading, "_PIECE", 100)
    state = {str(at): torch.randn(at * 10) for at in range(12)}
    refs = stored(state)
    targets = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    fill([Fill(targets[name], refs[name]) for name in state])
    assert all(torch.equal(targets[name], state[name]) for name in state)


@pytest.mark.parametrize("least", [1, 1 << 30], ids=["two threads", "one thread"])
def test_an_error_ends_it(stored, monkeypatch, least):
    monkeypatch.setattr(reading, "_SHARED", least)
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
    tensors = (first, over, rest, touching, other, torch.zeros(0))
    found = alone(tensors)
    assert [id(tensor) in found for tensor in tensors] == [False, False, True, True, True, True]
    assert id(first) in alone([first, first])
    assert alone([memory, memory[1:2], memory[3:4]]) == set()


def test_bytes_are_held_against_their_checksum(stored, tmp_path):
    refs = stored({"a": torch.arange(9.0), "b": torch.zeros(3)})
    check_bytes(refs.items())
    assert stored_bytes(refs.items()) == 48
    where = refs["a"].data
    data = bytearray((tmp_path / "f.pth").read_bytes())
    data[where.offset + 5] ^= 8
    (tmp_path / "f.pth").write_bytes(data)
    with pytest.raises(CorruptFile, match="tensor 'a' is damaged: its bytes have CRC-32") as caught:
        check_bytes(refs.items())
    assert "ckptool verify" in caught.value.hint
    check_bytes([("b", refs["b"])])


def test_parts_of_a_tensor_are_checked_and_a_storage_only_once(stored):
    whole = torch.zeros(6)
    refs = stored({"a": whole[:2], "b": whole[3:], "s": torch.eye(3).to_sparse()})
    sparse = sum(tensor.nbytes for tensor in refs["s"].tensors_inside())
    assert stored_bytes(refs.items()) == 24 + sparse
