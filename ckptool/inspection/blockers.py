"""Reasons why a file does not load: its layout, its name, and missing files next to it."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from ckptool.core.checkpoint import TORCH_REFUSES, Checkpoint
from ckptool.core.finding import Finding
from ckptool.core.model import Global, Opaque, StorageRef, TensorRef, get_children
from ckptool.core.placeholders import PLACEHOLDERS, find_placeholders
from ckptool.core.sections import CONSTANT, MODEL_KINDS
from ckptool.core.tree import walk_everything
from ckptool.dtypes import BY_NAME
from ckptool.files.place import place_of
from ckptool.formats import TORCH_ENDINGS, load_format, shard_format_of
from ckptool.formats.base import OPAQUE_CONSTANTS
from ckptool.formats.distributed.dcp_safetensors import SHARDING_INFO
from ckptool.formats.distributed.megatron import is_rank_folder
from ckptool.formats.distributed.ranks import FLAT_PARAMETER, parse_rank_name
from ckptool.formats.distributed.zero import is_step_file
from ckptool.formats.torchscript import PACKED, PACKED_WEIGHTS, RUN_IT, has_packed_weights
from ckptool.symbolic.encoder import find_blocked_names, find_blockers
from ckptool.words import counted, printable, shell

_HINT_GATHER = "gather the full tensors in the training job, and save them"
_ZERO_FILE_NAME = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_optim_states")
_NAME_WITH_TOTAL = re.compile(r"world_size_(\d+)_rank_\d+|\d+[-_]of[-_](\d+)", re.IGNORECASE)
_NUMBERED_NAME = re.compile(r"(mp_rank_|consolidated\.)(\d+)")
"""File names of Megatron, DeepSpeed and Llama, with the number of a rank."""
_MAX_CALLS, _MAX_CALL_LENGTH = 5, 80
"""The most callables in a sentence, and the most characters of each call."""
ANYWHERE = frozenset({"cpu", "meta"})
"""Devices that load on every machine."""


def find_unpickling_calls(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the calls, as Python, that unpickling the files of a checkpoint would make.

    Calls of known constructors of data are left out, as are records missing from the zip directory.
    Files whose pickle refers only to names on the allow list of `weights_only=True` are not read
    again.
    """
    if not find_blocked_names(checkpoint.details.globals):
        return ()
    return find_calls_in_files([source.name for source in checkpoint.sources], hidden=False)


def summarize_calls(runs: Iterable[str], max_count: int = _MAX_CALLS) -> list[str]:
    """Return the first call of each callable, shortened for a sentence, then `and 3 more`."""
    first_by_callable: dict[str, str] = {}
    for text in runs:
        first_by_callable.setdefault(text.partition("(")[0], text)
    shown = [  # a long call ends with the four characters `...)`
        text if len(text) <= _MAX_CALL_LENGTH else f"{text[: _MAX_CALL_LENGTH - 4].rstrip()}...)"
        for text in first_by_callable.values()
    ]
    hidden = len(shown) - max_count
    return [*shown[:max_count], f"and {hidden:,} more"] if hidden > 0 else shown


def find_calls_in_files(files: Iterable[str], *, hidden: bool = True) -> tuple[str, ...]:
    """Return the calls that unpickling any files would make.

    With `hidden`, scan also records that are missing from the zip directory.
    """
    from ckptool.inspection.scan import scan  # rarely needed

    scans = [
        scan(file, hidden=hidden) for file in dict.fromkeys(files) if place_of(file).is_file(file)
    ]
    return tuple(dict.fromkeys(call.text for report in scans for call in report.runs))


def find_called_names(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names outside torch's allow list that unpickling the file calls.

    A class that the file only refers to, or creates by `cls.__new__(cls)`, is not called. A name
    that is not in the tree counts as called, because the pickle dropped the result.
    """
    called_names, uncalled_names = [], set()
    for node in walk_everything(checkpoint.root):
        parts = list(get_children(node))
        if isinstance(node, Opaque):
            _constructor, *parts = parts
            # `cls.__new__(cls)` makes an empty object, and runs no code of an ordinary class.
            is_only_created = node.maker == "newobj" and not (node.args or node.kwargs)
            if is_only_created and isinstance(node.func, Global):
                uncalled_names.add(node.class_name)
            else:
                called_names.append(node.class_name)
        # A class or function that is a value in the tree.
        uncalled_names.update(part.qualified for part in parts if isinstance(part, Global))
    others = (name for name in checkpoint.details.globals if name not in uncalled_names)
    return find_blocked_names((*called_names, *others))


def describe_wrong_extension(checkpoint: Checkpoint) -> str | None:
    """Return a sentence if the extension belongs to another format, else None."""
    name = checkpoint.path.lower()
    format = load_format(checkpoint.format)
    if format.tensors_only and name.endswith(TORCH_ENDINGS):
        extension = os.path.splitext(name)[1]
        return f"it is a safetensors file, but its extension is {extension}, as for torch"
    if format.by_torch and name.endswith(".safetensors"):
        return "torch.save wrote it, but its extension is .safetensors"
    return None


def is_format_entry_missing(checkpoint: Checkpoint) -> bool:
    """Return True if the header lacks the entry by which other libraries know the format."""
    key = load_format(checkpoint.format).header_key
    return bool(key) and key not in checkpoint.details.header


def detect_missing_weights(checkpoint: Checkpoint) -> Finding | None:
    """Return a finding about weights that are missing from the file, or None.

    Sources: deepspeed/runtime/engine.py (file names, `mp_world_size`, placeholders of ZeRO-3),
    torch/distributed/fsdp/_flat_param.py (`_flat_param`), the file names of Megatron and Llama.
    """
    checks = (
        _detect_packed_weights,
        _detect_placeholders,
        _detect_flat_parameters,
        _detect_rank_file,
    )
    return next((finding for check in checks if (finding := check(checkpoint)) is not None), None)


def _detect_packed_weights(checkpoint: Checkpoint) -> Finding | None:
    """Detect weights of TorchScript that are not in the file, are packed, or have no keys."""
    details = checkpoint.details
    # The reader reports constants whose bytes are missing.
    if any(OPAQUE_CONSTANTS in text for text in details.left_behind):
        return Finding(
            "part",
            "weights are missing: torch.jit.optimize_for_inference does not save those it packs",
            hint="save the model again before optimize_for_inference",
        )
    if not load_format(checkpoint.format).is_program:
        return None
    referenced = (*details.globals, *find_blockers(checkpoint.root))
    if has_packed_weights(checkpoint.root) or any(name.startswith(PACKED) for name in referenced):
        return Finding("packed", PACKED_WEIGHTS, hint=RUN_IT)
    keys = list(checkpoint.root) if isinstance(checkpoint.root, dict) else []
    constants = [key for key in keys if str(key).startswith(CONSTANT)]
    if not constants:
        return None
    text = f"torch.jit.freeze removed the keys of {counted(len(constants), 'tensor')}: they are "
    text += f"constants of the program, for example {constants[0]}"
    return Finding("frozen", text, hint="save the state dict of the model before torch.jit.freeze")


def _detect_placeholders(checkpoint: Checkpoint) -> Finding | None:
    """Detect tensors without values: lazy, on the meta device, or ZeRO-3 placeholders.

    The general hint for ZeRO-3 gets the folder of the file, if it is known.
    """
    finding = find_placeholders(checkpoint)
    if finding is None:
        return None
    hint = _hint_for_rank_file(checkpoint.path) if finding.hint == PLACEHOLDERS else finding.hint
    return Finding(finding.kind, finding.text, finding.where, hint=hint)


def _hint_for_rank_file(path: str) -> str:
    """Return the hint about one DeepSpeed rank file, with its folder if known."""
    folder = shell(os.path.dirname(path) or ".") if is_step_file(path) else "FOLDER"
    return PLACEHOLDERS.replace("FOLDER", folder)


def _detect_flat_parameters(checkpoint: Checkpoint) -> Finding | None:
    """Detect the flat parameters that FSDP saves without the model's own keys."""
    names = [
        name
        for section in checkpoint.sections
        if section.kind in MODEL_KINDS
        for name in section.node
        if isinstance(name, str) and FLAT_PARAMETER.search(name)
    ]
    if not names:
        return None
    text = "FSDP saved its flat parameters: the model's own keys and shapes are lost"
    remedy = "save it again with StateDictType.FULL_STATE_DICT in the training job"
    return Finding("flat-parameters", text, tuple(names), hint=remedy)


def _detect_rank_file(checkpoint: Checkpoint) -> Finding | None:
    """Detect one of several rank files by its content, else by its name.

    In order: a folder of Megatron ranks, a DeepSpeed file, `mp_world_size`, an FSDP rank file, a
    file with a number in its name.
    """
    folder, name = os.path.split(checkpoint.path.rstrip("/"))
    root = checkpoint.root if isinstance(checkpoint.root, dict) else {}
    if len(root) > 1 and all(map(is_rank_folder, root)):
        remedy = f"ckptool convert {shell(checkpoint.path)} OUT --model-only --concat 'GLOB=DIM'"
        text = f"it has the parts of each matrix from {len(root)} ranks"
        return Finding("part", text, hint=f"join them with {remedy}")
    if _ZERO_FILE_NAME.search(name):
        text = "judging by its name, it has one rank's part of an optimizer state"
        return Finding("part", text, hint=_hint_for_rank_file(checkpoint.path))
    world_size = root.get("mp_world_size")
    if type(world_size) is int:
        if world_size <= 1:  # the only rank has whole matrices
            return None
        text = f"it has one of {world_size} parts of each matrix: its mp_world_size is {world_size}"
        return Finding("part", text, hint=_HINT_GATHER)
    has_part_of_tensors = parse_rank_name(name) and any(
        tensor.is_spread and not tensor.whole for _, tensor in checkpoint.tensors()
    )
    if has_part_of_tensors or SHARDING_INFO in checkpoint.details.header:
        remedy = f"open its folder to join all ranks: {printable(folder or '.')}"
        return Finding("part", "it has one rank's part of each tensor", hint=remedy)
    return _detect_numbered_name(checkpoint, folder, name)


def _detect_numbered_name(checkpoint: Checkpoint, folder: str, name: str) -> Finding | None:
    """Detect one of several files by a number in its name, with or without the total.

    Number 0 may be the only file. So it is a note, unless the file with number 1 exists.
    """
    match = _NAME_WITH_TOTAL.search(name)
    if match and not shard_format_of(checkpoint.format):  # shards have complete tensors
        total = int(match[1] or match[2])
        if total > 1:
            text = f"judging by its name, it is one of {total:,} parts"
            remedy = "open its folder or the index of its shards, or gather all parts"
            return Finding("part", text, hint=remedy)
    match = _NUMBERED_NAME.search(name)
    if match is None:
        return None
    prefix, digits = match.groups()
    number = int(digits)
    other_number = number - 1 if number else 1
    sibling = f"{name[: match.start(2)]}{other_number:0{len(digits)}}{name[match.end() :]}"
    if os.path.lexists(os.path.join(folder, sibling)):
        why = f"{printable(sibling)} is next to it"
    elif number:
        why = f"its name has the number {digits}"
    else:
        text = f"judging by its name ({prefix}{digits}), it may be one of several parts"
        hint = "look for the other parts where you got this one"
        return Finding("part", text, hint=hint, severity="note")
    return Finding("part", f"it is one of several parts: {why}", hint=_HINT_GATHER)


def find_layout_blockers(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield reasons in the layout why `torch.load(weights_only=True)` rejects the file."""
    if os.path.isdir(checkpoint.path):
        yield "torch.load cannot open a folder"
    format = load_format(checkpoint.format)
    if format.refusal is not None:
        yield format.refusal.what
    if format.tensors_only and (text := describe_wrong_extension(checkpoint)):
        yield text
    if format.legacy:
        yield from _find_legacy_blockers(checkpoint)
    for note in checkpoint.details.notes:
        if note.startswith(TORCH_REFUSES):  # with this prefix the reader notes such a reason
            yield note.removeprefix(TORCH_REFUSES).strip()
    if checkpoint.details.opcodes:
        yield f"pickle opcodes: {', '.join(checkpoint.details.opcodes)}"


def find_outdated_names(checkpoint: Checkpoint, objects: Collection[str]) -> tuple[str, ...]:
    """Return names that `weights_only=True` rejects but the tree does not need.

    For example functions with which older torch created tensors: a rewrite uses the current ones.
    Empty if something else is reported instead: `objects` (of `symbolic.encoder.find_blockers`), or
    a format that `torch.load` rejects as a whole.
    """
    if objects or load_format(checkpoint.format).refusal is not None:
        return ()
    return find_blocked_names(checkpoint.details.globals)


def suggest_import(classes: Iterable[str]) -> str:
    """Return the import that lets `torch.load` load objects of these classes; "" if none does.

    Only torchao adds its own classes to the allow list of torch.
    """
    if not all(class_name.startswith("torchao.") for class_name in classes):
        return ""
    return "import torchao first; it allows its own classes, so that torch.load(FILE) works"


def _find_legacy_blockers(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield reasons in the pickle protocol and the dtypes of a legacy stream."""
    protocol = checkpoint.details.protocol
    # The caller names the opcodes of another protocol in the pickle of the object. If only the
    # stream's other pickles have them, before and after it, the protocol itself is the reason.
    if protocol not in (2, 3) and not checkpoint.details.opcodes:
        yield f"pickle protocol {protocol}"
    dtypes = dict.fromkeys(ref.dtype for _, ref in checkpoint.tensors())
    untyped = [name for name in dtypes if BY_NAME[name].storage is None]
    if untyped:
        yield f"no torch loads {', '.join(untyped)} from a legacy stream"


def list_restored_devices(root: Any) -> tuple[str, ...]:
    """Return the devices of all tensors and storages, in order of first use.

    `torch.load` needs these devices. NumPy arrays have none.
    """
    devices: dict[str, None] = {}
    for node in walk_everything(root):
        if isinstance(node, TensorRef) and node.kind != "numpy":
            devices[node.device] = None
        elif isinstance(node, StorageRef):
            devices[node.storage.device] = None
    return tuple(devices)
