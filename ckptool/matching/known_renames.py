"""Keys that torch and PEFT have renamed: the old and the current spelling of one tensor.

Matching compares the keys of both sides in the current spelling. A key is not respelled if the
other side has it too, or if it is in a module with its own loading code.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

BATCHES = "num_batches_tracked"
_COUNTED_SINCE = 2
"""The version of BatchNorm from which its counter may not be missing."""


class Respelling(NamedTuple):
    """The end of a key in the old spelling and in the current one."""

    old: str
    new: str

    def respell(self, key: str) -> str:
        """Return a key that ends with `old` so that it ends with `new`."""
        return key[: len(key) - len(self.old)] + self.new


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
"""Old endings with the current ones. A module must have all endings of a row. `{}` is the name of
the parametrized weight."""
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
"""The last component of keys in TensorFlow, Keras (`_kernel` in checkpoints by Keras 3) and Flax,
with torch's."""
FOREIGN_KEY_RULES = {
    ":0 removed": ":0$=>",
    "/ -> .": "/=>.",
    "params. removed": r"^params\.=>",
    "batch_stats. removed": r"^batch_stats\.=>",
    **{f"{old} -> {new}": rf"(^|\.){re.escape(old)}$=>\1{new}" for old, new in _LEAVES.items()},
}
"""The rules for names of TensorFlow, Keras and Flax, in this order, each with its text."""
_ADAPTER_PART = r"(?:^|\.)((?:lora|ia3|hada|lokr|oft|boft|vera)_\w+)\."
"""The components that PEFT adds to a layer for an adapter."""
NAMED_ADAPTER = re.compile(_ADAPTER_PART + r"(?!(?:weight|bias)$)(\w+)")
"""Such a component, then the name of the adapter: `lora_A.default`."""
_DEFAULT_ADAPTER = re.compile(_ADAPTER_PART + r"default((?:\.(?:weight|bias))?)$")
_BASE_LAYER = re.compile(r"([^.]+)\.base_layer\.([^.]+)$")
"""The original layer inside a layer with an adapter: `q_proj.base_layer.weight`."""
_TRAINED_COPY = re.compile(r"[^.]+\.modules_to_save\.default\.(.+)$")
_ORIGINAL_MODULE = re.compile(r"[^.]+\.original_module\.(.+)$")
"""A whole module that PEFT trains next to the adapters, and its original."""
ADAPTER = re.compile(r"(^|\.)(lora_|hada_|lokr_|ia3_|adapter_)", re.IGNORECASE)
"""The start of a component that an adapter adds to a layer."""
MERGE = (
    "merge LoRA into the base model with ckptool merge-lora BASE ADAPTER -o OUT (without ADAPTER "
    "for a whole PeftModel); merge other adapters with merge_and_unload() of the PeftModel"
)
"""The advice if the model has no adapters."""
_FIRST_ENDINGS = tuple(next(iter(row)).removeprefix("{}") for row in ENDINGS)
_ADAPTER_COMPONENTS = (".default", ".base_layer.", ".original_module.")


def has_adapter(unexpected: Collection[str], known: Iterable[str]) -> bool:
    """Return True if the file has tensors trained by PEFT that the model does not have.

    Args:
        unexpected: The file's keys that the model does not have.
        known: The file's keys in PEFT's spelling that match keys of the model.
    """
    return any(ADAPTER.search(key) or ".modules_to_save." in key for key in unexpected) or (
        # Only a layer with an adapter has a `base_layer`, whatever the keys of the adapter are.
        bool(unexpected) and any(".base_layer." in key for key in known)
    )


def find_respellings(keys: Collection[str]) -> dict[str, Respelling]:
    """Return the keys in an old spelling, each with its respelling.

    A respelling that would give an existing key is left out, as is a key of an incomplete group.
    """
    text = "\n".join((*keys, ""))  # a fast check of all keys: most models have no old spelling
    respelled: dict[str, Respelling] = {}
    if any(f"{end}\n" in text for end in (*_FIRST_ENDINGS, *_AFFINE)):
        respelled.update(_respell_norms(keys))
        respelled.update(_respell_affine(keys))
    if any(mark in text for mark in _ADAPTER_COMPONENTS):
        respelled.update(_respell_adapters(keys))
    return respelled


def _respell_norms(keys: Collection[str]) -> Iterator[tuple[str, Respelling]]:
    """Yield the keys of complete `weight_norm` and `spectral_norm` groups, with respellings.

    A group of which a respelled key already exists is left out.
    """
    for first_ending, endings in zip(_FIRST_ENDINGS, ENDINGS, strict=True):
        for first_key in keys:
            stem = first_key.removesuffix(first_ending)  # `conv.weight` of `conv.weight_g`
            weight = stem.rpartition(".")[2]
            if stem == first_key or not weight:
                continue
            respellings = [
                Respelling(old.format(weight), new.format(weight)) for old, new in endings.items()
            ]
            module = stem.removesuffix(weight)
            group = {module + respelling.old: respelling for respelling in respellings}
            if all(key in keys for key in group) and not any(
                respelling.respell(key) in keys for key, respelling in group.items()
            ):
                yield from group.items()


def _respell_affine(keys: Collection[str]) -> Iterator[tuple[str, Respelling]]:
    """Yield `gamma` and `beta` of modules without `weight` and `bias`, with their respellings."""
    for key in keys:
        module, dot, last = key.rpartition(".")
        if last in _AFFINE and not any(f"{module}{dot}{new}" in keys for new in _AFFINE.values()):
            yield key, Respelling(last, _AFFINE[last])


def _respell_adapters(keys: Collection[str]) -> Iterator[tuple[str, Respelling]]:
    """Yield the keys of layers with an adapter, with the respellings that make no existing key.

    `a.lora_A.default.weight` -> `a.lora_A.weight`, `a.base_layer.weight` -> `a.weight`,
    `a.modules_to_save.default.weight` and `a.original_module.weight` -> `a.weight`.

    PEFT's files leave the adapter's name out (`get_peft_model_state_dict`), so `default` is removed
    if it is the only adapter. `modules_to_save` has the trained values; `original_module` counts
    only if there is no trained copy.
    """
    marked = [key for key in keys if any(component in key for component in _ADAPTER_COMPONENTS)]
    adapters = {match[2] for key in keys if (match := NAMED_ADAPTER.search(key))}
    modules_with_copy = {
        key.partition(".modules_to_save.")[0] for key in keys if ".modules_to_save." in key
    }
    for key in marked:
        if adapters == {"default"} and (match := _DEFAULT_ADAPTER.search(key)):
            respelling = Respelling(f"{match[1]}.default{match[2]}", match[1] + match[2])
        elif match := _BASE_LAYER.search(key):
            respelling = Respelling(match[0], f"{match[1]}.{match[2]}")
        elif match := _TRAINED_COPY.search(key):
            respelling = Respelling(f"modules_to_save.default.{match[1]}", match[1])
        elif match := _ORIGINAL_MODULE.search(key):
            module = key.removesuffix(f".original_module.{match[1]}")
            if module in modules_with_copy:
                continue
            respelling = Respelling(f"original_module.{match[1]}", match[1])
        else:
            continue
        if respelling.respell(key) not in keys:
            yield key, respelling


def running_mean_key(counter: str) -> str:
    """Return the key of the running mean in the module of a batch counter."""
    return f"{counter.removesuffix(BATCHES)}running_mean"


def find_optional_counters(
    missing: Collection[str], file_keys: Mapping[str, str], versions: Mapping[str, Any] | None
) -> set[str]:
    """Return the missing counters that BatchNorm does not require from a state of these versions.

    `file_keys` maps model keys to file keys; `versions` has the `_metadata` of each module, and
    without it no counter is required. torch/nn/modules/batchnorm.py,
    `_NormBase._load_from_state_dict`: files from before torch 0.4.1 have no such counter.
    """
    counters = {counter for counter in missing if counter.rpartition(".")[2] == BATCHES}
    if not counters or not versions:
        return counters
    optional = set()
    for counter in counters:
        mean_key = running_mean_key(counter)
        metadata = versions.get(file_keys.get(mean_key, mean_key).rpartition(".")[0])
        version = metadata.get("version") if isinstance(metadata, dict) else None
        if not (isinstance(version, int) and version >= _COUNTED_SINCE):
            optional.add(counter)
    return optional
