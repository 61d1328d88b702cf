"""Weights that a checkpoint has next to its model: averages and fp32 masters."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ckptool.core.checkpoint import Change, Checkpoint
from ckptool.core.model import OrderedMap, Path, TensorRef, copy_with_items
from ckptool.core.names import BUFFER_NAMES, N_AVERAGED, map_to_bare_names
from ckptool.core.sections import MODEL_KINDS, Section, get_named_tensors
from ckptool.core.tree import name_of
from ckptool.errors import AmbiguousName, NotFound
from ckptool.formats.distributed.zero import SLICED
from ckptool.formats.distributed.zero_vectors import MASTER
from ckptool.transforms.casting import FLOATING
from ckptool.transforms.compacting import drop_unused_bytes
from ckptool.transforms.extraction import copy_state_dict, drop_keys, report_left_out
from ckptool.transforms.names import list_distinct_sections
from ckptool.transforms.schedule_free import compute_eval_weights
from ckptool.transforms.step import Step
from ckptool.words import are, counted, listed, printable, shell

_EMA = re.compile(r"(?<![A-Z])EMA|(?<![A-Za-z])[Ee]ma(?![a-z])")
"""Part of a path to averages: `model_ema`, `state_dict_ema`, `ema`, a callback `EMACallback`."""
_LIGHTNING = ("state_dict", "current_model_state", "averaging_state")
"""Keys of Lightning's `WeightAveraging`: the average, the model, the counter."""
_LITEMA = "model_ema."
"""LDM, `ldm/modules/ema.py`: buffers of `LitEma` have parameter names without the dots."""
_LITEMA_SETTINGS = ("decay", "num_updates")
_TIMM = "model_ema.module."
"""timm's `ModelEmaV2` as an attribute of a LightningModule: a copy of another attribute."""
_ONLINE, AVERAGED = "online_model.", "ema_model."
"""ema-pytorch: the two copies in its `EMA`."""
_SHADOW = "shadow_params"
"""torch-ema and the `EMAModel` of diffusers: a list in the order of `model.parameters()`."""
_LOOKED_FOR = (
    "a state dict or module called ema (`model_ema`, `state_dict_ema`); keys that start with "
    f"`{_LITEMA}` or `{AVERAGED}`; a list `{_SHADOW}`; `averaging_state` of Lightning; "
    "a schedule-free optimizer in train mode"
)

_Tensors = dict[str, TensorRef]


@dataclass(frozen=True, eq=False)
class _Average:
    """Averaged tensors, by key, or in a list by order."""

    path: Path
    """The path of the averages; for a prefix of keys, the prefix as the last item."""
    tensors: _Tensors | Sequence[TensorRef]
    """The averages by key without the prefix, or in the order of the model's parameters."""
    section: Section | None = None
    """The section of the averages, if they have their own."""
    model: Section | None = None
    """The model, if the layout determines it."""


def take_averages(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the averaged weights as its state dict, under the model's keys.

    Entries without an average, such as buffers and frozen weights, are those of the model, which a
    change reports. Averages without a model next to them keep their keys.

    Raises:
        NotFound: if there are no averages, or they do not match one model unambiguously.
        AmbiguousName: if there are several averages.
    """
    file = checkpoint.path or None
    averages = list(_find_averages(checkpoint))
    places = [name_of(average.path) or "the root" for average in averages]
    if not averages:
        raise NotFound(
            f"has no averaged weights; searched for {_LOOKED_FOR}",
            file=file,
            hint=f"ckptool info {shell(file)}" if file else None,
        )
    if len(averages) > 1:
        raise AmbiguousName(
            f"has several averages: {listed(places)}",
            file=file,
            hint="choose one with --key NAME, which keeps its own keys",
        )
    (average,) = averages
    others = list_distinct_sections(
        part
        for part in checkpoint.sections
        if part.kind in MODEL_KINDS and part.path != average.path
    )
    # Without a model next to them, the averages keep their own keys.
    own_section = [average.section] if average.section else []
    models = [average.model] if average.model else others or own_section
    matches = [
        (model, average_by_key)
        for model in models
        if (average_by_key := _match_model_keys(average, get_named_tensors(model.node)))
    ]
    if len(matches) != 1:
        names = listed(model.name or "the root" for model in models)
        raise NotFound(
            f"{counted(len(average.tensors), 'averaged tensor')} of {printable(places[0])} "
            f"{'matches' if len(average.tensors) == 1 else 'match'} no "
            f"model uniquely by key and shape or by order and shape; the models are {names}",
            file=file,
            hint="extract a state dict under its own keys with --key NAME",
        )
    ((model, average_by_key),) = matches
    return drop_unused_bytes(
        checkpoint, _apply_averages(checkpoint, average, model, average_by_key)
    )


def _find_averages(checkpoint: Checkpoint) -> Iterator[_Average]:
    """Yield the averages in a checkpoint, recognized by their keys."""
    sections = [section for section in checkpoint.sections if section.kind in MODEL_KINDS]
    root = checkpoint.root
    if isinstance(root, dict) and all(key in root for key in _LIGHTNING):
        section_by_path = {section.path: section for section in sections}
        average_key, model_key, _counter_key = _LIGHTNING
        average, model = section_by_path.get((average_key,)), section_by_path.get((model_key,))
        if average is not None and model is not None:
            yield _Average(average.path, get_named_tensors(average.node), average, model)
        return  # in such a file, no other entry is an average
    for section in sections:
        yield from _find_averages_in_section(checkpoint, section)
    for path, averages in _find_shadow_lists(root, ()):
        yield _Average(path, averages)
    for optimizer, model, weights in compute_eval_weights(checkpoint):
        yield _Average(optimizer.path, weights, model=model)


def _find_averages_in_section(checkpoint: Checkpoint, section: Section) -> Iterator[_Average]:
    """Yield the averages in a model section: keys with a known prefix, or all of it.

    All of it if a part of its path is named EMA. With a prefix, the other keys are the model; for
    ema-pytorch, the model has a prefix too.
    """
    tensors = get_named_tensors(section.node)
    prefix = find_average_prefix(tensors)
    averages = _select_by_prefix(prefix, tensors) if prefix else {}
    if prefix == _LITEMA or (prefix == _TIMM and has_online_model(tensors)):
        other_keys = drop_keys(section.node, {prefix + name for name in averages})
        if prefix == _LITEMA:
            averages = {
                name: tensor for name, tensor in averages.items() if name not in _LITEMA_SETTINGS
            }
        model = replace(section, node=other_keys)
        yield _Average((*section.path, prefix), averages, model=model)  # without the averages
    elif averages:  # ema-pytorch, or timm's averages alone
        online = _select_by_prefix(_ONLINE, tensors)
        online_model = replace(section, node=OrderedMap(online)) if online else None
        own_section = replace(section, node=OrderedMap(averages))
        yield _Average(section.path, averages, own_section, online_model)
    elif any(isinstance(key, str) and _EMA.search(key) for key in section.path):
        all_tensors = get_named_tensors(copy_state_dict(checkpoint, section))
        yield _Average(section.path, all_tensors, section)


def find_average_prefix(names: Collection[str]) -> str:
    """Return the prefix of the averaged keys in a state dict, or ""."""
    known = (_TIMM, _LITEMA, AVERAGED)
    return next((prefix for prefix in known if any(name.startswith(prefix) for name in names)), "")


def has_online_model(names: Collection[str]) -> bool:
    """Return True if a state dict with averages also has the weights that were averaged."""
    if find_average_prefix(names) == AVERAGED:
        return any(name.startswith(_ONLINE) for name in names)
    # timm's prefix starts with LitEma's, so in both layouts only the model's keys lack this one.
    return not all(name.startswith(_LITEMA) for name in names)


def _find_shadow_lists(
    node: Any, path: Path, depth: int = 4
) -> Iterator[tuple[Path, list[TensorRef]]]:
    """Yield each list `shadow_params` with its path, in at most `depth` nested dicts."""
    if not isinstance(node, dict) or depth == 0:
        return
    for key, value in node.items():
        if key != _SHADOW:
            yield from _find_shadow_lists(value, (*path, key), depth - 1)
        elif isinstance(value, list):
            tensors = [item for item in value if isinstance(item, TensorRef)]
            if tensors and len(tensors) == len(value):
                yield (*path, key), tensors


def _select_by_prefix(prefix: str, tensors: _Tensors) -> _Tensors:
    """Return the tensors with the prefix, by their keys without it."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _match_model_keys(average: _Average, model_tensors: _Tensors) -> _Tensors | None:
    """Return the averages by the keys of a model, or None if they belong to another model.

    Both sides are compared by keys in one form, which depends on the layout of the averages.
    """
    if not isinstance(average.tensors, dict):
        return _match_by_order(average.tensors, model_tensors)
    layout = average.path[-1:]
    if layout == (_LITEMA,):
        average_by_form = {name.replace(".", ""): item for name, item in average.tensors.items()}
        candidates = [
            _index_by_dotless_key(model_tensors, "model."),
            _index_by_dotless_key(model_tensors, ""),
        ]
    elif layout == (_TIMM,):
        average_by_form = dict(average.tensors)
        candidates = _index_by_attribute(average.tensors, model_tensors)
    else:
        bare_keys = _index_by_bare_key(average.tensors)
        average_by_form = {bare: average.tensors[key] for bare, key in bare_keys.items()}
        candidates = [_index_by_bare_key(model_tensors)]
    for model_key_by_form in candidates:
        if average_by_form and average_by_form.keys() <= model_key_by_form.keys():
            by_key = {model_key_by_form[form]: item for form, item in average_by_form.items()}
            if all(item.shape == model_tensors[key].shape for key, item in by_key.items()):
                return by_key
    return None


def _index_by_bare_key(tensors: _Tensors) -> dict[str, str]:
    """Return each key by its form without wrapper prefixes, except the counter of averages."""
    bare_by_key = map_to_bare_names(tensors)
    return {bare: key for key, bare in bare_by_key.items() if key.rpartition(".")[2] != N_AVERAGED}


def _index_by_dotless_key(tensors: _Tensors, prefix: str) -> dict[str, str]:
    """Return each key with the prefix by its form in `LitEma`: `model.a.b` by `ab`.

    Empty if two keys have the same form.
    """
    inside = _select_by_prefix(prefix, tensors)
    keys = {name.replace(".", ""): f"{prefix}{name}" for name in inside}
    return keys if len(keys) == len(inside) else {}


def _index_by_attribute(averages: _Tensors, model_tensors: _Tensors) -> list[dict[str, str]]:
    """Return one mapping, the model's key by averaged key, if one submodule has all of the keys.

    The list is empty if no submodule, or several, have all of them.
    """
    first = next(iter(averages))
    prefixes = [
        name.removesuffix(first) for name in model_tensors if f".{name}".endswith(f".{first}")
    ]
    all_candidates = [{name: prefix + name for name in averages} for prefix in prefixes]
    candidates = [keys for keys in all_candidates if model_tensors.keys() >= {*keys.values()}]
    return candidates if len(candidates) == 1 else []


def _match_by_order(averages: Sequence[TensorRef], model_tensors: _Tensors) -> _Tensors | None:
    """Return the averages in a list by key, or None unless their shapes fit in only one way.

    Buffers with known names are left out. Other buffers and frozen weights are skipped.
    """
    first_name_by_place: dict[Any, str] = {}
    for name, tensor in model_tensors.items():
        if name.rpartition(".")[2] not in BUFFER_NAMES and tensor.dtype in FLOATING:
            first_name_by_place.setdefault(tensor.place or id(tensor), name)
    names = list(first_name_by_place.values())
    shapes = [model_tensors[name].shape for name in names]
    wanted = [tensor.shape for tensor in averages]
    # If the first and the last possible positions are equal, there are no others.
    first_positions = _find_subsequence(wanted, shapes)
    positions_from_end = _find_subsequence(wanted[::-1], shapes[::-1])
    if first_positions is None or positions_from_end is None:
        return None
    last_positions = [len(shapes) - 1 - position for position in reversed(positions_from_end)]
    if first_positions != last_positions:
        return None
    return {names[i]: average for i, average in zip(first_positions, averages, strict=True)}


def _find_subsequence(wanted: Sequence[Any], items: Sequence[Any]) -> list[int] | None:
    """Return the first positions in `items` of the values `wanted`, in order.

    Other items may be between them. None if some values are not found.
    """
    positions: list[int] = []
    for position, item in enumerate(items):
        if len(positions) < len(wanted) and item == wanted[len(positions)]:
            positions.append(position)
    return positions if len(positions) == len(wanted) else None


def _apply_averages(
    checkpoint: Checkpoint, average: _Average, model: Section, average_by_key: _Tensors
) -> Checkpoint:
    """Return the checkpoint with the model's state dict as root, its tensors replaced by averages.

    Keys tied to a replaced one change with it. Entries without an average are those of the model.
    """
    model_tensors, averages = get_named_tensors(model.node), {**average_by_key}
    average_by_place = {model_tensors[name].place: tensor for name, tensor in averages.items()}
    for name, tensor in model_tensors.items():
        if name not in averages and tensor.place is not None and tensor.place in average_by_place:
            averages[name] = average_by_place[tensor.place]
    state = copy_state_dict(checkpoint, model)
    root = copy_with_items(
        state, ((name, averages.get(name, state[name])) for name in model_tensors)
    )
    kept = [name for name in model_tensors if name not in averages]
    source = printable(name_of(average.path)) or "the root"
    text = f"took {counted(len(averages), 'averaged weight')} from {source}"
    changes = [Change("ema", text, len(averages))]
    if kept:
        text = (
            f"kept the model's own {listed(kept)}, which "
            f"{'has' if len(kept) == 1 else 'have'} no average"
        )
        changes.append(Change("keep", text, len(kept)))
    reported_root = checkpoint.root
    if not isinstance(average.tensors, dict):
        # The list is in no section, so it would be reported as left out, although it was taken.
        reported_root = _drop_entry(reported_root, average.path)
    # Everything outside this section is reported, so also the model if the averages have their own.
    taken_section = average.section or model
    return checkpoint.with_root(root, *changes, *report_left_out(reported_root, taken_section))


def _drop_entry(node: Any, path: Path) -> Any:
    """Return a tree of dicts without the entry at a path."""
    key, *inner_path = path
    items = {name: child for name, child in node.items() if name != key}
    if inner_path:
        items[key] = _drop_entry(node[key], tuple(inner_path))
    return copy_with_items(node, items)


@dataclass(frozen=True)
class Masters(Step):
    """Replace the weights with the fp32 master weights in the optimizer state of DeepSpeed.

    Frozen parameters and buffers have no master weights and do not change. Neither do weights of
    stage 3, which are master weights already.
    """

    flag: ClassVar[str] = "master"
    on_files: ClassVar[str] = "fp32 master weights are in the folder of a DeepSpeed run"

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with the master weights in the model.

        Raises:
            NotFound: if there are no master weights, or the model lacks one of the keys.
        """
        root = _to_dict(checkpoint.root)
        module, optimizer = _to_dict(root.get("module")), _to_dict(root.get("optimizer"))
        states = _to_dict(optimizer.get("state"))
        masters = {
            name: state[MASTER]
            for name, state in states.items()
            if isinstance(state, dict) and isinstance(state.get(MASTER), TensorRef)
        }
        if states and not masters and optimizer.get("zero_stage") == SLICED:
            return checkpoint  # In stage 3, the masters are the weights.
        if not masters or not masters.keys() <= module.keys():
            raise NotFound(
                "has no fp32 master weights of a DeepSpeed optimizer",
                file=checkpoint.path or None,
                hint="leave out --master (master=True) to take the weights of the model",
            )
        # By identity, so that tied weights change together.
        master_by_weight = {_get_identity(module[name]): master for name, master in masters.items()}
        new_module = {
            name: master_by_weight.get(_get_identity(weight), weight)
            for name, weight in module.items()
        }
        count = sum(weight is not module[name] for name, weight in new_module.items())
        text = f"replaced {counted(count, 'weight')} with the fp32 master weights of the optimizer"
        if n_unchanged := len(new_module) - count:
            text += f"; {counted(n_unchanged, 'tensor')} without a master "
            text += f"{are(n_unchanged)} unchanged"
        new_states = {
            name: copy_with_items(
                state, ((key, value) for key, value in state.items() if key != MASTER)
            )
            for name, state in states.items()
        }
        new_entries = {
            "module": copy_with_items(module, new_module),
            "optimizer": copy_with_items(optimizer, {**optimizer, "state": new_states}),
        }
        result = checkpoint.with_root(
            copy_with_items(root, {**root, **new_entries}), Change("master", text, count)
        )
        # The reader of stage 3 reports a cast of the weights, which are replaced now.
        other_changes = tuple(change for change in result.changes if change.kind != "cast")
        return replace(result, changes=other_changes, reports=())


def _to_dict(node: Any) -> dict[Any, Any]:
    """Return a dict, or an empty one for any other node."""
    return node if isinstance(node, dict) else {}


def _get_identity(node: Any) -> Any:
    """Return a value that is equal for tied weights only."""
    return node.place if isinstance(node, TensorRef) else id(node)
