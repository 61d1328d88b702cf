"""A DeepSpeed folder: with ZeRO, each process has a slice of flat parameter vectors.

The tree is the file of rank 0 with full tensors: weights, and the optimizer state by parameter
name. Only pickles are read. Sources, DeepSpeed 0.5 to 0.19: runtime/engine.py,
runtime/zero/stage_1_and_2.py and stage3.py, runtime/bf16_optimizer.py, utils/zero_to_fp32.py,
checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import prod
from operator import index
from typing import Any, NamedTuple

from ckptool.core.checkpoint import Change, Checkpoint, Details
from ckptool.core.model import Opaque, TensorRef, copy_with_items, make_plain_tensor
from ckptool.dtypes import BY_NAME
from ckptool.errors import CorruptFile, FileMissing, UnsupportedFormat
from ckptool.files import ByteRange
from ckptool.files.computed import joined
from ckptool.files.place import place_of
from ckptool.files.tiled import late
from ckptool.formats.base import (
    Format,
    Probe,
    add_error_context,
    combine_details,
    distributed_refusal,
)
from ckptool.formats.distributed.placements import (
    ONE_SAVE,
    attributes_of,
    check_ranks,
    parse_sizes,
    row_major_data,
)
from ckptool.formats.opening import TORCH_FILES, open_together
from ckptool.formats.torch_zip import read_torch_file
from ckptool.limits import Limits
from ckptool.symbolic.encoder import encode
from ckptool.words import counted, few, listed, printable, shell

_MODEL = re.compile(
    r"(?:zero_pp_rank_(?P<rank>\d{1,9})_)?mp_rank_(?P<mp>\d{1,9})_model_states\.pt", re.ASCII
)
_OPTIM = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_?optim_states\.pt",
    re.ASCII,
)
_APART = re.compile(
    r"layer_.*_model_states\.pt|layer_.*-model_states\.pt|expp_rank_.*_optim_states\.pt"
)
"""Files of pipelines, with separate layers, and of experts."""
_LATEST = ("latest", "latest_universal")
_UNIVERSAL = "zero"
_PARTS = ("param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params")
_BOOKS = frozenset({
    "partition_count", "base_optimizer_state", "optimizer_state_dict", "param_groups",
    "single_partition_of_fp32_groups", "fp32_flat_groups", "group_paddings",
    "ds_zero_partition_groups", "param_alignment_paddings", "param_slice_mappings",
    "ds_version", "ds_config",
})  # fmt: skip
"""Keys of an optimizer file that describe the layout of its vectors, or are read separately."""
MASTER = "fp32"
"""The key of the fp32 master in the state of a parameter, as in universal folders."""
SLICED = 3
"""The stage with sliced weights, which exist only as masters."""
_LONGEST_TAG = 256
_SCRIPT = "try zero_to_fp32.py of the DeepSpeed version that wrote it"


class _Step(NamedTuple):
    """The files of one step of a run, in the order of the ranks."""

    folder: str
    models: tuple[str, ...]
    optims: tuple[str, ...]
    has_slices: bool
    """True if each rank has a model file (stage 3)."""
    is_universal: bool

    @property
    def files(self) -> tuple[str, ...]:
        """The paths of the files of all ranks."""
        return self.models + self.optims


class _Vector(NamedTuple):
    """Consecutive elements in the file of a rank."""

    dtype: str
    device: str
    data: ByteRange
    file: str

    @property
    def numel(self) -> int:
        return self.data.length // BY_NAME[self.dtype].itemsize

    def cut(self, start: int, count: int) -> ByteRange:
        itemsize = BY_NAME[self.dtype].itemsize
        return self.data.slice(start * itemsize, count * itemsize)


Piece = tuple[int, int, int]
"""Elements of a parameter in the vector of a rank: the rank, the first, and the count."""
Find = Callable[[], Sequence[Piece]]
"""Finds the pieces of a parameter, in the order of its elements."""


class _Group(NamedTuple):
    """Parameters with their elements in one vector of each rank."""

    shapes: Mapping[str, tuple[int, ...]]
    vectors: Mapping[str, Sequence[_Vector]]
    """By kind (`fp32`, `exp_avg`), the vector of each rank."""
    others: Mapping[Any, Any]
    """State of the whole group, for example `step`."""


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
        return probe.compute_once(_folder) is not None

    def read(self, probe: Probe) -> Checkpoint:
        """Return the tree of rank 0 with full tensors."""
        step = _step(probe)
        own = (step.models[0], *step.optims)
        with open_together(own, probe.limits, TORCH_FILES) as (first, *optims):
            frozen = isinstance(first.root, dict) and first.root.get("frozen_param_shapes")
            rest = step.models[1:] if frozen else ()  # these have nothing else
            with open_together(rest, probe.limits, TORCH_FILES) as others:
                models, files = [first, *others], [first, *others, *optims]
                with add_error_context(step.folder, hint=ONE_SAVE, rules_of="DeepSpeed"):
                    made = _join_files(step, models, optims, probe.limits)
        return combine_details(
            files,
            replace(made, path=probe.path),
            size=sum(map(probe.place.size, step.files)),
            writer=" ".join(("DeepSpeed", str(made.root.get("ds_version", "")))).strip(),
            notes=made.details.notes,
        )


DEEPSPEED = DeepSpeed()


def _folder(probe: Probe) -> str | None:
    """Return the folder of the step: the folder itself, or that in `latest`."""
    if any(map(_MODEL.fullmatch, probe.entries)):
        return probe.path
    for name in filter(probe.entries.__contains__, _LATEST):
        try:
            with open(os.path.join(probe.path, name), "rb") as file:
                tag = os.fsdecode(file.read(_LONGEST_TAG).strip())
            if os.path.basename(tag) == tag not in (os.curdir, os.pardir):
                folder = os.path.join(probe.path, tag)
                if any(map(_MODEL.fullmatch, probe.place.names(folder))):
                    return folder
        except (OSError, ValueError):
            continue
    return None


def is_step(probe: Probe) -> bool:
    """Return True for the folder of one DeepSpeed step."""
    return probe.compute_once(_folder) == probe.path


def is_step_file(path: str) -> bool:
    """Return True if a file in the folder of a step is part of the checkpoint."""
    name = os.path.basename(path)
    return name == _UNIVERSAL or bool(_MODEL.fullmatch(name) or _OPTIM.fullmatch(name))


def find_step_files(probe: Probe) -> tuple[str, ...]:
    """Return the paths of the files of all ranks (universal folder: of all parameters).

    Raises:
        FileMissing, UnsupportedFormat: as in `DeepSpeed.read`.
    """
    step = _step(probe)
    top = os.path.join(step.folder, _UNIVERSAL)
    names = sorted(probe.place.names(top)) if step.is_universal else []
    return (*step.files, *(file for name in names for file in _files_of(os.path.join(top, name))))


def _files_of(folder: str) -> list[str]:
    """Return the files of one parameter in a universal folder, the master first."""
    if not place_of(folder).is_folder(folder):
        return [folder] if folder.endswith(".pt") else []
    names = (name for name in place_of(folder).names(folder) if name.endswith(".pt"))
    ordered = sorted(names, key=lambda name: (name != f"{MASTER}.pt", name))
    return [os.path.join(folder, name) for name in ordered]


def _step(probe: Probe) -> _Step:
    folder = probe.compute_once(_folder) or probe.path
    names = sorted(probe.place.names(folder))
    found = {name: m for name in names if (m := _MODEL.fullmatch(name) or _OPTIM.fullmatch(name))}
    apart = [name for name in names if _APART.fullmatch(name)]
    apart += [name for name, one in found.items() if int(one["mp"])]
    if apart:
        what = "has files with pipeline, expert or tensor parallelism, whose parts are not"
        hint = f"open one of them: ckptool list {shell(os.path.join(folder, apart[0]))}"
        raise UnsupportedFormat(f"{what} joined: {few(apart)}", file=folder, hint=hint)
    models = {int(one["rank"] or 0): name for name, one in found.items() if one.re is _MODEL}
    optims = {int(one["rank"]): name for name, one in found.items() if one.re is _OPTIM}
    spread = any(one.re is _MODEL and one["rank"] for one in found.values())
    is_universal = _UNIVERSAL in names and not optims
    step = _Step(
        folder,
        tuple(os.path.join(folder, models[rank]) for rank in sorted(models)),
        tuple(os.path.join(folder, optims[rank]) for rank in sorted(optims)),
        spread,
        is_universal,
    )
    world = max((*models, *optims)) + 1
    _check_ranks(step, models, world if spread else 1)
    if optims or (spread and not is_universal):
        _check_ranks(step, optims, world)
    return step


def _check_ranks(step: _Step, files: Mapping[int, str], world: int) -> None:
    name = next(iter(files.values()), "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    called, hint = re.sub(r"(?<=zero_pp_rank_)\d+", "{rank}", name), ONE_SAVE
    if not step.has_slices:
        alone = shell(os.path.join(step.folder, "mp_rank_00_model_states.pt"))
        hint = (
            f"copy it as well, or convert only the weights: ckptool convert {alone} OUT "
            "--model-only"
        )
    check_ranks(files, world, called, step.folder, hint)


def _join_files(
    step: _Step, models: Sequence[Checkpoint], optims: Sequence[Checkpoint], limits: Limits
) -> Checkpoint:
    """Return the tree of rank 0 with full tensors, with notes and the casts of its weights."""
    first = _mapping(models[0].root, models[0].path)
    module = first.get("module")
    if not isinstance(module, dict):
        raise UnsupportedFormat("has no weights under 'module'", file=models[0].path)
    own = [_mapping(one.root, one.path, "optimizer_state_dict") for one in optims]
    files = [one.path for one in optims]
    if step.is_universal:
        path = os.path.join(step.folder, _UNIVERSAL, "optimizer_state.pt")
        own, files = [_mapping(read_torch_file(path, limits), path)], [path]
    if not own:
        no_optimizer = ("the folder has no optimizer file",)
        return _with_notes(first, () if first.get("optimizer") else no_optimizer)
    shapes = _shapes(first.get("param_shapes"))
    if not step.is_universal:
        _check_alike(step, own, files)
    groups = _groups(own, files, shapes, vectors=not step.is_universal)
    if step.is_universal:
        states = _universal(step.folder, groups, limits)
    else:
        states = _states(groups, own, files, has_slices=step.has_slices)
    for group in groups:
        for name in group.shapes:
            states[name] |= {key: _own(f"{name}/{key}", n) for key, n in group.others.items()}
    optimizer = {
        "state": states,
        "param_groups": _param_groups(own[0], [list(one.shapes) for one in groups]),
        **{key: _number(one) for key, one in own[0].items() if key not in _BOOKS},
    }
    notes = [f"joined {counted(len(step.files), 'DeepSpeed file')}"]
    kept = {key for one in groups for key in one.vectors}
    held = (one.items() for one in _base(own[0])[0].values())
    left = {str(key) for items in held for key, one in items if _is_long(one) and key not in kept}
    if left and optims:
        notes.append(f"left out the 8-bit optimizer state: {listed(sorted(left))}")
    whole = {key: one for key, one in first.items() if key not in _PARTS}
    whole["optimizer"] = optimizer
    if not step.has_slices:
        return _with_notes(copy_with_items(first, whole), notes)
    weights = _cast_masters(module, states)
    whole["module"] = _weights(first, models, weights.root["module"])
    return replace(
        _with_notes(copy_with_items(first, whole), (*notes, *weights.details.notes)),
        changes=weights.changes,
        reports=weights.reports,
    )


def _with_notes(root: Any, notes: Sequence[str]) -> Checkpoint:
    return Checkpoint(root, DEEPSPEED.name, "", Details(notes=tuple(notes)))


def _check_alike(step: _Step, own: Sequence[Mapping[Any, Any]], files: Sequence[str]) -> None:
    """Raise an error unless the files are those of all ranks of one save."""
    stated = own[0].get("partition_count")
    world = max(stated, default=None) if isinstance(stated, list) else stated
    if type(world) is int:
        names = {rank: os.path.basename(file) for rank, file in enumerate(files)}
        _check_ranks(step, names, world)
    first = _marks(own[0])
    for one, file in zip(own[1:], files[1:], strict=True):
        marks = _marks(one)
        pairs = zip(first, marks, strict=False)
        if len(marks) != len(first) or any(None not in pair and len({*pair}) > 1 for pair in pairs):
            what = (
                f"has other optimizer options, or another step, than {os.path.basename(files[0])}"
            )
            raise CorruptFile(what, file=file, hint=ONE_SAVE)


def _marks(own: Mapping[Any, Any]) -> list[bytes | int | None]:
    """Return the facts that are equal in every rank's file of one save, without vectors.

    For a tensor it is the checksum; None if the file does not state it.
    """
    states, groups = _base(own)
    parts = (_number(own.get("zero_stage")), own.get("partition_count"), own.get("ds_version"))
    marks: list[bytes | int | None] = [encode(one).data for one in parts]
    for held in (*groups, *states.values()):
        for key, value in (held or {}).items():
            if not isinstance(value, TensorRef):
                marks.append(encode((key, value)).data)
            elif not _is_long(value):
                marks.append(value.storage.crc32 if value.storage else None)
    return marks


def _base(own: Mapping[Any, Any]) -> tuple[Mapping[Any, Any], list[dict[Any, Any]]]:
    """Return the optimizer's state of each vector by number, and its groups."""
    base = own.get("base_optimizer_state", own.get("optimizer_state_dict", own))
    if isinstance(base, list):  # elastic: only the states
        return dict(enumerate(base)), []
    return base.get("state") or {}, base.get("param_groups") or []


def _groups(
    own: Sequence[Mapping[Any, Any]], files: Sequence[str], shapes: Sequence[Any], *, vectors: bool
) -> list[_Group]:
    """Return the parameters of each vector; with `vectors`, the elements of all ranks."""
    flat = [
        _flat(one, file) if vectors else [None] * len(shapes)
        for one, file in zip(own, files, strict=True)
    ]
    if any(len(one) != len(shapes) for one in flat):
        numbers = listed(str(len(one)) for one in flat)
        what = f"has {len(shapes)} parameter groups, but its ranks have {numbers} vectors"
        raise UnsupportedFormat(what, file=files[0], hint=_SCRIPT)
    states = [_base(one)[0] for one in own]
    groups = []
    for number, of_group in enumerate(shapes):
        every = [one.get(number) or {} for one in states]
        keys = [key for key, one in every[0].items() if _is_long(one)] if vectors else []
        if any(every[0][key].dtype == "uint8" for key in keys):
            keys = []  # 8-bit states are in blocks, with scales next to them
        nodes = {MASTER: [one[number] for one in flat]} if vectors else {}
        nodes |= {key: [one.get(key) for one in every] for key in keys}
        found = {
            kind: [_vector(node, file) for node, file in zip(of_ranks, files, strict=True)]
            for kind, of_ranks in nodes.items()
        }
        others = {key: one for key, one in every[0].items() if not _is_long(one)}
        groups.append(_Group(of_group, found, others))
    return groups


def _is_long(node: Any) -> bool:
    return isinstance(node, TensorRef) and bool(node.shape)


def _flat(own: Mapping[Any, Any], file: str) -> list[Any]:
    """Return the flat vectors of fp32 masters in a rank's file."""
    found = own.get("fp32_flat_groups", own.get("single_partition_of_fp32_groups"))
    if not isinstance(found, (list, TensorRef)):
        raise UnsupportedFormat("has no fp32 master weights of ZeRO", file=file, hint=_SCRIPT)
    return found if isinstance(found, list) else [found]


def _vector(node: Any, file: str) -> _Vector:
    if not isinstance(node, TensorRef) or len(node.shape) != 1:
        raise CorruptFile("an optimizer vector does not have one dimension", file=file)
    return _Vector(node.dtype, node.device, row_major_data(node, "a vector", file), file)


def _states(
    groups: Sequence[_Group],
    own: Sequence[Mapping[Any, Any]],
    files: Sequence[str],
    *,
    has_slices: bool,
) -> dict[str, dict[Any, Any]]:
    """Return the fp32 master and the optimizer state of each trained parameter by name."""
    states: dict[str, dict[Any, Any]] = {}
    for number, group in enumerate(groups):
        if has_slices:
            pieces = _find_sliced(group, len(files))
        else:
            mapped = [_at(one.get("param_slice_mappings"), number) for one in own]
            paddings = _at(own[0].get("param_alignment_paddings"), number)
            every = all(isinstance(one, dict) for one in mapped)
            pieces = _find_mapped(group, mapped) if every else _find_in_row(group, paddings)
        for name, shape in group.shapes.items():
            states[name] = {
                kind: _tensor(
                    name if kind == MASTER else f"{name}/{kind}", shape, every, pieces[name]
                )
                for kind, every in group.vectors.items()
            }
    return states


def _find_sliced(group: _Group, world: int) -> dict[str, Find]:
    """Find the slices of stage 3: every rank has equally many elements of each, padded."""
    # deepspeed/utils/zero_to_fp32.py, zero3_partitioned_param_info: ceil(numel / world) elements.
    start, pieces = 0, dict[str, Find]()
    for name, shape in group.shapes.items():
        pieces[name] = partial(_slices, start, prod(shape), world)
        start += -(-prod(shape) // world)
    return pieces


def _slices(start: int, numel: int, world: int) -> list[Piece]:
    count = -(-numel // world)
    rest = (numel - rank * count for rank in range(world))
    return [(rank, start, min(n, count)) for rank, n in enumerate(rest) if n > 0]


def _find_mapped(group: _Group, mapped: Sequence[Mapping[Any, Any]]) -> dict[str, Find]:
    """Find the slices stated in each rank's file."""
    pieces: dict[str, list[Piece]] = {name: [] for name in group.shapes}
    for rank, one in enumerate(mapped):
        for name, address in one.items():
            found = attributes_of(address)
            pieces[name].append((rank, index(found["start"]), index(found["numel"])))
    return {name: every.copy for name, every in pieces.items()}


def _find_in_row(group: _Group, paddings: Any) -> dict[str, Find]:
    """Find the slices in the concatenated vectors of all ranks, with parameters in order."""
    vectors = group.vectors[MASTER]
    ends = list(accumulate(one.numel for one in vectors))
    start, pieces = 0, dict[str, Find]()
    for number, (name, shape) in enumerate(group.shapes.items()):
        stop = start + prod(shape)
        every = [
            (rank, max(start - end + one.numel, 0), min(stop, end) - max(start, end - one.numel))
            for rank, (one, end) in enumerate(zip(vectors, ends, strict=True))
            if max(start, end - one.numel) < min(stop, end)
        ]
        pieces[name] = every.copy
        padding = _at(paddings, number)
        start = stop + (padding if type(padding) is int and padding > 0 else 0)
    # deepspeed/utils/zero_to_fp32.py, zero2_align: the whole vector is padded to 2 * world.
    align = 2 * len(vectors)
    if -(-start // align) != -(-ends[-1] // align):
        what = f"the parameters need {start:,} elements, but the ranks have {ends[-1]:,}"
        raise CorruptFile(what, file=vectors[0].file, hint=ONE_SAVE)
    return pieces


def _tensor(name: str, shape: tuple[int, ...], vectors: Sequence[_Vector], find: Find) -> TensorRef:
    """Return the tensor made of pieces of the ranks' vectors."""
    first, pieces = vectors[0], find()
    for rank, start, count in pieces:
        one = vectors[rank]
        if one.dtype != first.dtype:
            what = (
                f"{printable(name)!r} is {first.dtype} in the first file and {one.dtype} in this "
                "file"
            )
            raise CorruptFile(what, file=one.file, hint=ONE_SAVE)
        if start + count > one.numel:
            what = f"{printable(name)!r} needs elements {start:,} to {start + count:,} of a vector"
            raise CorruptFile(f"{what} with {one.numel:,} elements", file=one.file, hint=ONE_SAVE)
    held = sum(count for _, _, count in pieces)
    if held != prod(shape):
        what = f"{printable(name)!r} of shape {list(shape)} has {held:,} elements in all ranks"
        raise CorruptFile(what, file=first.file, hint=ONE_SAVE)
    if len(pieces) > 1:  # found on reading: thousands of ranks have millions of pieces
        size = prod(shape) * BY_NAME[first.dtype].itemsize
        data = late(first.file, size, partial(_join_pieces, vectors, find))
    else:
        data = vectors[pieces[0][0]].cut(*pieces[0][1:]) if pieces else first.cut(0, 0)
    return make_plain_tensor(name, first.dtype, shape, data, first.device)


def _join_pieces(vectors: Sequence[_Vector], find: Find) -> tuple[ByteRange, None]:
    return joined([vectors[rank].cut(start, count) for rank, start, count in find()]), None


def _own(name: str, node: Any) -> Any:
    """Return a group's node for one of its parameters, numbers in their own storage."""
    if isinstance(node, TensorRef) and node.storage is not None:
        return replace(node, storage=replace(node.storage, key=name))
    return node


def _cast_masters(module: Mapping[Any, Any], states: Mapping[str, dict[Any, Any]]) -> Checkpoint:
    """Return the weights of stage 3 as in training: fp32 masters, cast on reading.

    The placeholder of a weight in the file of rank 0 has its dtype. A master with this dtype, or
    with an unknown one, is the weight, and is removed from the optimizer state.
    """
    types: dict[str | None, dict[str, TensorRef]] = {}
    for name, state in states.items():
        dtype = one.dtype if isinstance(one := module.get(name), TensorRef) else None
        known = dtype is not None and BY_NAME[dtype].floating
        types.setdefault(dtype if known else None, {})[name] = state[MASTER]
    from ckptool.transforms import Cast  # the only reader that computes, as training did

    found, made, notes = dict[str, TensorRef](), _with_notes({}, ()), list[str]()
    changes = list[Change]()
    for dtype, masters in types.items():
        weights = counted(len(masters), "weight")
        if dtype is None:
            what = "fp32, as in the master weights, because no file states their dtype in training"
            notes.append(f"kept {weights} {what}: {few(list(masters))}")
        elif any(one.dtype != dtype for one in masters.values()):
            what = f"rounded {weights} to {dtype} from the fp32 master weights, as in training"
            notes.append(f"{what}; use --master (master=True) for the master weights")
            changes.append(Change("cast", notes[-1], len(masters)))
            cast = Cast(dtype, cast_optimizer=True, allow_overflow=True, raw=True)
            made = cast(made.with_root({"module": masters}))
            masters = made.root["module"]
        found |= masters
    for name, state in states.items():
        if found[name] is state[MASTER]:
            del state[MASTER]
    return replace(
        _with_notes({"module": found}, notes), changes=tuple(changes), reports=made.reports
    )


def _weights(
    first: Mapping[Any, Any], models: Sequence[Checkpoint], trained: Mapping[str, TensorRef]
) -> dict[Any, Any]:
    """Return the state dict of stage 3: `trained` weights, frozen ones, ties, and its buffers."""
    module, found = first["module"], dict(trained)
    frozen = first.get("frozen_param_shapes")
    if isinstance(frozen, dict):
        parts = [_mapping(one.root, one.path, "frozen_param_fragments") for one in models]
        for name, shape in _shapes([frozen])[0].items():
            vectors = [
                _vector(part.get(name), one.path) for part, one in zip(parts, models, strict=True)
            ]
            group = _Group({name: shape}, {}, {})
            found[name] = _tensor(name, shape, vectors, _find_sliced(group, len(models))[name])
    ties = first.get("shared_params")
    for name, kept in ties.items() if isinstance(ties, dict) else ():
        if kept in found:
            found[name] = found[kept]
    kept = {*found, *(first.get("buffer_names") or ())}
    for name, one in module.items():
        if isinstance(one, TensorRef) and one.shape == (0,) and name not in kept:
            what = f"the weight {printable(str(name))!r} is not in any file"
            raise CorruptFile(what, file=models[0].path, hint=ONE_SAVE)
    return copy_with_items(module, {**module, **found})


def _universal(folder: str, groups: Sequence[_Group], limits: Limits) -> dict[str, dict[Any, Any]]:
    top = os.path.join(folder, _UNIVERSAL)
    names, states = place_of(top).names(top), {}
    hint = "create the folder again with ds_to_universal.py"
    for group in groups:
        known: set[str] = set()
        for name, shape in group.shapes.items():
            if name not in names:
                what = f"the folder of {printable(name)!r} is missing"
                raise FileMissing(what, file=top, hint=hint)
            states[name] = {
                os.path.basename(file)[: -len(".pt")]: _stored(name, file, shape, limits)
                for file in _files_of(os.path.join(top, name))
            }
            known = known or set(states[name])
            for kind in sorted(known ^ set(states[name])):
                what = f"only one of {printable(name)!r} and"
                other = printable(next(iter(group.shapes)))
                raise FileMissing(f"{what} {other!r} has {kind}.pt", file=top, hint=hint)
    return states


def _stored(name: str, path: str, shape: tuple[int, ...], limits: Limits) -> Any:
    found = read_torch_file(path, limits)
    if isinstance(found, dict):
        found = found.get("param")
    if not isinstance(found, TensorRef):
        return found
    if len(found.shape) == 1 and found.shape != shape and found.numel >= prod(shape):
        vector = _vector(found, path)  # stage 3: flat
        return _tensor(name, shape, [vector], partial(_slices, 0, prod(shape), 1))
    return replace(found, requires_grad=False, wrapping=())


def _param_groups(own: Mapping[Any, Any], names: Sequence[list[str]]) -> list[dict[Any, Any]]:
    """Return the optimizer groups with their parameter names."""
    groups = _base(own)[1]
    numbers = [number for one in groups for number in one.get("params", ())]
    if numbers != list(range(len(names))):
        return [{"params": one} for one in names]
    return [
        {**one, "params": [name for number in one["params"] for name in names[number]]}
        for one in groups
    ]


def _shapes(groups: Any) -> list[dict[str, tuple[int, ...]]]:
    """Return the names and shapes in `param_shapes`: one dict per group, or a single one."""
    found = [dict(group) for group in (groups if isinstance(groups, list) else [groups])]
    for name, shape in (item for group in found for item in group.items()):
        if not isinstance(name, str) or parse_sizes(shape) != shape:
            raise CorruptFile(f"has no valid shape of the parameter {printable(repr(name))}")
    return found


def _mapping(root: Any, file: str, key: str | None = None) -> dict[Any, Any]:
    found = root.get(key) if key and isinstance(root, dict) else root
    if not isinstance(found, dict):
        raise UnsupportedFormat(f"has no dict {printable(key or 'at its root')}", file=file)
    return found


def _at(node: Any, number: int) -> Any:
    return node[number] if isinstance(node, list) and number < len(node) else None


def _number(node: Any) -> Any:
    """Return the value of a DeepSpeed Enum member, or any other node unchanged."""
    match node:
        case Opaque(args=(number,)) if node.class_name.endswith("ZeroStageEnum"):
            return number
    return node
