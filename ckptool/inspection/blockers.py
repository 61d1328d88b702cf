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
from ckptool.formats.distributed.ranks import FLAT, parse_rank_name
from ckptool.formats.distributed.zero import is_step_file
from ckptool.formats.torchscript import PACKED, PACKED_WEIGHTS, RUN_IT, has_packed_weights
from ckptool.symbolic.encoder import blockers, blocking
from ckptool.words import counted, printable, shell

_GATHER = "gather the full tensors in the training job, and save them"
_ZERO = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_optim_states")
_OF_TOTAL = re.compile(
    r"world_size_(?P<n>\d+)_rank_(?P<at>\d+)|(?P<at2>\d+)[-_]of[-_](?P<n2>\d+)", re.IGNORECASE
)
_COUNTED = re.compile(r"(mp_rank_|consolidated\.)(\d+)")
"""File names of Megatron, DeepSpeed and Llama, with the number of a rank."""
_MOST_CALLS, _CALL_LENGTH = 5, 80
"""The most callables in a sentence, and the most characters of each call."""
ANYWHERE = frozenset({"cpu", "meta"})
"""Devices that load on every machine."""


def would_run(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the calls, as Python, that unpickling the files of a checkpoint would make.

    Calls of known constructors of data are left out. Files whose pickle refers only to names on
    the allow list of `weights_only=True` are not read again.
    """
    if not blocking(checkpoint.details.globals):
        return ()
    return would_run_of([source.name for source in checkpoint.sources], hidden=False)


def first_calls(runs: Iterable[str], most: int = _MOST_CALLS) -> list[str]:
    """Return the first call of each callable, shortened for a sentence, then `and 3 more`."""
    each: dict[str, str] = {}
    for text in runs:
        each.setdefault(text.partition("(")[0], text)
    shown = [
        text if len(text) <= _CALL_LENGTH else f"{text[: _CALL_LENGTH - 4].rstrip()}...)"
        for text in each.values()
    ]
    hidden = len(shown) - most
    return [*shown[:most], f"and {hidden:,} more"] if hidden > 0 else shown


def would_run_of(files: Iterable[str], *, hidden: bool = True) -> tuple[str, ...]:
    """Return the calls that unpickling any files would make.

    With `hidden`, scan also records that are missing from the zip directory.
    """
    from ckptool.inspection.scan import scan  # rarely needed

    found = [
        scan(file, hidden=hidden) for file in dict.fromkeys(files) if place_of(file).is_file(file)
    ]
    return tuple(dict.fromkeys(call.text for one in found for call in one.runs))


def calls(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names outside torch's allow list that unpickling the file calls.

    A class that the file only refers to, or creates by `cls.__new__(cls)`, is not called. A name
    that is not in the tree counts as called, because the pickle dropped the result.
    """
    called, named = [], set()
    for node in walk_everything(checkpoint.root):
        inside = list(get_children(node))
        if isinstance(node, Opaque):
            del inside[0]  # the constructor
            is_made = node.maker == "newobj" and not (node.args or node.kwargs)
            if is_made and isinstance(node.func, Global):
                named.add(node.class_name)
            else:
                called.append(node.class_name)
        named.update(one.qualified for one in inside if isinstance(one, Global))
    return blocking((*called, *(one for one in checkpoint.details.globals if one not in named)))


def misnamed(checkpoint: Checkpoint) -> str | None:
    """Return a sentence if the extension is that of another format, else None."""
    name = checkpoint.path.lower()
    known = load_format(checkpoint.format)
    if known.tensors_only and name.endswith(TORCH_ENDINGS):
        ending = os.path.splitext(name)[1]
        return f"it is a safetensors file, but its extension is {ending}, as for torch"
    if known.by_torch and name.endswith(".safetensors"):
        return "torch.save wrote it, but its extension is .safetensors"
    return None


def unnamed(checkpoint: Checkpoint) -> bool:
    """Return True if the header lacks the entry by which other libraries know the format."""
    key = load_format(checkpoint.format).header_key
    return bool(key) and key not in checkpoint.details.header


def missing_weights(checkpoint: Checkpoint) -> Finding | None:
    """Return a finding about weights that are missing from the file, or None.

    Sources: deepspeed/runtime/engine.py (file names, `mp_world_size`, placeholders of ZeRO-3),
    torch/distributed/fsdp/_flat_param.py (`_flat_param`), the file names of Megatron and Llama.
    """
    checks = (_packed, _placeholders, _flat_parameters, _rank)
    return next((part for check in checks if (part := check(checkpoint)) is not None), None)


def _packed(checkpoint: Checkpoint) -> Finding | None:
    """Detect TorchScript weights that are packed, without keys, or were never written."""
    details = checkpoint.details
    if any(OPAQUE_CONSTANTS in text for text in details.left_behind):
        return Finding(
            "part",
            "weights are missing: torch.jit.optimize_for_inference does not save those it packs",
            hint="save the model again before optimize_for_inference",
        )
    if not load_format(checkpoint.format).is_program:
        return None
    named = (*details.globals, *blockers(checkpoint.root))
    if has_packed_weights(checkpoint.root) or any(name.startswith(PACKED) for name in named):
        return Finding("packed", PACKED_WEIGHTS, hint=RUN_IT)
    keys = list(checkpoint.root) if isinstance(checkpoint.root, dict) else []
    names = [key for key in keys if str(key).startswith(CONSTANT)]
    if not names:
        return None
    text = f"torch.jit.freeze removed the keys of {counted(len(names), 'tensor')}: they are "
    text += f"constants of the program, for example {names[0]}"
    return Finding("frozen", text, hint="save the state dict of the model before torch.jit.freeze")


def _placeholders(checkpoint: Checkpoint) -> Finding | None:
    found = find_placeholders(checkpoint)
    if found is None:
        return None
    hint = _gathered(checkpoint.path) if found.hint == PLACEHOLDERS else found.hint
    return Finding(found.kind, found.text, found.where, hint=hint)


def _gathered(path: str) -> str:
    """Return the hint about one DeepSpeed rank file, with its folder if known."""
    folder = shell(os.path.dirname(path) or ".") if is_step_file(path) else "FOLDER"
    return PLACEHOLDERS.replace("FOLDER", folder)


def _flat_parameters(checkpoint: Checkpoint) -> Finding | None:
    names = [
        name
        for section in checkpoint.sections
        if section.kind in MODEL_KINDS
        for name in section.node
        if isinstance(name, str) and FLAT.search(name)
    ]
    if not names:
        return None
    text = "FSDP saved its flat parameters: the model's own keys and shapes are lost"
    remedy = "save it again with StateDictType.FULL_STATE_DICT in the training job"
    return Finding("flat-parameters", text, tuple(names), hint=remedy)


def _rank(checkpoint: Checkpoint) -> Finding | None:
    """Detect one of several rank files by its content, its name or the files next to it."""
    folder, name = os.path.split(checkpoint.path.rstrip("/"))
    root = checkpoint.root if isinstance(checkpoint.root, dict) else {}
    if len(root) > 1 and all(map(is_rank_folder, root)):
        remedy = f"ckptool convert {shell(checkpoint.path)} OUT --model-only --concat 'GLOB=DIM'"
        text = f"it has the parts of each matrix from {len(root)} ranks"
        return Finding("part", text, hint=f"join them with {remedy}")
    size, found = root.get("mp_world_size"), _COUNTED.search(name)
    if _ZERO.search(name):
        text = "judging by its name, it has one rank's part of an optimizer state"
        return Finding("part", text, hint=_gathered(checkpoint.path))
    if type(size) is int and size > 1:
        text = f"it has one of {size} parts of each matrix: its mp_world_size is {size}"
        return Finding("part", text, hint=_GATHER)
    if type(size) is int:
        return None
    parts = parse_rank_name(name) and any(
        one.is_spread and not one.whole for _, one in checkpoint.tensors()
    )
    if parts or SHARDING_INFO in checkpoint.details.header:
        remedy = f"open its folder to join all ranks: {printable(folder or '.')}"
        return Finding("part", "it has one rank's part of each tensor", hint=remedy)
    total = _OF_TOTAL.search(name)
    if total and not shard_format_of(checkpoint.format):
        count = int(total["n"] or total["n2"])
        if count > 1:
            remedy = "open its folder or the index of its shards, or gather all parts"
            return Finding(
                "part", f"judging by its name, it is one of {count:,} parts", hint=remedy
            )
    if not found:
        return None
    word, number = found[1], found[2]
    other = f"{int(number) + (1 if int(number) == 0 else -1):0{len(number)}}"
    sibling = name[: found.start()] + word + other + name[found.end() :]
    if os.path.lexists(os.path.join(folder, sibling)):
        why = f"{printable(sibling)} is next to it"
    elif int(number):
        why = f"its name has the number {number}"
    else:
        text = f"judging by its name ({word}{number}), it may be one of several parts"
        return Finding("part", text, hint="look for the other parts at its source", severity="note")
    return Finding("part", f"it is one of several parts: {why}", hint=_GATHER)


def layout_blockers(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield reasons in the layout why `torch.load(weights_only=True)` rejects the file."""
    if os.path.isdir(checkpoint.path):
        yield "torch.load cannot open a folder"
    known = load_format(checkpoint.format)
    if known.refusal is not None:
        yield known.refusal.what
    if known.tensors_only and (text := misnamed(checkpoint)):
        yield text
    if known.legacy:
        yield from _legacy_blockers(checkpoint)
    for note in checkpoint.details.notes:
        if note.startswith(TORCH_REFUSES):
            yield note.removeprefix(TORCH_REFUSES).strip()
    if checkpoint.details.opcodes:
        yield f"pickle opcodes: {', '.join(checkpoint.details.opcodes)}"


def outdated_names(checkpoint: Checkpoint, objects: Collection[str]) -> tuple[str, ...]:
    """Return names that `weights_only=True` rejects but the tree does not need.

    For example functions with which older torch created tensors: a rewrite uses the current ones.
    Empty if `objects` (of `symbolic.encoder.blockers`) are reported instead.
    """
    if objects or load_format(checkpoint.format).refusal is not None:
        return ()
    return blocking(checkpoint.details.globals)


def needed_import(classes: Iterable[str]) -> str:
    """Return the import that lets `torch.load` load objects of these classes; "" if none does."""
    if not all(kind.startswith("torchao.") for kind in classes):
        return ""
    return "import torchao first; it allows its own classes, so that torch.load(FILE) works"


def _legacy_blockers(checkpoint: Checkpoint) -> Iterator[str]:
    protocol = checkpoint.details.protocol
    if protocol not in (2, 3) and not checkpoint.details.opcodes:
        yield f"pickle protocol {protocol}"  # also in the pickles before and after the object
    dtypes = dict.fromkeys(ref.dtype for _, ref in checkpoint.tensors())
    untyped = [name for name in dtypes if BY_NAME[name].storage is None]
    if untyped:
        yield f"no torch loads {', '.join(untyped)} from a legacy stream"


def restored_devices(root: Any) -> tuple[str, ...]:
    """Return the devices of all tensors and storages, in order of first use.

    `torch.load` needs these devices. NumPy arrays have none.
    """
    tags: dict[str, None] = {}
    for node in walk_everything(root):
        if isinstance(node, TensorRef) and node.kind != "numpy":
            tags[node.device] = None
        elif isinstance(node, StorageRef):
            tags[node.storage.device] = None
    return tuple(tags)
