"""Ties written out: each name with bytes of its own, in every format."""

import pytest
import torch

import ckptool
from ckptool.transforms import untie


@pytest.mark.parametrize("format", ["torch-zip", "torch-legacy"])
def test_tied_names_get_bytes_of_their_own(tmp_path, format):
    weight = torch.arange(6.0).reshape(2, 3)
    torch.save({"a": weight, "b": weight, "c": weight[:], "view": weight[0]}, tmp_path / "in.pth")
    receipt = ckptool.convert(tmp_path / "in.pth", tmp_path / "out.pth", ties="copy", format=format)
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    assert receipt.tensors == 4
    assert len({found[name].data_ptr() for name in "abc"}) == 3
    assert all(torch.equal(found[name], weight) for name in "abc")
    assert found["view"].data_ptr() == found["a"].data_ptr()


def test_without_ties_nothing_changes(tmp_path):
    torch.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "in.pth")
    with ckptool.open(tmp_path / "in.pth") as checkpoint:
        assert untie(checkpoint) is checkpoint


def test_another_word_is_refused(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "in.pth")
    with pytest.raises(ckptool.UsageError, match="'keep' or 'copy'"):
        ckptool.convert(tmp_path / "in.pth", tmp_path / "out.pth", ties="no")
