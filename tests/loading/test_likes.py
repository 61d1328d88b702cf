"""What names are to fit: a reference file by its header alone, a model, a state dict."""

import pytest
import torch

import ckptool
from ckptool.errors import AmbiguousName, NotFound, UsageError
from ckptool.loading.plan import target_like


def test_several_state_dicts_of_a_reference_are_not_guessed_between(tmp_path):
    state = torch.nn.Linear(2, 2).state_dict()
    torch.save({"model": state, "ema": torch.nn.Linear(2, 3).state_dict()}, tmp_path / "ref.pth")
    with pytest.raises(AmbiguousName, match=r"the reference: .*2 state dicts") as caught:
        target_like(tmp_path / "ref.pth")
    assert caught.value.hint == "choose one: `like_key='model'`; or `like_key='ema'`"
    assert target_like(tmp_path / "ref.pth", key="ema").slots["bias"].shape == (3,)
    with pytest.raises(NotFound):
        target_like(tmp_path / "ref.pth", key="gone")


def test_what_is_open_or_in_memory_is_a_reference_too(tmp_path):
    net = torch.nn.Linear(2, 2)
    torch.save(net.state_dict(), tmp_path / "ref.pth")
    with ckptool.open(tmp_path / "ref.pth") as checkpoint:
        assert target_like(checkpoint).label == str(tmp_path / "ref.pth")
    assert list(target_like(net).slots) == list(target_like(net.state_dict()).slots)
    with pytest.raises(UsageError, match="fit a int"):
        target_like(3)


@pytest.mark.parametrize("sizes", [None, 3, (2.0,), (-1,), (2, "x")])
def test_of_what_is_no_shape_it_is_said_what_one_is(sizes):
    with pytest.raises(NotFound, match="neither a state dict nor a dict of shapes") as caught:
        target_like({"weight": sizes})
    assert caught.value.hint.endswith("{'weight': (4, 3)}")
