"""Optimizer, learning rate, gradient scaler and moving average of a model; random numbers."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import get_worker_info

from ckptool.errors import TrainingError
from ckptool.loading.ranks import distribute_like, is_dtensor
from ckptool.trainer.config import TrainConfig


def seed_all(seed: int) -> None:
    """Seed the random generators of torch (all devices), Python, and numpy if it is imported."""
    torch.manual_seed(seed)
    if (xla := _xla_random()) is not None:
        xla.set_rng_state(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)  # numpy's seeds have 32 bits


def get_random_state() -> dict[str, Any]:
    """Return the random state of torch, Python and numpy, lists of numbers as tensors."""
    version, numbers, gauss = random.getstate()
    python = (version, torch.tensor(numbers), gauss)
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": python}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    if (xla := _xla_random()) is not None:
        state["xla"] = xla.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *others = sys.modules["numpy"].random.get_state()
        state["numpy"] = (kind, torch.tensor(keys.tolist()), *others)
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restore the result of `get_random_state`; missing devices are skipped."""
    torch.set_rng_state(state["torch"].cpu())
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    if "cuda" in state and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all([state_of_gpu.cpu() for state_of_gpu in state["cuda"]])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"].cpu())
    if "xla" in state and (xla := _xla_random()) is not None:
        xla.set_rng_state(state["xla"])
    if "numpy" in state and "numpy" in sys.modules:
        kind, keys, *others = state["numpy"]
        sys.modules["numpy"].random.set_state((kind, keys.tolist(), *others))


def _xla_random() -> Any:
    """Return torch_xla's module of random numbers, or None if this process does not use XLA."""
    runtime = sys.modules.get("torch_xla.runtime")
    is_data_worker = get_worker_info() is not None  # which must not touch the devices
    is_used = runtime is not None and runtime.is_spmd() and not is_data_worker
    return sys.modules["torch_xla.core.xla_model"] if is_used else None


class Average:
    """`average = decay * average + (1 - decay) * weights` after every step; buffers are copied.

    B. Polyak, A. Juditsky: Acceleration of stochastic approximation by averaging, 1992; the same
    as `torch.optim.swa_utils.get_ema_multi_avg_fn`.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        """Begin with the current weights of `module`, which has no wrapper."""
        self._module, self._decay = module, decay
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Start again with the current weights."""
        self._state = {
            name: tensor.detach().clone() for name, tensor in self._live_tensors().items()
        }

    def _live_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the module's state dict by name."""
        state = self._module.state_dict()
        return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights of one more step; copy buffers and integers, which are not averaged."""
        # With all names of tied parameters, as in the state dict.
        parameters = dict(self._module.named_parameters(remove_duplicate=False))
        for name, current in self._live_tensors().items():
            if name in parameters and current.is_floating_point():
                self._state[name].lerp_(current.detach(), 1 - self._decay)
            else:
                self._state[name].copy_(current)

    def state(self) -> dict[str, Any]:
        """Return the average as a state dict of the model without wrappers."""
        return dict(self._state)

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> bool:
        """Restore the result of `state`; return False, unchanged, if it is of another model."""
        if state.keys() != self._state.keys():
            return False
        for name, average in self._state.items():
            average.copy_(distribute_like(average, state[name]))
        return True


class Tuning:
    """The objects that change the weights in every step.

    Attributes:
        optimizer: The optimizer of the model's parameters.
        schedule: Its learning rate by step.
        scaler: The gradient scaler, which does nothing without `amp="fp16"`.
        average: The moving average of the weights, or None without `ema`.
    """

    def __init__(
        self, config: TrainConfig, module: nn.Module, *, steps: int, steps_per_epoch: int
    ) -> None:
        """Make the objects for the parameters of `module`, and for a run of `steps` steps."""
        self.config = config
        self.optimizer = _make_optimizer(config, module)
        self._rate_factor: Callable[[int], float] = lambda done: compute_rate_factor(
            config, done, steps=steps, steps_per_epoch=steps_per_epoch
        )
        self.schedule = LambdaLR(self.optimizer, self._rate_factor)
        device = next((parameter.device.type for parameter in module.parameters()), "cpu")
        self.scaler = _make_scaler(device, is_enabled=config.amp == "fp16")
        self.average = None if config.ema is None else Average(module, config.ema)

    def autocast(self, device_type: str) -> AbstractContextManager[Any]:
        """Return the context of the forward pass, with the lower precision of `amp`."""
        dtype = torch.float16 if self.config.amp == "fp16" else torch.bfloat16
        return torch.autocast(device_type, dtype=dtype, enabled=self.config.amp is not None)

    @property
    def has_finite_gradients(self) -> bool:
        """True if all gradients in this process are finite.

        Also True with a scaler, which checks them itself, skips the step and reduces its scale.
        """
        if self.scaler.is_enabled():
            return True
        return _are_finite(
            parameter.grad for parameter in self._trained_parameters if parameter.grad is not None
        )

    @property
    def has_finite_weights(self) -> bool:
        """True if all trained weights in this process are finite."""
        return _are_finite(parameter.detach() for parameter in self._trained_parameters)

    @property
    def _trained_parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for group in self.optimizer.param_groups for parameter in group["params"])

    def step(self) -> bool:
        """Clip the gradients to a common norm, apply them and clear them.

        Return False if the scaler found an infinite gradient and skipped the step.

        Raises:
            TrainingError: a gradient is sparse, which the optimizer or an option does not support.
        """
        old_scale = self.scaler.get_scale()
        try:
            if self.config.clip is not None:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(list(self._trained_parameters), self.config.clip)
            self.scaler.step(self.optimizer)
        except RuntimeError as error:
            has_sparse_gradient = any(
                parameter.grad is not None and parameter.grad.is_sparse
                for parameter in self._trained_parameters
            )
            if not has_sparse_gradient:
                raise
            reason = str(error).partition("\n")[0]
            raise TrainingError(
                f"torch does not support a sparse gradient here: {reason}",
                hint="use nn.Embedding without sparse=True, or --optimizer sgd without --clip and "
                "--weight-decay",
            ) from error
        self.scaler.update()
        self.optimizer.zero_grad()
        # The scaler reduces its scale when it skips a step; a scale of 0 cannot be reduced.
        new_scale = self.scaler.get_scale()
        is_skipped = new_scale < old_scale or new_scale == 0
        if is_skipped:
            return False
        self.schedule.step()
        if self.average is not None:
            self.average.update()
        return True

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def state(self) -> dict[str, Any]:
        """Return the state of schedule, scaler and average for a checkpoint."""
        state: dict[str, Any] = {"scheduler": self.schedule.state_dict()}
        if self.scaler.is_enabled():
            state["scaler"] = self.scaler.state_dict()
        if self.average is not None:
            state["ema"] = self.average.state()
        return state

    def restore(self, state: Mapping[str, Any], *, step: int) -> list[str]:
        """Restore the result of `state`, and return the names of the missing parts.

        Model and optimizer are filled before. The options of the optimizer (learning rate, weight
        decay, ...) are those of the configuration. Without a schedule in `state` the rate follows
        from `step`; without an average it begins with the current weights.
        """
        missing = []
        scheduler = state.get("scheduler", {})
        self._reschedule(scheduler.get("last_epoch", step))
        if not scheduler:
            missing.append("scheduler")
        if self.scaler.is_enabled():
            if "scaler" in state:
                self.scaler.load_state_dict(dict(state["scaler"]))
            else:
                missing.append("scaler")
        if self.average is not None and not self.average.restore(state.get("ema", {})):
            self.average.begin()
            missing.append("ema")
        return missing

    def _reschedule(self, done: int) -> None:
        """Give the optimizer this run's options, and the learning rate after `done` steps.

        The optimizer's state from a file came with the options of the saved run.
        """
        (group,) = self.optimizer.param_groups
        options = {
            "params": group["params"],
            **self.optimizer.defaults,
            "initial_lr": self.config.lr,
        }
        group.clear()  # a file may have options that a new run does not have
        group.update(options, lr=self.config.lr * self._rate_factor(done))
        # What LambdaLR counts in `done` steps; it calls every step an epoch.
        counters = {"last_epoch": done, "_step_count": done + 1, "_last_lr": [group["lr"]]}
        self.schedule.load_state_dict({**self.schedule.state_dict(), **counters})


def compute_rate_factor(
    config: TrainConfig, done: int, *, steps: int, steps_per_epoch: int
) -> float:
    """Return the factor of the learning rate after `done` of `steps` steps.

    It rises for `config.warmup` steps and then follows `config.schedule`. The schedule "step"
    counts epochs from the start of the run; the others count the steps after the warmup.
    """
    if done < config.warmup:
        return (done + 1) / (config.warmup + 1)
    if config.schedule == "step":
        return config.gamma ** (done // (config.step_size * steps_per_epoch))
    share_done = min(1.0, (done - config.warmup) / max(1, steps - config.warmup))
    if config.schedule == "cosine":
        return (1 + math.cos(math.pi * share_done)) / 2
    return 1 - share_done if config.schedule == "linear" else 1.0


def _are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if all elements of this process's tensors are finite.

    The answers for all tensors are gathered on one device, since reading each one waits for it.
    """
    magnitudes = [_largest_magnitude(tensor) for tensor in tensors]
    return not magnitudes or bool(
        torch.stack([tensor.to(magnitudes[0]) for tensor in magnitudes]).isfinite().all()
    )


def _largest_magnitude(tensor: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value of this process's part; NaN if a value is NaN."""
    part = tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    part = part.coalesce().values() if part.is_sparse else part
    return torch.linalg.vector_norm(part, math.inf) if part.numel() else part.new_zeros(())


def _make_scaler(device: str, *, is_enabled: bool) -> torch.amp.GradScaler:
    """Return the scaler of a device; torch before 2.3 has one for CUDA only."""
    if hasattr(torch.amp, "GradScaler"):
        return torch.amp.GradScaler(device, enabled=is_enabled)
    if is_enabled and device != "cuda":
        raise TrainingError(
            f"amp 'fp16' on {device} needs torch 2.3, but this is {torch.__version__}",
            hint="use --amp bf16, which needs no scaler",
        )
    return torch.cuda.amp.GradScaler(enabled=is_enabled)


def _make_optimizer(config: TrainConfig, module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of the trainable parameters, with the options of the run."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not parameters:
        raise TrainingError(
            "the model has no trainable parameters",
            hint="call requires_grad_() on the parameters to train",
        )
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=config.momentum, **options)
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, **options)
