"""What turns gradients into weights: optimizer, rate, scaler, moving average; random numbers."""

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
from ckptool.loading.ranks import is_spread, spread_like
from ckptool.trainer.config import TrainConfig

__all__ = ["Average", "Tuning", "random_state", "rate_factor", "restore_random_state", "seed_all"]


def seed_all(seed: int) -> None:
    """Seed the random generators of torch (all devices), Python and numpy."""
    torch.manual_seed(seed)
    if (xla := _xla()) is not None:
        xla.set_rng_state(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))


def random_state() -> dict[str, Any]:
    """Return the state for `restore_random_state`; lists of numbers as tensors."""
    version, numbers, gauss = random.getstate()
    python = (version, torch.tensor(numbers), gauss)
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": python}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    if (xla := _xla()) is not None:
        state["xla"] = xla.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (kind, torch.tensor(keys.tolist()), *rest)
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restore the state of `random_state`; devices that are not there are skipped."""
    torch.set_rng_state(state["torch"].cpu())
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    if "cuda" in state and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all([one.cpu() for one in state["cuda"]])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"].cpu())
    if "xla" in state and (xla := _xla()) is not None:
        xla.set_rng_state(state["xla"])
    if "numpy" in state and "numpy" in sys.modules:
        kind, keys, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((kind, keys.tolist(), *rest))


def _xla() -> Any:
    """Return torch_xla's module of random numbers; None if XLA is not used."""
    runtime = sys.modules.get("torch_xla.runtime")
    is_used = runtime is not None and runtime.is_spmd() and get_worker_info() is None
    return sys.modules["torch_xla.core.xla_model"] if is_used else None


class Average:
    """`average = decay * average + (1 - decay) * weights` after every step; buffers are copied.

    B. Polyak, A. Juditsky: Acceleration of stochastic approximation by averaging, 1992; as
    `torch.optim.swa_utils.get_ema_multi_avg_fn` has it.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        """Begin with the weights that `module`, the bare one, has now."""
        self._module, self._decay = module, decay
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Begin anew, with the weights that the model has now."""
        self._state = {name: one.detach().clone() for name, one in self._live().items()}

    def _live(self) -> dict[str, torch.Tensor]:
        state = self._module.state_dict()
        return {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights of one more step."""
        parameters = dict(self._module.named_parameters(remove_duplicate=False))
        for name, now in self._live().items():
            if name in parameters and now.is_floating_point():
                self._state[name].lerp_(now.detach(), 1 - self._decay)
            else:
                self._state[name].copy_(now)

    def state(self) -> dict[str, Any]:
        """Return the average by the names of the bare model: a state dict to be loaded into it."""
        return dict(self._state)

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> bool:
        """Restore an average of this model; return False if it is another's."""
        if state.keys() != self._state.keys():
            return False
        for name, own in self._state.items():
            own.copy_(spread_like(own, state[name]))
        return True


class Tuning:
    """All that changes with every step, of one model.

    Attributes:
        optimizer: Over the model's parameters.
        schedule: Its learning rate, by step.
        scaler: Of `amp="fp16"`; else one that does nothing.
        average: The moving average of the weights; None without `ema`.
    """

    def __init__(self, config: TrainConfig, module: nn.Module, *, steps: int, epoch: int) -> None:
        """Take the parameters of `module`, for `steps` in all, of which `epoch` make an epoch."""
        self.config = config
        self.optimizer = _optimizer(config, module)
        self._parameters = dict(module.named_parameters())
        self._factor: Callable[[int], float] = lambda done: rate_factor(
            config, done, steps=steps, epoch=epoch
        )
        self.schedule = LambdaLR(self.optimizer, self._factor)
        self._options = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]
        device = next((one.device.type for one in module.parameters()), "cpu")
        self.scaler = _scaler(device, is_enabled=config.amp == "fp16")
        self.average = None if config.ema is None else Average(module, config.ema)

    def autocast(self, device_type: str) -> AbstractContextManager[Any]:
        """Wrap the forward pass in the lower precision of `amp`."""
        dtype = torch.float16 if self.config.amp == "fp16" else torch.bfloat16
        return torch.autocast(device_type, dtype=dtype, enabled=self.config.amp is not None)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to call backward of."""
        return self.scaler.scale(loss)

    @property
    def has_finite_gradients(self) -> bool:
        """Whether every number of the gradients that are here is one.

        With a scaler they need not be: it looks itself, skips the step and scales less.
        """
        if self.scaler.is_enabled():
            return True
        return _are_finite(one.grad for one in self._trained if one.grad is not None)

    @property
    def has_finite_weights(self) -> bool:
        """Whether every number that is trained, and is here, is one."""
        return _are_finite(one.detach() for one in self._trained)

    @property
    def _trained(self) -> Iterator[torch.Tensor]:
        return (one for group in self.optimizer.param_groups for one in group["params"])

    def step(self, clip: Callable[[float], None]) -> bool:
        """Apply the gradients, and clear them.

        Where the scaler finds an infinite one nothing is taken, schedule and average wait, and
        False is returned.

        Raises:
            TrainingError: a gradient is sparse, and something is asked for that takes none.
        """
        self._require_dense()
        if self.config.clip is not None:
            self.scaler.unscale_(self.optimizer)
            clip(self.config.clip)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        now = self.scaler.get_scale()
        if now < scale or not now:  # as torch's documentation tells a step that is skipped
            return False
        self.schedule.step()
        if self.average is not None:
            self.average.update()
        return True

    def _require_dense(self) -> None:
        """Refuse a sparse gradient where torch takes none: all but bare SGD."""
        config = self.config
        asked = [name for name in ("clip", "weight_decay") if getattr(config, name)]
        if config.optimizer == "sgd" and not asked:
            return
        for name, one in self._parameters.items():
            if one.grad is not None and one.grad.is_sparse:
                what = f"optimizer {config.optimizer}" if config.optimizer != "sgd" else asked[0]
                raise TrainingError(
                    f"the gradient of {name} is sparse, which {what} does not take",
                    hint="nn.Embedding without sparse=True; or --optimizer sgd, without --clip and "
                    "--weight-decay",
                )

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside the optimizer's state."""
        state: dict[str, Any] = {"scheduler": self.schedule.state_dict()}
        if self.scaler.is_enabled():
            state["scaler"] = self.scaler.state_dict()
        if self.average is not None:
            state["ema"] = self.average.state()
        return state

    def restore(self, state: Mapping[str, Any], *, step: int) -> list[str]:
        """Restore the result of `state`, and return the names of what it does not hold.

        The optimizer's options (learning rate, weight decay, ...) are those of the configuration,
        whatever the file had; the schedule, where the file has none, is that after `step` steps;
        the average, that of the weights alone. The model and the optimizer are filled before.
        """
        without = []
        scheduler = state.get("scheduler", {})
        self._reschedule(scheduler.get("last_epoch", step))
        if not scheduler:
            without.append("scheduler")
        if self.scaler.is_enabled():
            if "scaler" in state:
                self.scaler.load_state_dict(dict(state["scaler"]))
            else:
                without.append("scaler")
        if self.average is not None and not self.average.restore(state.get("ema", {})):
            self.average.begin()
            without.append("ema")
        return without

    def _reschedule(self, done: int) -> None:
        """Set the rates after `done` steps, of the configuration's options."""
        for group, options in zip(self.optimizer.param_groups, self._options, strict=True):
            own = {"params": group["params"], **options}
            group.clear()  # of the names that a file has for them too, which a new run has not
            group.update(own)
            group["lr"] = group["initial_lr"] * self._factor(done)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        held = {"last_epoch": done, "_step_count": done + 1, "_last_lr": rates}
        self.schedule.load_state_dict({**self.schedule.state_dict(), **held})


def rate_factor(config: TrainConfig, done: int, *, steps: int, epoch: int) -> float:
    """Return the factor of the learning rate after `done` of `steps` steps."""
    if done < config.warmup:
        return (done + 1) / (config.warmup + 1)
    if config.schedule == "step":
        return config.gamma ** (done // (config.step_size * epoch))
    share = min(1.0, (done - config.warmup) / max(1, steps - config.warmup))
    if config.schedule == "cosine":
        return (1 + math.cos(math.pi * share)) / 2
    return 1 - share if config.schedule == "linear" else 1.0


def _are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    largest = [_largest(one) for one in tensors]
    return not largest or bool(
        torch.stack([one.to(largest[0]) for one in largest]).isfinite().all()
    )


def _largest(tensor: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value of this process's part; NaN if a value is NaN."""
    part = tensor.to_local() if is_spread(tensor) else tensor  # type: ignore[attr-defined]
    part = part.coalesce().values() if part.is_sparse else part
    return torch.linalg.vector_norm(part, math.inf) if part.numel() else part.new_zeros(())


def _scaler(device: str, *, is_enabled: bool) -> torch.amp.GradScaler:
    """Return the scaler of a device; before torch 2.3 there is one for CUDA alone."""
    if hasattr(torch.amp, "GradScaler"):
        return torch.amp.GradScaler(device, enabled=is_enabled)
    if is_enabled and device != "cuda":
        raise TrainingError(
            f"amp 'fp16' on {device} needs torch 2.3; this is {torch.__version__}",
            hint="--amp bf16 needs no scaler",
        )
    return torch.cuda.amp.GradScaler(enabled=is_enabled)


def _optimizer(config: TrainConfig, module: nn.Module) -> torch.optim.Optimizer:
    parameters = [one for one in module.parameters() if one.requires_grad]
    if not parameters:
        raise TrainingError(
            "the model has no parameter to train",
            hint="requires_grad_() for those that are, or a model that has some",
        )
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=config.momentum, **options)
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, **options)
