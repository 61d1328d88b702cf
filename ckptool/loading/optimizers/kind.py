"""Whether the state of an optimizer is of the same kind as the optimizer that is to take it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ckptool.loading.optimizers.saved import Saved
from ckptool.loading.optimizers.undo import innermost
from ckptool.optimizers import OPTIONS, kept_by, options_of
from ckptool.words import listed

if TYPE_CHECKING:
    import torch

__all__ = ["cousin", "other_kind"]

_KEPT = {
    "Adadelta": ("step square_avg acc_delta", ""),
    "Adafactor": ("step", "row_var col_var variance"),
    "Adagrad": ("step sum", ""),
    "Adam": ("step exp_avg exp_avg_sq", "max_exp_avg_sq"),
    "AdamW": ("step exp_avg exp_avg_sq", "max_exp_avg_sq"),
    "Adamax": ("step exp_avg exp_inf", ""),
    "ASGD": ("step eta mu ax", ""),
    "LBFGS": ("", "d t old_dirs old_stps ro H_diag prev_flat_grad prev_loss al func_evals n_iter"),
    "Muon": ("momentum_buffer", ""),
    "NAdam": ("step exp_avg exp_avg_sq mu_product", ""),
    "RAdam": ("step exp_avg exp_avg_sq", ""),
    "RMSprop": ("step square_avg", "momentum_buffer grad_avg"),
    "Rprop": ("step prev step_size", ""),
    "SGD": ("", "momentum_buffer"),
    "SparseAdam": ("step exp_avg exp_avg_sq", ""),
}
"""What torch's optimizers keep of a parameter: always, and with some option."""

_KNOWN = {key for always, sometimes in _KEPT.values() for key in (always + " " + sometimes).split()}
"""Any of it: what else there is, a script has put there."""

_ANY_KIND = frozenset((
    "params", "param_names", "lr", "weight_decay", "maximize", "foreach", "capturable",
    "differentiable", "fused", "amsgrad", "centered", "decoupled_weight_decay", "eps",
    "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "lr_scale",
    "name", "step",
))  # fmt: skip
"""Options that tell nothing: of many kinds, of newer versions, of schedulers and scripts."""


def other_kind(saved: Saved, optimizer: torch.optim.Optimizer) -> str | None:
    """Why what was saved is of another kind of optimizer, as a sentence; None: it is not.

    `load_state_dict` takes such a state without a word, options and all; the next `step()` ends
    with a KeyError, or goes on with what it finds.
    """
    optimizer = innermost(optimizer)
    here = {key for group in optimizer.param_groups for key in group}
    there = {key for group in saved.options for key in group if isinstance(key, str)}
    telling = set(OPTIONS)
    lacking = sorted((here & telling) - options_of(saved.section))
    foreign = sorted(options_of(saved.section) - here)
    odd_here, odd_there = (sorted(a - b - _ANY_KIND) for a, b in ((here, there), (there, here)))
    if saved.options and optimizer.param_groups:
        if lacking or foreign:
            return _told(optimizer, "options", foreign, lacking)
        own = set(odd_here) & set(getattr(optimizer, "defaults", ()))
        if own and odd_there and not _is_torch_own(optimizer):
            return _told(optimizer, "options", odd_there, odd_here)
    return _other_state(saved, optimizer)


def cousin(saved: Saved, optimizer: torch.optim.Optimizer) -> str | None:
    """That it is of another kind which keeps the same, as a sentence; None: nothing says so.

    Adam, RAdam and SparseAdam are told by `amsgrad` alone, which torch's Adam always had. What they
    keep means the same in each, so that it is of use; whether that is meant the caller knows.
    """
    optimizer = innermost(optimizer)
    known = getattr(optimizer, "defaults", {})
    here, there = "amsgrad" in known, any("amsgrad" in group for group in saved.options)
    if not (_is_torch_own(optimizer) and "betas" in known and saved.options) or here == there:
        return None
    has = "has" if there else "lacks"
    return (
        f"the file's optimizer is of another kind than {type(optimizer).__name__}, which keeps "
        f"the same of each parameter: it {has} amsgrad"
    )


def _other_state(saved: Saved, optimizer: torch.optim.Optimizer) -> str | None:
    mine = kept_by(saved.section)
    always, sometimes = _kept(optimizer)
    if not mine or not (always or sometimes):
        return None
    lacking, foreign = sorted(always - mine), sorted((mine & _KNOWN) - always - sometimes)
    if not lacking and not (foreign and _is_torch_own(optimizer)):
        return None
    return _told(optimizer, "state", foreign, lacking)


def _told(
    optimizer: torch.optim.Optimizer, what: str, foreign: Iterable[str], lacking: Iterable[str]
) -> str:
    have, lack = ("have", "lack") if what == "options" else ("has", "lacks")
    parts = [
        f"{verb} {listed(names, 3)}"
        for verb, names in ((have, list(foreign)), (lack, list(lacking)))
        if names
    ]
    return (
        f"the file's optimizer is of another kind than {type(optimizer).__name__}: "
        f"its {what} {' and '.join(parts)}"
    )


def _kept(optimizer: torch.optim.Optimizer) -> tuple[set[str], set[str]]:
    """What it keeps always, and sometimes: as the class says, or as it does now."""
    for cls in type(optimizer).__mro__:
        if cls.__module__.startswith("torch.optim.") and cls.__name__ in _KEPT:
            always, sometimes = _KEPT[cls.__name__]
            return set(always.split()), set(sometimes.split())
    states: list[dict[Any, Any]] = [one for one in optimizer.state.values() if one]
    held = [{key for key in one if isinstance(key, str)} for one in states if isinstance(one, dict)]
    return (set.intersection(*held), set.union(*held)) if held else (set(), set())


def _is_torch_own(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")
