"""What torch_xla computes on; where it is not installed, a run says so before anything else."""

import importlib.util

import pytest
import torch

from ckptool.errors import TrainingError, UsageError
from ckptool.trainer.devices import devices_here
from tests.trainer.runs import Told, net, run


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is not None, reason="it is installed")
def test_without_torch_xla_it_is_told_how_to_get_it(tmp_path):
    with pytest.raises(TrainingError, match="torch_xla, which cannot be imported") as caught:
        run(tmp_path / "out", strategy="xla")
    assert caught.value.hint.startswith("pip install 'torch_xla[tpu]")
    assert not (tmp_path / "out").exists()


def test_xla_is_no_device_of_another_strategy(tmp_path):
    with pytest.raises(TrainingError, match="xla has a strategy of its own") as caught:
        run(tmp_path / "out", device="xla")
    assert caught.value.hint == "--strategy xla"


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs torch_xla")
class TestWithTorchXla:
    """With PJRT_DEVICE=CPU; it takes torch of its own number."""

    @pytest.mark.parametrize("kind", ["full", "wrapped", "module"])
    def test_what_it_saves_is_of_the_cpu(self, tmp_path, kind):
        told = Told()
        run(tmp_path, told, strategy="xla", device="auto", save=kind, epochs=1)
        assert told.notes[0] == "there is no TPU: xla:0 is this machine's CPU"
        held = torch.load(tmp_path / "last.pth", weights_only=kind != "module")
        state = held.state_dict() if kind == "module" else held["state_dict"]
        assert {one.device.type for one in state.values()} == {"cpu"}

    def test_it_trains_as_one_process_does(self, tmp_path):
        run(tmp_path / "single", model=net(dropout=0.0))
        run(tmp_path / "xla", strategy="xla", device="xla", model=net(dropout=0.0))
        one, two = (torch.load(tmp_path / out / "last.pth") for out in ("single", "xla"))
        for name, tensor in one["state_dict"].items():
            torch.testing.assert_close(two["state_dict"][name], tensor, rtol=1e-4, atol=1e-5)

    def test_another_device_is_refused(self, tmp_path):
        with pytest.raises(UsageError, match="and not cpu"):
            run(tmp_path / "out", strategy="xla", device="cpu")

    def test_its_devices_are_listed(self):
        assert ("xla:0", False) in [(one.name, one.is_current) for one in devices_here().devices]
