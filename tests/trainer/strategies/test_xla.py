"""What torch_xla computes on; where it is not installed, a run says so before anything else."""

import importlib.util
import math
import os
import re

import pytest
import torch
from torch import nn

from ckptool.errors import TrainingError, UsageError
from ckptool.trainer.devices import detect_devices
from tests.trainer.agreeing import KINDS, losses
from tests.trainer.runs import BytesDone, assert_same_run, data, net, run


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is not None, reason="it is installed")
def test_without_torch_xla_it_is_told_how_to_get_it(tmp_path):
    with pytest.raises(TrainingError, match="torch_xla, which cannot be imported") as caught:
        run(tmp_path / "out", strategy="xla")
    assert caught.value.hint.startswith("install it on a TPU with pip install 'torch_xla[tpu]")
    assert not (tmp_path / "out").exists()


def test_xla_is_no_device_of_another_strategy(tmp_path):
    with pytest.raises(TrainingError, match="--device xla needs --strategy xla"):
        run(tmp_path / "out", device="xla")


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs torch_xla")
class TestWithTorchXla:
    """With PJRT_DEVICE=CPU and CPU_NUM_DEVICES, by `make compat`; it takes torch of its number."""

    @pytest.fixture
    def count(self):
        """How many devices there are."""
        return int(os.environ["CPU_NUM_DEVICES"])

    @pytest.mark.parametrize("kind", ["full", "wrapped", "unwrapped", "module"])
    def test_what_it_saves_is_of_the_cpu(self, tmp_path, kind, count):
        told = BytesDone()
        run(tmp_path, told, strategy="xla", device="auto", save=kind, epochs=1, model=net())
        assert told.notes[0] == f"no TPU found: torch_xla uses {count} x CPU"
        assert told.of("Started")[0].devices == tuple(f"xla:{number}" for number in range(count))
        held = torch.load(tmp_path / "last.pth", weights_only=kind != "module")
        state = (
            held.state_dict()
            if kind == "module"
            else next(one for key, one in held.items() if key.startswith("state_dict"))
        )
        assert {one.device.type for one in state.values()} == {"cpu"}

    @pytest.mark.parametrize("kind", KINDS)
    def test_losses_are_those_of_one_process(self, tmp_path, kind):
        told = losses(tmp_path, kind, "xla", device="xla")
        assert len(told) > 20
        assert told == pytest.approx(losses(tmp_path, kind, "single"), rel=1e-6, abs=0)

    def test_batches_are_sharded_over_all_devices(self, tmp_path, count):
        """Of 4 samples, and 2 at the end of each epoch."""
        seen = []
        model = net(dropout=0.0)
        spec = importlib.import_module("torch_xla")._XLAC._get_xla_sharding_spec
        model.register_forward_hook(lambda _, inputs, __: seen.append(spec(inputs[0])))
        run(tmp_path, strategy="xla", device="auto", model=model, epochs=1, accumulate=1)
        groups = [
            int(re.search(r"devices=\[(\d+)", one)[1]) if "devices" in one else 1 for one in seen
        ]
        assert groups[:6] == [math.gcd(size, count) for size in (4, 4, 4, 4, 4, 2)]

    @pytest.mark.parametrize("order", [("single", "xla"), ("xla", "single")])
    def test_a_run_goes_on_under_the_other_strategy(self, tmp_path, order):
        options = {"dtype": "float64", "ema": 0.9, "epochs": 2}
        run(tmp_path / "whole", strategy="single", model=net(dropout=0.0), **options)
        for steps, strategy in zip((4, 6), order, strict=True):
            run(
                tmp_path / "cut",
                strategy=strategy,
                device="auto",
                model=net(dropout=0.0),
                resume="auto",
                max_steps=steps,
                **options,
            )
        one, two = (torch.load(tmp_path / out / "last.pth") for out in ("whole", "cut"))
        for state in (one, two):
            state["moments"] = state["optimizer"]["state"]
            assert state["moments"]
        for part in ("state_dict", "moments", "ema"):
            torch.testing.assert_close(two[part], one[part], rtol=1e-6, atol=1e-9)

    def test_a_run_that_is_cut_goes_on_to_the_bit(self, tmp_path):
        """Dropout has random numbers of torch_xla's own."""
        run(tmp_path / "whole", strategy="xla", device="auto")
        for steps in (4, None):
            run(tmp_path / "cut", strategy="xla", device="auto", resume="auto", max_steps=steps)
        assert_same_run(tmp_path / "whole", tmp_path / "cut")

    def test_batch_norm_takes_the_whole_batch(self, tmp_path):
        """Whose running variance is that of the samples: torch has n / (n - 1) times as much."""
        one, two = {}, {}
        for strategy, state in (("single", one), ("xla", two)):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
            options = {"model": model, "dtype": "float64", "given": data(20, dtype="float64")}
            run(tmp_path / strategy, strategy=strategy, device="auto", epochs=1, **options)
            state |= torch.load(tmp_path / strategy / "last.pth")["state_dict"]
        begun = (1 - 0.1) ** 5  # what 5 batches have left of the 1 that it begins with
        one["1.running_var"] = begun + (one["1.running_var"] - begun) * 3 / 4
        torch.testing.assert_close(two, one, rtol=1e-6, atol=1e-9)

    def test_another_device_is_refused(self, tmp_path):
        with pytest.raises(UsageError, match="not cpu"):
            run(tmp_path / "out", strategy="xla", device="cpu")

    def test_a_slice_of_several_machines_is_refused(self, tmp_path, monkeypatch, count):
        monkeypatch.setattr("torch_xla.runtime.global_runtime_device_count", lambda: 32)
        with pytest.raises(TrainingError, match=f"this has {count} of 32 XLA devices"):
            run(tmp_path / "out", strategy="xla", device="auto")

    def test_its_devices_are_listed(self, count):
        listed = {one.name: one.model for one in detect_devices().devices if not one.is_current}
        assert listed == {f"xla:{number}": "CPU (torch_xla)" for number in range(count)}
