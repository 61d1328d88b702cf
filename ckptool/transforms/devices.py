"""Rewrite device tags throughout a checkpoint, so that it loads without those devices.

A tag is an opaque string, `TYPE` or `TYPE:INDEX`. `cuda` is a different tag from `cuda:0`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptool.core.checkpoint import Change, Checkpoint
from ckptool.core.model import DeviceValue, Opaque, Storage, StorageRef, TensorRef
from ckptool.core.tree import name_of, rebuild, walk, walk_everything
from ckptool.errors import DeviceError, UsageError
from ckptool.transforms.step import Step, check_list_option
from ckptool.words import counted, listed, printable

_WORD = re.compile(r"(?!gpu\b)[a-z_]+(:\d+)?", re.ASCII)
CARRIED = ("xla", "maia", "ort")
"""Back ends without storages: torch pickles their tensors as an array and a device
(torch/_tensor.py `_reduce_ex_internal`)."""
_PLACED = ("DeviceMesh", "ProcessGroup", "ProcessGroupState", "ShardMetadata", "_remote_device")
"""Last names of the classes that tie a tensor to devices of other processes."""


class Rules:
    """Rules for device tags: exact tags first, then `TYPE:*`, then `*`, all at once."""

    def __init__(self, rules: Mapping[str, str]) -> None:
        """Check the tags and patterns.

        Raises:
            DeviceError: if a target is not a device, or a pattern is invalid.
        """
        self._rules = dict(rules)
        for source, target in self._rules.items():
            if "*" in source and source != "*" and not re.fullmatch(r"[^:*]+:\*", source):
                raise DeviceError(
                    f"{printable(source)!r} is not a pattern for devices",
                    hint="use a device (cuda:1), all of a type (cuda:*) or all devices (*)",
                )
            _check_target(target)

    def __call__(self, tag: str) -> str:
        """Return the new tag, or the same tag if no rule matches. `meta` never changes."""
        rule = self.find_rule(tag)
        return tag if rule is None else self._rules[rule]

    def find_rule(self, tag: str) -> str | None:
        """Return the key of the rule that applies to a tag, or None. `cuda:*` includes `cuda`."""
        if tag == "meta":
            return None
        kind = tag.partition(":")[0]
        return next((rule for rule in (tag, f"{kind}:*", "*") if rule in self._rules), None)

    def find_unused(self, tags: Iterable[str]) -> list[str]:
        """Return the keys of the rules other than `*` that apply to none of these tags."""
        used = {self.find_rule(tag) for tag in tags}
        return [source for source in self._rules if source not in used and source != "*"]


def _check_target(target: Any) -> None:
    """Refuse a target that is not a device, or is `meta`."""
    if target == "meta":
        raise DeviceError("tensors cannot move to meta, which would drop their data")
    if not isinstance(target, str) or not _WORD.fullmatch(target):
        raise DeviceError(
            f"{printable(str(target))!r} is not a device",
            hint="give a device such as cpu, cuda or cuda:0",
        )


def count_device_tags(root: Any) -> Counter[str]:
    """Count the tensors, storages and values per device tag below `root`."""
    return Counter(tag for node in walk_everything(root) for tag in _list_tags(node))


def _list_tags(node: Any) -> Iterator[str]:
    """Yield the device tag of a tensor, storage or `torch.device` value."""
    if isinstance(node, TensorRef) and node.kind != "numpy":
        yield node.device
    elif isinstance(node, StorageRef):
        yield node.storage.device
    elif isinstance(node, DeviceValue):
        yield node.tag


@dataclass(frozen=True)
class Remap(Step):
    """Move tensors to other devices: all `to` one, by a `map`, or by `visible_devices`.

    In a file, rewrites the device tags of storages, tensors and `torch.device` values, also inside
    objects. Moves the tensors of a dict in memory. Meta tensors and numpy arrays do not change.
    TPU tensors become ordinary tensors on other devices, and the reverse.
    """

    to: str | None = None
    """The device of all tensors."""
    map: Mapping[str, str] = field(default_factory=dict)
    """New devices for one device (`cuda:1`), all of a type (`cuda:*`) or all (`*`). Rules apply
    simultaneously, so `{"cuda:0": "cuda:1", "cuda:1": "cuda:0"}` swaps two."""
    visible_devices: Iterable[int] | None = None
    """Renumber like `CUDA_VISIBLE_DEVICES`: the first of these becomes `cuda:0`, and so on."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            DeviceError: if a target is not a device, or a pattern is invalid.
            UsageError: if several options are given (without any, no tensor moves); or the visible
                devices are empty, repeat a number, or contain a negative one.
        """
        are_given = (self.to is not None, bool(self.map), self.visible_devices is not None)
        if sum(are_given) > 1:
            raise UsageError(
                "give only one of these: a device for all (to), rules for some (map) or the "
                "visible "
                "devices",
                hint="add --map '*=cpu' for all other devices",
            )
        if self.visible_devices is not None:
            numbers = check_list_option("visible_devices", self.visible_devices)
            if not numbers or len(set(numbers)) < len(numbers) or min(numbers) < 0:
                raise UsageError(
                    "the visible devices must be a list of different numbers, such as 0,2"
                )
            object.__setattr__(self, "visible_devices", numbers)
        Rules(self._rules)  # checks the devices

    @property
    def _rules(self) -> dict[str, str]:
        """The new device by device or pattern, from `to` or `map`."""
        return dict(self.map) if self.to is None else {"*": self.to}

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with its device tags rewritten.

        Raises:
            DeviceError: if a tensor cannot be moved (because of the mesh of a DTensor or the
                process group of a ShardedTensor), or is not on a visible device.
        """
        if self.visible_devices is not None:
            return _renumber_devices(checkpoint, tuple(self.visible_devices))
        return _rewrite_tags(checkpoint, self._rules)

    def applied_to_dict(self, mapping: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return a new dict with moved tensors; tensors that stay are the same objects.

        Raises:
            DeviceError: if torch cannot use a device on this machine.
        """
        from ckptool.transforms.memory import remap_dict  # only dicts need it

        rules = self._rules
        if self.visible_devices is not None:
            rules = _make_renumbering(self.visible_devices)
        return remap_dict(mapping, Rules(rules))


def make_remap(rules: str | Mapping[str, str]) -> Remap:
    """Return the step for `rules`: new devices by device, or one device for all tensors."""
    return Remap(to=rules) if isinstance(rules, str) else Remap(map=rules)


def _rewrite_tags(checkpoint: Checkpoint, rules: Mapping[str, str]) -> Checkpoint:
    """Return the checkpoint with device tags rewritten by `rules`, also in objects."""
    decide = Rules(rules)
    mentions_by_tag = count_device_tags(checkpoint.root)
    tensors_by_tag = Counter(
        tag for _, tensor in checkpoint.tensors() for tag in _list_tags(tensor)
    )
    changes = []
    for tag, n_mentions in mentions_by_tag.items():
        new_tag, n_tensors = decide(tag), tensors_by_tag[tag]
        if new_tag != tag:
            text = _describe_move(n_tensors, n_mentions, tag, new_tag)
            changes.append(Change("remap", text, n_tensors or n_mentions))
    used_tags = listed(mentions_by_tag)
    warnings = [
        Change("warning", f"no tensor is on {printable(tag)}; the file uses {used_tags}")
        for tag in decide.find_unused(mentions_by_tag)
    ]
    if not changes:
        return checkpoint.with_root(checkpoint.root, *warnings) if warnings else checkpoint
    _refuse_distributed(checkpoint, decide)
    return checkpoint.with_root(rebuild(checkpoint.root, _Mover(decide).move), *changes, *warnings)


def _describe_move(tensors: int, mentions: int, old: str, new: str) -> str:
    """Return the line of the receipt for one device.

    It counts tensors or, without any, mentions of the device in values, storages and objects.
    """
    count = counted(tensors, "tensor") if tensors else counted(mentions, "mention")
    return f"moved {count} from {printable(old)} to {new}"


def _renumber_devices(checkpoint: Checkpoint, numbers: Sequence[int]) -> Checkpoint:
    """Return the checkpoint with the visible devices renumbered as `CUDA_VISIBLE_DEVICES` does.

    Raises:
        DeviceError: if tensors are on another CUDA device.
    """
    new_tags = _make_renumbering(numbers)
    tags = [tag for tag in count_device_tags(checkpoint.root) if tag.startswith("cuda:")]
    missing = [tag for tag in tags if tag not in new_tags]
    if missing:
        raise DeviceError(
            f"tensors are on {listed(missing)}, which is not a visible device; "
            f"the file uses {listed(tags)}",
            file=checkpoint.path or None,
            hint="list all devices of the file, in their new order",
        )
    rules = {tag: new_tags[tag] for tag in tags if new_tags[tag] != tag}
    return _rewrite_tags(checkpoint, rules) if rules else checkpoint


def _make_renumbering(numbers: Iterable[int]) -> dict[str, str]:
    """Return the new device by visible device: the first becomes `cuda:0`, and so on."""
    return {f"cuda:{number}": f"cuda:{index}" for index, number in enumerate(numbers)}


class _Mover:
    """Rewrites the tags of leaves. Tensors that shared a storage share the new one."""

    def __init__(self, decide: Rules) -> None:
        self._decide = decide
        self._storages: dict[tuple[int, str], Storage] = {}

    def move(self, leaf: Any) -> Any:
        """Return the leaf with its tags rewritten, or the same leaf if they stay."""
        if isinstance(leaf, TensorRef):
            return self._move_tensor(leaf)
        if isinstance(leaf, StorageRef):
            device = leaf.storage.device
            target = self._decide(device)
            if target != device and _has_no_storages(target):
                raise _no_storages_error("a storage", device, target)
            return replace(leaf, storage=self._move_storage(leaf.storage, target))
        if isinstance(leaf, Storage):
            return self._move_storage(leaf, self._decide(leaf.device))
        if isinstance(leaf, DeviceValue):
            target = self._decide(leaf.tag)
            return leaf if target == leaf.tag else DeviceValue(target)
        return leaf

    def _move_storage(self, storage: Storage, target: str) -> Storage:
        """Return the storage with another device tag; a shared storage is replaced once."""
        if storage.device == target:
            return storage
        key = id(storage), target
        if key not in self._storages:
            self._storages[key] = replace(storage, device=target)
        return self._storages[key]

    def _move_tensor(self, tensor: TensorRef) -> TensorRef:
        """Return the tensor on its new device, with its storage; the same tensor if it stays."""
        target = self._decide(tensor.device)
        if tensor.kind == "numpy" or target == tensor.device:
            return tensor
        # A TPU tensor is pickled with a CPU tensor or an array that carries its data.
        has_carrier = "carrier" in (tensor.parts or {})
        if _has_no_storages(target):
            if has_carrier:
                return replace(tensor, device=target)
            return self._carry_on_cpu(tensor, target)
        storage = tensor.storage and self._move_storage(tensor.storage, target)
        parts = None if has_carrier else tensor.parts  # the carrier is no longer needed
        return replace(tensor, device=target, storage=storage, parts=parts)

    def _carry_on_cpu(self, tensor: TensorRef, target: str) -> TensorRef:
        """Return a tensor on a back end without storages, which carries its data in a CPU tensor.

        Raises:
            DeviceError: if the tensor is not strided.
        """
        if tensor.kind != "strided" or tensor.storage is None:
            raise _no_storages_error(f"a {tensor.kind} tensor", tensor.device, target)
        storage = self._move_storage(tensor.storage, "cpu")
        data = replace(
            tensor, device="cpu", storage=storage, requires_grad=False, hooks=None, wrapping=()
        )
        parts = {"carrier": "cpu_tensor", "data": data}
        return replace(tensor, device=target, storage=storage, hooks=None, parts=parts)


def _has_no_storages(device: str) -> bool:
    """Return True if torch pickles tensors on this device without a storage (TPUs and others)."""
    return device.partition(":")[0] in CARRIED


def _no_storages_error(subject: str, old: str, new: str) -> DeviceError:
    """Return the error for an object that cannot move to a device without storages."""
    return DeviceError(f"{subject} on {printable(old)} cannot be pickled on {new}")


def _refuse_distributed(checkpoint: Checkpoint, decide: Rules) -> None:
    """Refuse to move tensors and objects that refer to the devices of other processes.

    Raises:
        DeviceError: if there is one; the message shows it and its mesh or group.
    """
    nodes = walk_everything(checkpoint.root)
    candidates = [
        node for node in nodes if isinstance(node, TensorRef) or _refers_to_processes(node)
    ]
    if not any(map(_refers_to_processes, candidates)):
        return
    for node in candidates:
        parts = list(walk_everything(node))
        classes = [part.class_name for part in parts if _refers_to_processes(part)]
        if classes and any(decide(tag) != tag for part in parts for tag in _list_tags(part)):
            paths = (path for path, leaf in walk(checkpoint.root) if leaf is node)
            subject = printable(name_of(next(paths, ()))) or "a part of an object"
            raise DeviceError(
                f"{subject} cannot be moved: it contains a {printable(classes[0])}, which refers "
                "to devices of other processes",
                file=checkpoint.path or None,
                hint="gather the full tensors in the training job and save those",
            )


def _refers_to_processes(node: Any) -> bool:
    """Return True for an object such as a device mesh or a process group."""
    return isinstance(node, Opaque) and node.class_name.rpartition(".")[2] in _PLACED
