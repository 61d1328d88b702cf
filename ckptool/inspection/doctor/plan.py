"""The commands that mend what can be mended, tried on the header before they are proposed.

Every command of a plan is a transform. The transforms are applied to the tree in memory, one after
the other: what raises there is not proposed, and a complaint counts as mended where what it needs
is there no more.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ckptool.checkpoint import Checkpoint
from ckptool.errors import CheckpointError, NameCollision, NotRepresentable
from ckptool.formats import writer
from ckptool.formats.identify import as_argument, unused
from ckptool.inspection.doctor.complaint import Need
from ckptool.inspection.doctor.memory import dead_is_much, unseen_is_much
from ckptool.inspection.doctor.patient import Patient
from ckptool.inspection.doctor.placement import ANYWHERE
from ckptool.inspection.obstacles import restored_devices
from ckptool.inspection.usage import storage_use
from ckptool.paths import name_of, selected
from ckptool.statedict import MODEL_KINDS, sections, values_inside
from ckptool.symbolic.encoder import blockers
from ckptool.transforms import (
    add_module,
    compact,
    extract,
    prefix_rule,
    regex_rule,
    remap,
    rename,
    strip_module,
    to_plain,
)
from ckptool.words import counted, listed
from ckptool.wrappers import counts
from ckptool.writing.naming import default_target
from ckptool.writing.target import target_format

__all__ = ["MENDED", "Plan", "format_option", "planned"]

MENDED = "mended"
"""The word before the ending of the file that a plan writes."""
_ORDER = (
    "select", "weights", "exclude", "rewrite", "torch", "strip", "strip-at", "add", "prefix", "map",
    "plain", "cpu", "compact",
)  # fmt: skip

_SELECTING = ("select", "weights", "exclude")
"""One command takes care of all of these."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Commands in the order to run them; the first writes `target`, the others change that."""

    target: str
    state: Checkpoint
    """What the file is, as far as its header tells, when the commands have run."""
    format: str
    """What `target` is written as."""
    commands: tuple[str, ...] = ()
    by_need: Mapping[Need, tuple[str, ...]] = field(default_factory=dict)
    """The commands that take care of each need that can be met."""
    all_at_once: str | None = None
    obstacle: str = ""
    """Why there are no commands, where something stands in the way of all of them."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One command: a verb and its options, the same as options of `convert`, what it does."""

    needs: tuple[Need, ...]
    words: tuple[str, ...]
    convert: tuple[str, ...]
    apply: Callable[[Checkpoint], Checkpoint]

    def command(self, source: str, target: str, format: str | None, *, first: bool) -> str:
        """As a shell takes it: from the source to the target, or on the target itself."""
        verb, *options = self.words
        target = as_argument(target)
        chosen = ["--format", format] if format else []
        if not first:
            force = ["--force"] if verb == "extract" else []  # it asks, as the rest is lost
            return shlex.join(["ckptool", verb, "--in-place", *force, *options, target])
        source = as_argument(source)
        if verb == "convert":
            return shlex.join(["ckptool", verb, source, target, *chosen, *options])
        return shlex.join(["ckptool", verb, *options, source, "-o", target, *chosen])


def planned(patient: Patient, needs: Iterable[Need]) -> Plan:
    """The commands that meet as many of the needs as can be met."""
    return _Planner(patient, needs).plan()


def _format(checkpoint: Checkpoint) -> str:
    """The format that mended files have."""
    return "safetensors" if checkpoint.format.startswith("safetensors") else "torch-zip"


def format_option(checkpoint: Checkpoint, target: str, format: str) -> str | None:
    """What `--format` must say for the target to be of that format; None where nothing need be."""
    return None if target_format(checkpoint, target) == format else format


class _Planner:
    """One attempt: the tree as it is after the commands so far, and these."""

    def __init__(self, patient: Patient, needs: Iterable[Need]) -> None:
        self._patient = patient
        self._file = patient.checkpoint.path
        self._needs = sorted(dict.fromkeys(needs), key=lambda need: _ORDER.index(need.kind))
        torch = any(need.kind == "torch" for need in self._needs)
        self._format = "torch-zip" if torch else _format(patient.checkpoint)
        self._target = unused(default_target(self._file, MENDED, self._format, sharded=True))
        self._state = patient.checkpoint
        self._done: list[_Step] = []
        self._met_by: dict[Need, _Step] = {}
        self._size = 0
        self._obstacle = ""

    def plan(self) -> Plan:
        """Try what every need asks for, in the order in which `convert` does things."""
        for need in self._needs:
            if need in self._met_by:
                continue
            if self._is_met(need):
                if self._done:
                    self._met_by[need] = self._done[0]
                continue
            step = self._step(need)
            if self._try(step):
                self._met_by.update(dict.fromkeys(step.needs, step))
        if not self._done:
            return Plan(self._target, self._state, self._format, obstacle=self._obstacle)
        self._sweep()
        return self._told()

    def _told(self) -> Plan:
        format = format_option(self._patient.checkpoint, self._target, self._format)
        commands = {
            id(step): step.command(self._file, self._target, format, first=not at)
            for at, step in enumerate(self._done)
        }
        met = {
            need: (commands[id(step)],) for need, step in self._met_by.items() if self._is_met(need)
        }
        told = tuple(commands.values())
        at_once = self._all_at_once(format)
        return Plan(self._target, self._state, self._format, told, met, at_once)

    def _all_at_once(self, format: str | None) -> str:
        """The one `convert` that does what all steps do."""
        source, target = as_argument(self._file), as_argument(self._target)
        chosen = ["--format", format] if format else []
        options = [word for step in self._done for word in step.convert]
        if "--wrappers" not in options:
            options += self._keeping()
        return shlex.join(["ckptool", "convert", source, target, *chosen, *options])

    def _try(self, step: _Step) -> bool:
        """Apply a step, where it can be done and its result written."""
        try:
            state = step.apply(self._state)
            self._size = writer(self._format).plan(state).size
        except CheckpointError as error:
            self._obstacle = self._obstacle or error.message
            return False
        self._state = state
        self._done.append(step)
        return True

    def _sweep(self) -> None:
        """Leave out the headers that edits in place leave behind, where they are much."""
        if self._format != "torch-zip" or any(s.words[0] == "compact" for s in self._done):
            return
        header = self._size - storage_use(self._state.root)[0]
        if dead_is_much((len(self._done) - 1) * header, self._size):
            self._done.append(replace(_compacting(()), convert=()))

    def _is_met(self, need: Need) -> bool:
        """Whether the tree has no need of that any more; cheap questions, all about the header."""
        state = self._state
        models = [part for part in sections(state.root) if part.kind in MODEL_KINDS]
        match need.kind:
            case "rewrite" | "torch":
                return bool(self._done)
            case "select":
                return any(not part.path and part.kind == "state_dict" for part in models)
            case "weights":
                parts = [part for part in models if part.kind == "state_dict"]
                return not any(values_inside(part.node) for part in parts)
            case "exclude":
                return not any(selected(path, (need.argument,)) for path, _ in state.tensors())
            case "strip":
                return self._adds() or not any(part.wrappers for part in models)
            case "strip-at":
                return not any(_begins(part.node, _before(need)) for part in models)
            case "prefix":
                return all(_has_prefix(part.node, need) for part in models)
            case "map":
                old = re.compile(need.argument.partition("=>")[0])
                return not any(old.search(name) for part in models for name in _texts(part.node))
            case "add":
                return any(need in step.needs for step in self._done)
            case "plain":
                at_first = state is self._patient.checkpoint
                return not (self._patient.blocked if at_first else blockers(state.root))
            case "cpu":
                return all(tag in ANYWHERE for tag in restored_devices(state.root))
            case "compact":
                return bool(self._done) and not unseen_is_much(*storage_use(state.root))

    def _step(self, need: Need) -> _Step:
        match need.kind:
            case "select" | "weights" | "exclude":
                return self._selection()
            case "rewrite" | "torch":
                return self._rewriting(need)
            case "strip":
                return _Step((need,), ("strip-module",), ("--wrappers", "strip"), strip_module)
            case "strip-at":
                return _stripping_at(need)
            case "prefix":
                return _prefixing(need)
            case "map":
                return _mapping(self._others("map"))
            case "add":
                return _adding(need)
            case "plain":
                return self._plain(need)
            case "cpu":
                return _Step((need,), ("remap", "--to", "cpu"), ("--to", "cpu"), _to_cpu)
            case "compact":
                return _compacting((need,))

    def _selection(self) -> _Step:
        """The model alone, and without what is to go: one command, and the first."""
        needs = tuple(need for need in self._needs if need.kind in _SELECTING)
        excluded = tuple(need.argument for need in needs if need.kind == "exclude")
        model_only = any(need.kind != "exclude" for need in needs)
        key = self._patient.key if model_only else None
        words = [
            *(("--key", key) if key is not None else ()),
            *(("--model-only",) if model_only else ()),
            *(word for glob in excluded for word in ("--exclude", glob)),
        ]

        def apply(state: Checkpoint) -> Checkpoint:
            return extract(state, key=key, exclude=excluded, model_only=model_only)

        return _Step(needs, ("extract", *words), tuple(words), apply)

    def _rewriting(self, need: Need) -> _Step:
        """The same in a layout that loads; wrappers have a step of their own."""
        words = ("convert", *self._keeping())
        return _Step((need, *self._others("rewrite")), words, (), lambda state: state)

    def _keeping(self) -> tuple[str, ...]:
        """What keeps `convert` from taking wrappers off, as it does towards safetensors."""
        models = [part for part in self._patient.models if part.wrappers]
        return ("--wrappers", "keep") if models and self._format == "safetensors" else ()

    def _adds(self) -> bool:
        """Whether wrappers have gone on: those that were there before are off, or it never came."""
        return any(need.kind == "add" for step in self._done for need in step.needs)

    def _others(self, kind: str) -> tuple[Need, ...]:
        return tuple(need for need in self._needs if need.kind == kind)

    def _plain(self, need: Need) -> _Step:
        """Objects into plain data, and what has no plain form left out only where there is some."""
        try:
            lossless = not blockers(to_plain(self._state).root)
        except (NotRepresentable, NameCollision):
            lossless = False
        options = ("--plain",) if lossless else ("--plain", "--drop-objects")

        def apply(state: Checkpoint) -> Checkpoint:
            return _keeping_weights(state, to_plain(state, drop=not lossless))

        return _Step((need,), ("extract", *options), options, apply)


def _keeping_weights(before: Checkpoint, after: Checkpoint) -> Checkpoint:
    """What has become of it, unless tensors of a model or an optimizer were objects, and went.

    Raises:
        NotRepresentable: they did.
    """
    left = {path for path, _ in after.tensors()}
    parts = [part for part in sections(before.root) if part.kind in (*MODEL_KINDS, "optimizer")]
    lost = [path for part in parts for path, _ in part.tensors() if path not in left]
    if lost:
        raise NotRepresentable(
            f"{counted(len(lost), 'tensor')} of the weights would go with the objects: "
            f"{listed(map(name_of, lost), most=3)}"
        )
    return after


def _to_cpu(state: Checkpoint) -> Checkpoint:
    return remap(state, {"*": "cpu"})


def _compacting(needs: tuple[Need, ...]) -> _Step:
    return _Step(needs, ("compact",), ("--compact",), compact)


def _stripping_at(need: Need) -> _Step:
    path, before = need.argument, _before(need)
    rule = f"^{re.escape(before)}=>{_replacement(f'{path}.')}"
    return _Step(
        (need,),
        ("strip-module", "--at", path),
        ("--rename", rule),
        lambda state: strip_module(state, at=path),
    )


def _prefixing(need: Need) -> _Step:
    old, _, new = need.argument.partition("=")
    rule = f"^{re.escape(old)}=>{_replacement(new)}"
    return _Step(
        (need,),
        ("rename", "--prefix", need.argument),
        ("--rename", rule),
        lambda state: rename(state, [prefix_rule(need.argument)]),
    )


def _mapping(needs: tuple[Need, ...]) -> _Step:
    rules = [need.argument for need in needs]
    return _Step(
        needs,
        ("rename", *(word for rule in rules for word in ("--map", rule))),
        tuple(word for rule in rules for word in ("--rename", rule)),
        lambda state: rename(state, [regex_rule(rule) for rule in rules]),
    )


def _adding(need: Need) -> _Step:
    """One wrapper around all: the first word of the argument, the others are there by then."""
    word = need.argument.partition(".")[0]
    if word == "module":
        convert = ("--rename", r"^(?!n_averaged$)=>module.")
        return _Step((need,), ("add-module",), convert, add_module)
    return replace(_prefixing(Need("prefix", f"={word}.")), needs=(need,))


def _before(need: Need) -> str:
    """What the names begin with that are to lose a wrapper."""
    return f"{need.argument}.module."


def _has_prefix(names: Iterable[object], need: Need) -> bool:
    """Whether no name begins with the old prefix, but for those with a longer new one."""
    old, _, new = need.argument.partition("=")
    longer = len(new) > len(old) and new.startswith(old)
    found = (name for name in _texts(names) if counts(name) and name.startswith(old))
    return all(longer and name.startswith(new) for name in found)


def _begins(names: Iterable[object], before: str) -> bool:
    return any(name.startswith(before) for name in _texts(names))


def _texts(names: Iterable[object]) -> Iterator[str]:
    return (name for name in names if isinstance(name, str))


def _replacement(text: str) -> str:
    return text.replace("\\", r"\\")
