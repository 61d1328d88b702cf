"""Names that torch and PEFT have changed: the old and the new spelling of one tensor.

`ENDINGS` is the table. Matching compares the names of both sides in today's spelling. A name is
left as it is where the other side has the same one, and below modules with code of their own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

BATCHES = "num_batches_tracked"
_COUNTED_SINCE = 2
"""The version of BatchNorm from which its counter may not be missing."""


class Respelling(NamedTuple):
    """The end of a name in the old spelling and in today's."""

    old: str
    new: str

    def of(self, name: str) -> str:
        """Return a name that ends with `old`, with `new` instead."""
        return name[: len(name) - len(self.old)] + self.new


ENDINGS: tuple[dict[str, str], ...] = (
    # torch.nn.utils.weight_norm and the parametrization of the same name
    {"{}_g": "parametrizations.{}.original0", "{}_v": "parametrizations.{}.original1"},
    # torch.nn.utils.spectral_norm and the parametrization of the same name
    {
        "{}_orig": "parametrizations.{}.original",
        "{}_u": "parametrizations.{}.0._u",
        "{}_v": "parametrizations.{}.0._v",
    },
)
"""Endings that belong together: all of one row must be there. `{}` is the name of the weight."""
_AFFINE = {"gamma": "weight", "beta": "bias"}
"""The scale and shift of a normalization in TensorFlow, and in transformers before 2019."""
NUMBERED = {
    "vars.0": "weight",
    "vars.1": "bias",
    "vars.2": "running_mean",
    "vars.3": "running_var",
}
"""The variables of a layer in Keras 3, if it has as many as torch's module."""
_LEAVES = {
    **dict.fromkeys(("kernel", "_kernel", "embedding", "embeddings", "_embeddings"), "weight"),
    "scale": "weight",
    **_AFFINE,
    "moving_mean": "running_mean",
    "mean": "running_mean",
    "moving_variance": "running_var",
    "var": "running_var",
    **NUMBERED,
}
"""The last part of names in TensorFlow, Keras (`_kernel` in checkpoints by Keras 3) and Flax."""
FOREIGN = {
    ":0 removed": ":0$=>",
    "/ -> .": "/=>.",
    "params. removed": r"^params\.=>",
    "batch_stats. removed": r"^batch_stats\.=>",
    **{f"{old} -> {new}": rf"(^|\.){re.escape(old)}$=>\1{new}" for old, new in _LEAVES.items()},
}
"""The rules for names of TensorFlow, Keras and Flax, in this order, each with its text."""
_TUNER = r"(?:^|\.)((?:lora|ia3|hada|lokr|oft|boft|vera)_\w+)\."
"""What PEFT calls the parts of an adapter in a layer."""
NAMED_ADAPTER = re.compile(_TUNER + r"(?!(?:weight|bias)$)(\w+)")
"""A part of an adapter and the name of the adapter: `lora_A.default`."""
_DEFAULT = re.compile(_TUNER + r"default((?:\.(?:weight|bias))?)$")
_BASE = re.compile(r"([^.]+)\.base_layer\.([^.]+)$")
"""What PEFT puts a layer with an adapter into: `q_proj.base_layer.weight`."""
_SAVED = re.compile(r"[^.]+\.modules_to_save\.default\.(.+)$")
_ORIGINAL = re.compile(r"[^.]+\.original_module\.(.+)$")
"""A module that PEFT trains beside an adapter, and what it was before."""
ADAPTER = re.compile(r"(^|\.)(lora_|hada_|lokr_|ia3_|adapter_)", re.IGNORECASE)
"""Begins the name of what an adapter adds to a layer."""
MERGE = (
    "merge LoRA into the base model with ckptool merge-lora BASE ADAPTER -o OUT (without ADAPTER "
    "for a whole PeftModel); merge other adapters with merge_and_unload() of the PeftModel"
)
"""What helps where the model has no adapters."""
_FIRST = tuple(next(iter(row)).removeprefix("{}") for row in ENDINGS)
_MARKS = (".default", ".base_layer.", ".original_module.")


def has_adapter(unexpected: Collection[str], known: Iterable[str]) -> bool:
    """Return whether PEFT trained tensors that a model does not take.

    Args:
        unexpected: The file's names that the model does not have.
        known: The file's names in PEFT's spelling that are the model's in its own.
    """
    return any(ADAPTER.search(name) or ".modules_to_save." in name for name in unexpected) or (
        bool(unexpected) and any(".base_layer." in name for name in known)
    )


def respellings(names: Collection[str]) -> dict[str, Respelling]:
    """Return the names in an old spelling, each with what changes.

    A spelling that would make two names one is left out, and so is one of which a part is missing.
    """
    text = "\n".join((*names, ""))
    found: dict[str, Respelling] = {}
    if any(f"{end}\n" in text for end in (*_FIRST, *_AFFINE)):
        found.update(_normed(names))
        found.update(_affine(names))
    if any(mark in text for mark in _MARKS):
        found.update(_adapted(names))
    return found


def _normed(names: Collection[str]) -> Iterator[tuple[str, Respelling]]:
    for first, row in zip(_FIRST, ENDINGS, strict=True):
        for name in names:
            stem = name.removesuffix(first)
            weight = stem.rpartition(".")[2]
            if stem == name or not weight:
                continue
            parts = [Respelling(old.format(weight), new.format(weight)) for old, new in row.items()]
            group = {stem[: len(stem) - len(weight)] + part.old: part for part in parts}
            if all(one in names for one in group) and not any(
                part.of(one) in names for one, part in group.items()
            ):
                yield from group.items()


def _affine(names: Collection[str]) -> Iterator[tuple[str, Respelling]]:
    """Yield those of modules that have neither `weight` nor `bias`."""
    for name in names:
        module, dot, last = name.rpartition(".")
        if last in _AFFINE and not any(f"{module}{dot}{new}" in names for new in _AFFINE.values()):
            yield name, Respelling(last, _AFFINE[last])


def _adapted(names: Collection[str]) -> Iterator[tuple[str, Respelling]]:
    """Yield the names of layers with an adapter.

    PEFT's files leave the adapter's name out (`get_peft_model_state_dict`): `default` goes where
    it is the only adapter. `modules_to_save` is what was trained; `original_module` only counts
    where there is nothing else.
    """
    marked = [name for name in names if any(mark in name for mark in _MARKS)]
    adapters = {found[2] for name in names if (found := NAMED_ADAPTER.search(name))}
    saved = {name.partition(".modules_to_save.")[0] for name in names if ".modules_to_" in name}
    for name in marked:
        if adapters == {"default"} and (found := _DEFAULT.search(name)):
            part = Respelling(f"{found[1]}.default{found[2]}", found[1] + found[2])
        elif found := _BASE.search(name):
            part = Respelling(found[0], f"{found[1]}.{found[2]}")
        elif found := _SAVED.search(name):
            part = Respelling(f"modules_to_save.default.{found[1]}", found[1])
        elif found := _ORIGINAL.search(name):
            if name[: found.start(1) - len(".original_module.")] in saved:
                continue
            part = Respelling(f"original_module.{found[1]}", found[1])
        else:
            continue
        if part.of(name) not in names:
            yield name, part


def beside(counter: str) -> str:
    """Return the name of the running mean beside a counter of batches."""
    return f"{counter.removesuffix(BATCHES)}running_mean"


def uncounted(
    missing: Collection[str], own: Mapping[str, str], versions: Mapping[str, Any] | None
) -> set[str]:
    """Return the missing counters that BatchNorm does not ask for in a state of these versions.

    `own` are the names in the file of those that are there. torch/nn/modules/batchnorm.py,
    `_NormBase._load_from_state_dict`: files from before torch 0.4.1 have no such counter.
    """
    counters = {name for name in missing if name.rpartition(".")[2] == BATCHES}
    if not counters or not versions:
        return counters
    free = set()
    for name in counters:
        near = beside(name)
        held = versions.get(own.get(near, near).rpartition(".")[0])
        version = held.get("version") if isinstance(held, dict) else None
        if not (isinstance(version, int) and version >= _COUNTED_SINCE):
            free.add(name)
    return free
