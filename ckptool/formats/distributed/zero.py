"""A DeepSpeed folder: with ZeRO, each process has a slice of flat parameter vectors.

The tree is the file of rank 0 with full tensors: weights, and the optimizer state by parameter
name. Only pickles are read. Sources, DeepSpeed 0.5 to 0.19: runtime/engine.py,
runtime/zero/stage_1_and_2.py and stage3.py, runtime/bf16_optimizer.py, utils/zero_to_fp32.py,
checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

from ckptool.core.checkpoint import Change, Checkpoint, Details
from ckptool.core.model import Opaque, TensorRef, copy_with_items
from ckptool.dtypes import BY_NAME
from ckptool.errors import CorruptFile, FileMissing, UnsupportedFormat
from ckptool.files.place import place_of
from ckptool.formats.base import (
    Format,
    Probe,
    add_error_context,
    combine_details,
    distributed_refusal,
)
from ckptool.formats.distributed.placements import (
    ONE_SAVE,
    check_ranks,
    parse_sizes,
)
from ckptool.formats.distributed.zero_vectors import (
    MASTER,
    VectorGroup,
    find_consecutive_slices,
    find_even_slices,
    find_stated_slices,
    get_item,
    join_vectors,
    make_vector,
    slice_evenly,
)
from ckptool.formats.opening import TORCH_FILES, open_together
from ckptool.formats.torch_zip import read_torch_file
from ckptool.limits import Limits
from ckptool.symbolic.encoder import encode
from ckptool.words import counted, few, listed, printable, shell

_MODEL_FILE = re.compile(
    r"(?:zero_pp_rank_(?P<rank>\d{1,9})_)?mp_rank_(?P<mp>\d{1,9})_model_states\.pt", re.ASCII
)
_OPTIMIZER_FILE = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_?optim_states\.pt",
    re.ASCII,
)
_UNJOINED_FILE = re.compile(
    r"layer_.*_model_states\.pt|layer_.*-model_states\.pt|expp_rank_.*_optim_states\.pt"
)
"""Files of pipelines, with separate layers, and of experts."""
_TAG_FILES = ("latest", "latest_universal")
_UNIVERSAL_FOLDER = "zero"
_SHAPE_KEYS = ("param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params")
_LAYOUT_KEYS = frozenset({
    "partition_count", "base_optimizer_state", "optimizer_state_dict", "param_groups",
    "single_partition_of_fp32_groups", "fp32_flat_groups", "group_paddings",
    "ds_zero_partition_groups", "param_alignment_paddings", "param_slice_mappings",
    "ds_version", "ds_config",
})  # fmt: skip
"""Keys of an optimizer file that describe the layout of its vectors, or are read separately."""
SLICED = 3
"""The stage with sliced weights, which exist only as masters."""
_MAX_TAG_BYTES = 256
_USE_SCRIPT = "try zero_to_fp32.py of the DeepSpeed version that wrote it"


class _Step(NamedTuple):
    """The files of one step of a run, in the order of the ranks."""

    folder: str
    models: tuple[str, ...]
    optims: tuple[str, ...]
    is_stage_3: bool
    """True if each rank has a model file (stage 3)."""
    is_universal: bool

    @property
    def files(self) -> tuple[str, ...]:
        """The paths of the files of all ranks."""
        return self.models + self.optims


class DeepSpeed(Format):
    """The format `deepspeed`."""

    name = "deepspeed"
    resumes = False
    refusal = distributed_refusal(
        "it is a DeepSpeed folder: the file of each rank has slices of the parameters",
        "load_checkpoint of DeepSpeed",
    )

    def recognize(self, probe: Probe) -> bool:
        """Return True for the folder of a DeepSpeed run, or of one step."""
        return probe.compute_once(_find_step_folder) is not None

    def read(self, probe: Probe) -> Checkpoint:
        """Return the tree of rank 0 with full tensors.

        The model files of the other ranks are opened only for frozen parameters of stage 3.
        """
        step = _parse_step(probe)  # the folder of one training step, with its files by rank
        with open_together((step.models[0], *step.optims), probe.limits, TORCH_FILES) as (
            first,
            *optims,
        ):
            frozen = isinstance(first.root, dict) and first.root.get("frozen_param_shapes")
            other_models = step.models[1:] if frozen else ()  # nothing else of theirs is needed
            with open_together(other_models, probe.limits, TORCH_FILES) as others:
                models, files = [first, *others], [first, *others, *optims]
                with add_error_context(step.folder, hint=ONE_SAVE, rules_of="DeepSpeed"):
                    checkpoint = _join_files(step, models, optims, probe.limits)
        return combine_details(
            files,
            replace(checkpoint, path=probe.path),
            size=sum(map(probe.place.size, step.files)),
            writer=" ".join(("DeepSpeed", str(checkpoint.root.get("ds_version", "")))).strip(),
            notes=checkpoint.details.notes,
        )


DEEPSPEED = DeepSpeed()


def _find_step_folder(probe: Probe) -> str | None:
    """Return the folder with the files of a step; None if there is none.

    It is the folder itself, or the subfolder whose name is in the file `latest`. An unreadable one
    is ignored.
    """
    if any(map(_MODEL_FILE.fullmatch, probe.entries)):
        return probe.path
    for name in _TAG_FILES:
        if name not in probe.entries:
            continue
        try:
            with open(os.path.join(probe.path, name), "rb") as file:
                tag = os.fsdecode(file.read(_MAX_TAG_BYTES).strip())
            is_plain_name = os.path.basename(tag) == tag and tag not in (os.curdir, os.pardir)
            if is_plain_name:
                folder = os.path.join(probe.path, tag)
                if any(map(_MODEL_FILE.fullmatch, probe.place.list_names(folder))):
                    return folder
        except (OSError, ValueError):
            continue
    return None


def is_step(probe: Probe) -> bool:
    """Return True for the folder of one DeepSpeed step."""
    return probe.compute_once(_find_step_folder) == probe.path


def is_step_file(path: str) -> bool:
    """Return True if a file in the folder of a step is part of the checkpoint."""
    name = os.path.basename(path)
    return name == _UNIVERSAL_FOLDER or bool(
        _MODEL_FILE.fullmatch(name) or _OPTIMIZER_FILE.fullmatch(name)
    )


def find_step_files(probe: Probe) -> tuple[str, ...]:
    """Return the paths of the files of all ranks (universal folder: of all parameters).

    Raises:
        FileMissing, UnsupportedFormat: as in `DeepSpeed.read`.
    """
    step = _parse_step(probe)
    top = os.path.join(step.folder, _UNIVERSAL_FOLDER)
    names = sorted(probe.place.list_names(top)) if step.is_universal else []
    return (
        *step.files,
        *(file for name in names for file in _list_parameter_files(os.path.join(top, name))),
    )


def _list_parameter_files(path: str) -> list[str]:
    """Return the `.pt` files of a parameter, the fp32 master first.

    In a universal folder a parameter is a folder; a `.pt` file there is returned itself.
    """
    if not place_of(path).is_folder(path):
        return [path] if path.endswith(".pt") else []
    names = (name for name in place_of(path).list_names(path) if name.endswith(".pt"))
    ordered = sorted(names, key=lambda name: (name != f"{MASTER}.pt", name))
    return [os.path.join(path, name) for name in ordered]


def _parse_step(probe: Probe) -> _Step:
    """Return the files of a step; raise an error if one is missing or cannot be joined.

    With stage 3 each rank has a model file, else there is only one. Each rank has an optimizer
    file, but a universal folder has none.
    """
    folder = probe.compute_once(_find_step_folder) or probe.path
    names = sorted(probe.place.list_names(folder))
    models: dict[int, str] = {}  # name by rank
    optims: dict[int, str] = {}
    unsupported = [name for name in names if _UNJOINED_FILE.fullmatch(name)]
    is_stage_3 = False
    for name in names:
        match = _MODEL_FILE.fullmatch(name) or _OPTIMIZER_FILE.fullmatch(name)
        if match is None:
            continue
        files = models if match.re is _MODEL_FILE else optims
        files[int(match["rank"] or 0)] = name
        is_stage_3 |= files is models and match["rank"] is not None  # a model file per rank
        if int(match["mp"]):  # tensor parallelism
            unsupported.append(name)
    if unsupported:
        message = "has files with pipeline, expert or tensor parallelism, whose parts are not"
        hint = f"open one of them: ckptool list {shell(os.path.join(folder, unsupported[0]))}"
        raise UnsupportedFormat(f"{message} joined: {few(unsupported)}", file=folder, hint=hint)
    is_universal = _UNIVERSAL_FOLDER in names and not optims
    step = _Step(
        folder,
        tuple(os.path.join(folder, models[rank]) for rank in sorted(models)),
        tuple(os.path.join(folder, optims[rank]) for rank in sorted(optims)),
        is_stage_3,
        is_universal,
    )
    world = max((*models, *optims)) + 1
    _check_ranks(step, models, world if is_stage_3 else 1)
    # Stage 3 has weights only in the optimizer files; otherwise the model file is enough.
    if optims or (is_stage_3 and not is_universal):
        _check_ranks(step, optims, world)
    return step


def _check_ranks(step: _Step, files: Mapping[int, str], world: int) -> None:
    """Refuse a step without the files of exactly `world` ranks; `files` are names by rank."""
    any_name = next(iter(files.values()), "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    name_pattern = re.sub(r"(?<=zero_pp_rank_)\d+", "{rank}", any_name)
    hint = ONE_SAVE
    if not step.is_stage_3:  # one model file has the complete weights
        model_file = shell(os.path.join(step.folder, "mp_rank_00_model_states.pt"))
        hint = (
            f"copy it as well, or convert only the weights: ckptool convert {model_file} OUT "
            "--model-only"
        )
    check_ranks(files, world, name_pattern, step.folder, hint)


def _join_files(
    step: _Step, models: Sequence[Checkpoint], optims: Sequence[Checkpoint], limits: Limits
) -> Checkpoint:
    """Return the tree of rank 0 with full tensors, with notes and the casts of its weights.

    `optimizer` becomes the state by parameter name, with fp32 masters under `fp32`. In stage 3 the
    weights are made from the masters, else they are in the file of rank 0. `models` and `optims`
    are in the order of the ranks.
    """
    first = _require_dict(models[0].root, models[0].path)
    module = first.get("module")
    if not isinstance(module, dict):
        raise UnsupportedFormat("has no weights under 'module'", file=models[0].path)
    if not optims and not step.is_universal:  # without ZeRO, the optimizer is in the model file
        no_optimizer = ("the folder has no optimizer file",)
        return _make_checkpoint(first, () if first.get("optimizer") else no_optimizer)
    shapes = _parse_shapes(first.get("param_shapes"))
    if step.is_universal:
        path = os.path.join(step.folder, _UNIVERSAL_FOLDER, "optimizer_state.pt")
        rank_states = [_require_dict(read_torch_file(path, limits), path)]
        groups = _collect_groups(rank_states, [path], shapes, has_vectors=False)
        states = _read_universal(step.folder, groups, limits)
    else:
        files = [file.path for file in optims]
        rank_states = [
            _require_dict(file.root, file.path, "optimizer_state_dict") for file in optims
        ]
        _check_alike(step, rank_states, files)
        groups = _collect_groups(rank_states, files, shapes, has_vectors=True)
        states = _collect_states(groups, rank_states, files, is_stage_3=step.is_stage_3)
    notes = [f"joined {counted(len(step.files), 'DeepSpeed file')}"]
    skipped_keys = _find_skipped_keys(rank_states[0], groups)
    if skipped_keys and not step.is_universal:
        notes.append(f"left out the 8-bit optimizer state: {listed(skipped_keys)}")
    entries = {key: node for key, node in first.items() if key not in _SHAPE_KEYS}
    entries["optimizer"] = _make_optimizer(rank_states[0], groups, states)
    if not step.is_stage_3:
        return _make_checkpoint(copy_with_items(first, entries), notes)
    weights = _cast_masters(module, states)
    entries["module"] = _join_weights(first, models, weights.root["module"])
    return replace(
        _make_checkpoint(copy_with_items(first, entries), (*notes, *weights.details.notes)),
        changes=weights.changes,
        reports=weights.reports,
    )


def _make_optimizer(
    rank_state: Mapping[Any, Any], groups: Sequence[VectorGroup], states: dict[str, dict[Any, Any]]
) -> dict[str, Any]:
    """Return the whole optimizer state, with the state of each parameter by its name.

    ZeRO stores some state once for a whole group, such as `step`. It is added to each parameter's
    entry in `states`, in place. Entries of `rank_state` other than ZeRO's own layout are kept.
    """
    for group in groups:
        for name in group.shapes:
            states[name] |= {
                key: _copy_group_node(f"{name}/{key}", node)
                for key, node in group.shared_state.items()
            }
    return {
        "state": states,
        "param_groups": _name_param_groups(rank_state, [list(group.shapes) for group in groups]),
        **{key: _unwrap_enum(node) for key, node in rank_state.items() if key not in _LAYOUT_KEYS},
    }


def _find_skipped_keys(rank_state: Mapping[Any, Any], groups: Sequence[VectorGroup]) -> list[str]:
    """Return the keys of tensors in the optimizer state that no group has: 8-bit states."""
    kept_keys = {key for group in groups for key in group.vectors}
    states, _ = _split_base_state(rank_state)
    items = (item for state in states.values() for item in state.items())
    keys = {key for key, node in items if _has_dimensions(node)}
    return sorted(map(str, keys - kept_keys))


def _make_checkpoint(root: Any, notes: Sequence[str]) -> Checkpoint:
    """Return a checkpoint with these notes, which has no path yet."""
    return Checkpoint(root, DEEPSPEED.name, "", Details(notes=tuple(notes)))


def _check_alike(
    step: _Step, rank_states: Sequence[Mapping[Any, Any]], files: Sequence[str]
) -> None:
    """Raise an error unless the optimizer files are those of all ranks of one save.

    Options and steps must agree. A fingerprint that a file lacks (None) is not compared.
    """
    # A number, or one for each group; groups of expert layers are divided among fewer ranks.
    stated = rank_states[0].get("partition_count")
    world = max(stated, default=None) if isinstance(stated, list) else stated
    if type(world) is int:
        names = {rank: os.path.basename(file) for rank, file in enumerate(files)}
        _check_ranks(step, names, world)
    first = _list_fingerprints(rank_states[0])
    for state, file in zip(rank_states[1:], files[1:], strict=True):
        other = _list_fingerprints(state)
        pairs = zip(first, other, strict=False)
        is_alike = len(first) == len(other) and all(a == b or None in (a, b) for a, b in pairs)
        if not is_alike:
            message = (
                f"has other optimizer options, or another step, than {os.path.basename(files[0])}"
            )
            raise CorruptFile(message, file=file, hint=ONE_SAVE)


def _list_fingerprints(rank_state: Mapping[Any, Any]) -> list[bytes | int | None]:
    """Return the values that are equal in the files of all ranks of one save, to compare them.

    A value is its pickle; a tensor without dimensions, such as a step, is its checksum, or None if
    the file does not state it. Vectors are left out, because each rank has another part.
    """
    states, groups = _split_base_state(rank_state)
    run_facts = (
        _unwrap_enum(rank_state.get("zero_stage")),
        rank_state.get("partition_count"),
        rank_state.get("ds_version"),
    )
    fingerprints: list[bytes | int | None] = [encode(fact).data for fact in run_facts]
    for mapping in (*groups, *states.values()):
        for key, value in (mapping or {}).items():
            if not isinstance(value, TensorRef):
                fingerprints.append(encode((key, value)).data)
            elif not _has_dimensions(value):
                fingerprints.append(value.storage.crc32 if value.storage else None)
    return fingerprints


def _split_base_state(
    rank_state: Mapping[Any, Any],
) -> tuple[Mapping[Any, Any], list[dict[Any, Any]]]:
    """Return the optimizer's state of each vector by number, and its groups."""
    state_of_zero_3 = rank_state.get("optimizer_state_dict", rank_state)
    base = rank_state.get("base_optimizer_state", state_of_zero_3)  # the key of ZeRO 1 and 2
    if isinstance(base, list):  # an elastic checkpoint: the state of each vector, without groups
        return dict(enumerate(base)), []
    return base.get("state") or {}, base.get("param_groups") or []


def _collect_groups(
    rank_states: Sequence[Mapping[Any, Any]],
    files: Sequence[str],
    shapes: Sequence[Any],
    *,
    has_vectors: bool,
) -> list[VectorGroup]:
    """Return the parameter groups: shapes, shared state and, with `has_vectors`, the vectors.

    The elements of a group are in one vector per rank for each kind: the fp32 masters, and each
    tensor of the optimizer state. A universal folder has no vectors. `rank_states` and `files` are
    by rank, `shapes` by group.
    """
    rank_masters = [  # by rank, the masters of each group
        _find_masters(rank_state, file) if has_vectors else [None] * len(shapes)
        for rank_state, file in zip(rank_states, files, strict=True)
    ]
    if any(len(masters) != len(shapes) for masters in rank_masters):
        numbers = listed(str(len(masters)) for masters in rank_masters)
        message = f"has {len(shapes)} parameter groups, but its ranks have {numbers} vectors"
        raise UnsupportedFormat(message, file=files[0], hint=_USE_SCRIPT)
    states = [state for state, _ in map(_split_base_state, rank_states)]
    groups = []
    for number, group_shapes in enumerate(shapes):
        group_states = [state.get(number) or {} for state in states]
        first = group_states[0]
        nodes_by_kind: dict[Any, list[Any]] = {}  # by kind, the node of each rank
        if has_vectors:
            nodes_by_kind[MASTER] = [masters[number] for masters in rank_masters]
            keys = [key for key, node in first.items() if _has_dimensions(node)]
            # 8-bit states are left out: they are in blocks, with scales next to them.
            if not any(first[key].dtype == "uint8" for key in keys):
                nodes_by_kind |= {key: [state.get(key) for state in group_states] for key in keys}
        vectors_by_kind = {
            kind: [make_vector(node, file) for node, file in zip(rank_nodes, files, strict=True)]
            for kind, rank_nodes in nodes_by_kind.items()
        }
        # Scalars, such as `step`, are the same in all ranks.
        shared_state = {key: node for key, node in first.items() if not _has_dimensions(node)}
        groups.append(VectorGroup(group_shapes, vectors_by_kind, shared_state))
    return groups


def _has_dimensions(node: Any) -> bool:
    """Return True for a vector, but not for a scalar or number, such as `step`."""
    return isinstance(node, TensorRef) and bool(node.shape)


def _find_masters(rank_state: Mapping[Any, Any], file: str) -> list[Any]:
    """Return the flat vectors of fp32 masters in a rank's file, one for each group."""
    masters = rank_state.get("fp32_flat_groups", rank_state.get("single_partition_of_fp32_groups"))
    if not isinstance(masters, (list, TensorRef)):
        raise UnsupportedFormat("has no fp32 master weights of ZeRO", file=file, hint=_USE_SCRIPT)
    return masters if isinstance(masters, list) else [masters]


def _collect_states(
    groups: Sequence[VectorGroup],
    rank_states: Sequence[Mapping[Any, Any]],
    files: Sequence[str],
    *,
    is_stage_3: bool,
) -> dict[str, dict[Any, Any]]:
    """Return the fp32 master and the optimizer state of each trained parameter by name.

    Stage 3 (`is_stage_3`) has an equal slice of each parameter in each rank. Stages 1 and 2 state
    the slices in newer files; in older ones the parameters follow each other.
    """
    states: dict[str, dict[Any, Any]] = {}
    for number, group in enumerate(groups):
        if is_stage_3:
            finder_by_name = find_even_slices(group, len(files))
        else:
            mappings = [
                get_item(state.get("param_slice_mappings"), number) for state in rank_states
            ]
            paddings = get_item(rank_states[0].get("param_alignment_paddings"), number)
            has_mappings = all(isinstance(mapping, dict) for mapping in mappings)
            finder_by_name = (
                find_stated_slices(group, mappings)
                if has_mappings
                else find_consecutive_slices(group, paddings)
            )
        for name, shape in group.shapes.items():
            states[name] = {
                kind: join_vectors(
                    name if kind == MASTER else f"{name}/{kind}",
                    shape,
                    vectors,
                    finder_by_name[name],
                )
                for kind, vectors in group.vectors.items()
            }
    return states


def _copy_group_node(name: str, node: Any) -> Any:
    """Return a group's node for one of its parameters.

    A tensor gets a storage of its own, with the key `name`: the copies are not tied.
    """
    if isinstance(node, TensorRef) and node.storage is not None:
        return replace(node, storage=replace(node.storage, key=name))
    return node


def _cast_masters(module: Mapping[Any, Any], states: Mapping[str, dict[Any, Any]]) -> Checkpoint:
    """Return the weights of stage 3 as in training: fp32 masters, cast when they are read.

    The placeholder of a weight in the file of rank 0 has its dtype. A master with this dtype, or
    with an unknown one, is the weight, and is removed from the optimizer state.
    """
    masters_by_dtype: dict[str | None, dict[str, TensorRef]] = {}  # None: unknown
    for name, state in states.items():
        placeholder = module.get(name)
        dtype = placeholder.dtype if isinstance(placeholder, TensorRef) else None
        is_floating = dtype is not None and BY_NAME[dtype].floating
        masters_by_dtype.setdefault(dtype if is_floating else None, {})[name] = state[MASTER]
    from ckptool.transforms import Cast  # here, because no other reader needs it

    trained, cast_checkpoint, notes = dict[str, TensorRef](), _make_checkpoint({}, ()), list[str]()
    changes = list[Change]()
    for dtype, masters in masters_by_dtype.items():
        weights = counted(len(masters), "weight")
        if dtype is None:
            message = (
                "fp32, as in the master weights, because no file states their dtype in training"
            )
            notes.append(f"kept {weights} {message}: {few(list(masters))}")
        elif any(master.dtype != dtype for master in masters.values()):
            message = f"rounded {weights} to {dtype} from the fp32 master weights, as in training"
            notes.append(f"{message}; use --master (master=True) for the master weights")
            changes.append(Change("cast", notes[-1], len(masters)))
            # As in training: no check for overflow, nor for other tensors that depend on these.
            cast = Cast(dtype, cast_optimizer=True, allow_overflow=True, raw=True)
            # From the last result, so that the reports of all casts are kept.
            cast_checkpoint = cast(cast_checkpoint.with_root({"module": masters}))
            masters = cast_checkpoint.root["module"]
        trained |= masters  # cast, or the masters themselves
    for name, state in states.items():
        if trained[name] is state[MASTER]:  # else the file would have it twice
            del state[MASTER]
    return replace(
        _make_checkpoint({"module": trained}, notes),
        changes=tuple(changes),
        reports=cast_checkpoint.reports,
    )


def _join_weights(
    first: Mapping[Any, Any], models: Sequence[Checkpoint], trained: Mapping[str, TensorRef]
) -> dict[Any, Any]:
    """Return the state dict of stage 3: trained weights, frozen ones, tied ones, and buffers.

    `first` is the content of the first of the model files, which has everything but the weights:
    empty placeholders, buffers and ties. Frozen weights are joined from fragments in the files of
    all ranks.

    Raises:
        CorruptFile: an empty placeholder is left, for which there is no weight.
    """
    module, weights = first["module"], dict(trained)
    frozen = first.get("frozen_param_shapes")
    if isinstance(frozen, dict):
        rank_fragments = [
            _require_dict(file.root, file.path, "frozen_param_fragments") for file in models
        ]
        (frozen_shapes,) = _parse_shapes(frozen)
        for name, shape in frozen_shapes.items():
            vectors = [
                make_vector(fragments.get(name), file.path)
                for fragments, file in zip(rank_fragments, models, strict=True)
            ]
            group = VectorGroup(
                {name: shape}, vectors={}, shared_state={}
            )  # only its shape is used
            weights[name] = join_vectors(
                name, shape, vectors, find_even_slices(group, len(models))[name]
            )
    ties = first.get("shared_params")  # name of a tied parameter -> name of the stored one
    for name, stored_name in ties.items() if isinstance(ties, dict) else ():
        if stored_name in weights:
            weights[name] = weights[stored_name]
    complete_names = {*weights, *(first.get("buffer_names") or ())}
    for name, node in module.items():
        is_placeholder = isinstance(node, TensorRef) and node.shape == (0,)
        if is_placeholder and name not in complete_names:
            message = f"the weight {printable(str(name))!r} is not in any file"
            raise CorruptFile(message, file=models[0].path, hint=ONE_SAVE)
    return copy_with_items(module, {**module, **weights})


def _read_universal(
    folder: str, groups: Sequence[VectorGroup], limits: Limits
) -> dict[str, dict[Any, Any]]:
    """Return the state of each parameter: one tensor per file (`fp32.pt`) in its own folder.

    All parameters of a group must have the same files.
    """
    top = os.path.join(folder, _UNIVERSAL_FOLDER)
    names, states = place_of(top).list_names(top), {}
    hint = "create the folder again with ds_to_universal.py"
    for group in groups:
        first_name, first_kinds = next(iter(group.shapes), ""), set[str]()
        for name, shape in group.shapes.items():
            if name not in names:
                message = f"the folder of {printable(name)!r} is missing"
                raise FileMissing(message, file=top, hint=hint)
            states[name] = {
                os.path.basename(file)[: -len(".pt")]: _read_state(name, file, shape, limits)
                for file in _list_parameter_files(os.path.join(top, name))
            }
            first_kinds = first_kinds or set(states[name])
            for kind in sorted(first_kinds ^ set(states[name])):
                message = f"only one of {printable(name)!r} and"
                message = f"{message} {printable(first_name)!r} has {kind}.pt"
                raise FileMissing(message, file=top, hint=hint)
    return states


def _read_state(name: str, path: str, shape: tuple[int, ...], limits: Limits) -> Any:
    """Return one state of a parameter: a tensor of its shape, or a number.

    The file has it alone or under `param`; in stage 3 it is a flat vector, padded at its end.
    """
    node = read_torch_file(path, limits)
    if isinstance(node, dict):
        node = node.get("param")
    if not isinstance(node, TensorRef):
        return node
    if len(node.shape) == 1 and node.shape != shape and node.numel >= prod(shape):
        vector = make_vector(node, path)  # stage 3: flat
        find_pieces = partial(slice_evenly, 0, prod(shape), world=1)  # all but the padding
        return join_vectors(name, shape, [vector], find_pieces)
    return replace(node, requires_grad=False, wrapping=())


def _name_param_groups(
    rank_state: Mapping[Any, Any], names: Sequence[list[str]]
) -> list[dict[Any, Any]]:
    """Return the optimizer groups with parameter names in place of vector numbers.

    `names` are the parameters in each vector, by its number. If the groups do not list all these
    numbers in order, their options are left out, and each vector becomes a group.
    """
    _, groups = _split_base_state(rank_state)
    numbers = [number for group in groups for number in group.get("params", ())]
    if numbers != list(range(len(names))):
        return [{"params": group_names} for group_names in names]
    return [
        {**group, "params": [name for number in group["params"] for name in names[number]]}
        for group in groups
    ]


def _parse_shapes(groups: Any) -> list[dict[str, tuple[int, ...]]]:
    """Return the names and shapes in `param_shapes`: one dict per group, or a single one."""
    shapes = [dict(group) for group in (groups if isinstance(groups, list) else [groups])]
    for name, shape in (item for group in shapes for item in group.items()):
        if not isinstance(name, str) or parse_sizes(shape) != shape:
            raise CorruptFile(f"has no valid shape of the parameter {printable(repr(name))}")
    return shapes


def _require_dict(root: Any, file: str, key: str | None = None) -> dict[Any, Any]:
    """Return the dict at the root of a file, or under a key."""
    node = root.get(key) if key and isinstance(root, dict) else root
    if not isinstance(node, dict):
        raise UnsupportedFormat(f"has no dict {printable(key or 'at its root')}", file=file)
    return node


def _unwrap_enum(node: Any) -> Any:
    """Return the value of a DeepSpeed Enum member, or any other node unchanged."""
    match node:
        case Opaque(args=(number,)) if node.class_name.endswith("ZeroStageEnum"):
            return number
    return node
