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
from ckptool.formats.distributed.zero import MASTER, SLICED
from ckptool.transforms.casting import FLOATING
from ckptool.transforms.compacting import without_unseen
from ckptool.transforms.extraction import left_out, plain_state_dict, without_keys
from ckptool.transforms.names import distinct
from ckptool.transforms.schedule_free import weights_for_evaluation
from ckptool.transforms.step import Step
from ckptool.words import are, counted, listed, printable, shell

_EMA = re.compile(r"(?<![A-Z])EMA|(?<![A-Za-z])[Ee]ma(?![a-z])")
"""Part of a path to averages: `model_ema`, `state_dict_ema`, `ema`, a callback `EMACallback`."""
_LIGHTNING = ("state_dict", "current_model_state", "averaging_state")
"""Keys of Lightning's `WeightAveraging`: the average, the model, the counter."""
_LITEMA = "model_ema."
"""LDM, `ldm/modules/ema.py`: buffers of `LitEma` have parameter names without the dots."""
_LITEMA_COUNTS = ("decay", "num_updates")
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
    tensors: _Tensors | Sequence[TensorRef]
    section: Section | None = None
    """The section of the averages, if they have their own."""
    model: Section | None = None
    """The model, if the layout determines it."""


def with_averages(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the averaged weights as its state dict, under the model's keys.

    Entries without an average, such as buffers and frozen weights, are those of the model, which a
    change reports. Averages without a model next to them keep their keys.

    Raises:
        NotFound: if there are no averages, or they do not match one model unambiguously.
        AmbiguousName: if there are several averages.
    """
    file = checkpoint.path or None
    found = list(_averages(checkpoint))
    where = [name_of(one.path) or "the root" for one in found]
    if not found:
        raise NotFound(
            f"has no averaged weights; searched for {_LOOKED_FOR}",
            file=file,
            hint=f"ckptool info {shell(file)}" if file else None,
        )
    if len(found) > 1:
        raise AmbiguousName(
            f"has several averages: {listed(where)}",
            file=file,
            hint="choose one with --key NAME, which keeps its own keys",
        )
    (average,) = found
    others = distinct(
        part
        for part in checkpoint.sections
        if part.kind in MODEL_KINDS and part.path != average.path
    )
    alone = [average.section] if average.section else []  # these have the keys of the model already
    models = [average.model] if average.model else others or alone
    fitting = [
        (one, named)
        for one in models
        if (named := _match_model_keys(average, get_named_tensors(one.node)))
    ]
    if len(fitting) != 1:
        names = listed(one.name or "the root" for one in models)
        raise NotFound(
            f"{counted(len(average.tensors), 'averaged tensor')} of {printable(where[0])} "
            f"{'matches' if len(average.tensors) == 1 else 'match'} no "
            f"model uniquely by key and shape or by order and shape; the models are {names}",
            file=file,
            hint="extract a state dict under its own keys with --key NAME",
        )
    return without_unseen(checkpoint, _make_checkpoint(checkpoint, average, *fitting[0]))


def _averages(checkpoint: Checkpoint) -> Iterator[_Average]:
    """Yield the averages in a checkpoint, recognized by their keys."""
    parts = [part for part in checkpoint.sections if part.kind in MODEL_KINDS]
    root, named = checkpoint.root, {part.path: part for part in parts}
    if isinstance(root, dict) and all(key in root for key in _LIGHTNING):
        average, model = (named.get((key,)) for key in _LIGHTNING[:2])
        if average is not None and model is not None:
            yield _Average(average.path, get_named_tensors(average.node), average, model)
        return
    for part in parts:
        tensors = get_named_tensors(part.node)
        prefix = average_prefix(tensors)
        inner = _under(prefix, tensors) if prefix else {}
        if prefix == _TIMM and has_online_model(tensors):
            rest = without_keys(part.node, {_TIMM + name for name in inner})
            yield _Average((*part.path, _TIMM), inner, None, replace(part, node=rest))
        elif prefix == _LITEMA:
            counts = {name: one for name, one in inner.items() if name not in _LITEMA_COUNTS}
            model = replace(part, node=without_keys(part.node, {_LITEMA + name for name in inner}))
            yield _Average((*part.path, _LITEMA), counts, None, model)
        elif inner:
            online = _under(_ONLINE, tensors)
            model = replace(part, node=OrderedMap(online)) if online else None
            yield _Average(part.path, inner, replace(part, node=OrderedMap(inner)), model)
        elif any(isinstance(key, str) and _EMA.search(key) for key in part.path):
            yield _Average(part.path, get_named_tensors(plain_state_dict(checkpoint, part)), part)
    for path, node in _lists(root, ()):
        yield _Average(path, node)
    for optimizer, model, weights in weights_for_evaluation(checkpoint):
        yield _Average(optimizer.path, weights, None, model)


def average_prefix(names: Collection[str]) -> str:
    """Return the prefix of the averaged keys in a state dict, or ""."""
    known = (_TIMM, _LITEMA, AVERAGED)
    return next((one for one in known if any(name.startswith(one) for name in names)), "")


def has_online_model(names: Collection[str]) -> bool:
    """Return True if a state dict with averages also has the weights that were averaged."""
    if average_prefix(names) == AVERAGED:
        return any(name.startswith(_ONLINE) for name in names)
    return not all(name.startswith(_LITEMA) for name in names)


def _lists(node: Any, path: Path, depth: int = 4) -> Iterator[tuple[Path, list[TensorRef]]]:
    """Yield the lists `shadow_params`, which may be a few dicts deep."""
    for key, value in node.items() if isinstance(node, dict) and depth else ():
        if key != _SHADOW:
            yield from _lists(value, (*path, key), depth - 1)
        elif value and isinstance(value, list) and all(isinstance(x, TensorRef) for x in value):
            yield (*path, key), value


def _under(prefix: str, tensors: _Tensors) -> _Tensors:
    cut = len(prefix)
    return {name[cut:]: one for name, one in tensors.items() if name.startswith(prefix)}


def _match_model_keys(average: _Average, raw: _Tensors) -> _Tensors | None:
    """Return the averages by the keys of a model, or None if they belong to another."""
    if not isinstance(average.tensors, dict):
        return _by_order(average.tensors, raw)
    if average.path[-1:] == (_LITEMA,):
        own = {name.replace(".", ""): one for name, one in average.tensors.items()}
        ways = [_by_dotless(raw, "model."), _by_dotless(raw, "")]
    elif average.path[-1:] == (_TIMM,):
        own, ways = dict(average.tensors), _by_attribute(average.tensors, raw)
    else:
        own = {new: average.tensors[old] for new, old in _by_bare(average.tensors).items()}
        ways = [_by_bare(raw)]
    for names in ways:
        if own and own.keys() <= names.keys():
            named = {names[name]: one for name, one in own.items()}
            if all(one.shape == raw[name].shape for name, one in named.items()):
                return named
    return None


def _by_bare(tensors: _Tensors) -> dict[str, str]:
    """Return keys by their form without wrapper prefixes; the counter of averages is left out."""
    bare = map_to_bare_names(tensors).items()
    return {new: name for name, new in bare if name.rpartition(".")[2] != N_AVERAGED}


def _by_dotless(tensors: _Tensors, prefix: str) -> dict[str, str]:
    """Return the keys under a prefix by their names in `LitEma`; empty if two are the same."""
    inside = _under(prefix, tensors)
    found = {name.replace(".", ""): f"{prefix}{name}" for name in inside}
    return found if len(found) == len(inside) else {}


def _by_attribute(averages: _Tensors, raw: _Tensors) -> list[dict[str, str]]:
    """Return the keys below the one attribute that has all keys of the averages."""
    first = next(iter(averages))
    fronts = [name.removesuffix(first) for name in raw if f".{name}".endswith(f".{first}")]
    found = [{name: front + name for name in averages} for front in fronts]
    found = [names for names in found if raw.keys() >= {*names.values()}]
    return found if len(found) == 1 else []


def _by_order(averages: Sequence[TensorRef], raw: _Tensors) -> _Tensors | None:
    """Return the tensors of a list by key, if their shapes match the model's in only one way.

    Buffers with known names are left out. Other buffers and frozen weights are skipped.
    """
    once: dict[Any, str] = {}
    for name, one in raw.items():
        if name.rpartition(".")[2] not in BUFFER_NAMES and one.dtype in FLOATING:
            once.setdefault(one.place or id(one), name)
    names = list(once.values())
    shapes = [raw[name].shape for name in names]
    wanted = [one.shape for one in averages]
    first = _find_subsequence(wanted, shapes)
    last = _find_subsequence(wanted[::-1], shapes[::-1])
    if first is None or last is None or first != [len(shapes) - 1 - at for at in last[::-1]]:
        return None
    return {names[at]: one for at, one in zip(first, averages, strict=True)}


def _find_subsequence(wanted: Sequence[Any], there: Sequence[Any]) -> list[int] | None:
    """Return the first positions of `there` that contain `wanted` in order."""
    places: list[int] = []
    for at, one in enumerate(there):
        if len(places) < len(wanted) and one == wanted[len(places)]:
            places.append(at)
    return places if len(places) == len(wanted) else None


def _make_checkpoint(
    checkpoint: Checkpoint, average: _Average, model: Section, named: _Tensors
) -> Checkpoint:
    raw, averages = get_named_tensors(model.node), {**named}
    tied = {raw[name].place: one for name, one in averages.items()}
    for name, one in raw.items():
        if name not in averages and one.place is not None and one.place in tied:
            averages[name] = tied[one.place]
    state = plain_state_dict(checkpoint, model)
    root = copy_with_items(state, ((name, averages.get(name, state[name])) for name in raw))
    kept = [name for name in raw if name not in averages]
    where = printable(name_of(average.path)) or "the root"
    text = f"took {counted(len(averages), 'averaged weight')} from {where}"
    changes = [Change("ema", text, len(averages))]
    if kept:
        text = (
            f"kept the model's own {listed(kept)}, which "
            f"{'has' if len(kept) == 1 else 'have'} no average"
        )
        changes.append(Change("keep", text, len(kept)))
    rest = checkpoint.root
    if not isinstance(average.tensors, dict):
        rest = _remove_at(rest, average.path)
    return checkpoint.with_root(root, *changes, *left_out(rest, average.section or model))


def _remove_at(node: Any, path: Path) -> Any:
    """Return a tree without the entry at a path of dicts."""
    key, *below = path
    rest = {name: one for name, one in node.items() if name != key}
    if below:
        rest[key] = _remove_at(node[key], tuple(below))
    return copy_with_items(node, rest)


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
        root = _mapping(checkpoint.root)
        module, optimizer = _mapping(root.get("module")), _mapping(root.get("optimizer"))
        states = _mapping(optimizer.get("state"))
        masters = {
            name: state[MASTER]
            for name, state in states.items()
            if isinstance(state, dict) and isinstance(state.get(MASTER), TensorRef)
        }
        if states and not masters and optimizer.get("zero_stage") == SLICED:
            return checkpoint
        if not masters or not masters.keys() <= module.keys():
            raise NotFound(
                "has no fp32 master weights of a DeepSpeed optimizer",
                file=checkpoint.path or None,
                hint="leave out --master (master=True) to take the weights of the model",
            )
        by_place = {_place(module[name]): master for name, master in masters.items()}
        weights = [(name, by_place.get(_place(one), one)) for name, one in module.items()]
        count = sum(one is not module[name] for name, one in weights)
        text = f"replaced {counted(count, 'weight')} with the fp32 master weights of the optimizer"
        if count < len(weights):
            rest = len(weights) - count
            text += f"; {counted(rest, 'tensor')} without a master {are(rest)} unchanged"
        kept = {
            name: copy_with_items(state, ((k, v) for k, v in state.items() if k != MASTER))
            for name, state in states.items()
        }
        changes = {
            "module": copy_with_items(module, weights),
            "optimizer": copy_with_items(optimizer, {**optimizer, "state": kept}),
        }
        made = checkpoint.with_root(
            copy_with_items(root, {**root, **changes}), Change("master", text, count)
        )
        other_changes = tuple(change for change in made.changes if change.kind != "cast")
        return replace(made, changes=other_changes, reports=())


def _mapping(node: Any) -> dict[Any, Any]:
    return node if isinstance(node, dict) else {}


def _place(node: Any) -> Any:
    """Return the place of a weight, which tied keys share."""
    return node.place if isinstance(node, TensorRef) else id(node)
