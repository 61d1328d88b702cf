"""The one `convert` that mends what can be mended, tried on the header before it is proposed.

Each complaint names the options of `Conversion` that should mend it. They are added one complaint
after the other; the conversion is applied to the tree in memory, and the checks run again on the
result. Options stay only where the complaint is gone after them.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckptool.checkpoint import Checkpoint, Details
from ckptool.conversion import Conversion
from ckptool.diagnosis.complaint import Choice, Found, Options, Patient
from ckptool.errors import CheckpointError, NotRepresentable
from ckptool.formats import writer
from ckptool.formats.identify import as_argument, unused
from ckptool.hollow import refuse_hollow
from ckptool.statedict import MODEL_KINDS, sections
from ckptool.symbolic.encoder import encode
from ckptool.transforms.plain import is_refused
from ckptool.tree import name_of
from ckptool.words import counted, listed
from ckptool.writing.save import refuse_empty
from ckptool.writing.target import default_target, target_format

__all__ = ["MENDED", "Plan", "Planner"]

MENDED, RESUMED = "mended", "resume"
"""The words before the ending of the file that a plan writes."""
_ORDER = ("format", "key", "model_only", "exclude", "wrappers", "rename", "like", "plain", "to",
          "compact")  # fmt: skip
"""The order in which options are tried; a complaint that any rewrite mends comes last."""

_OF_A_MODEL = frozenset({"key", "model_only", "exclude", "wrappers", "rename", "like", "format"})
"""Options after which the training that saved the file cannot resume from it."""

Check = Callable[[Patient], Iterable[Found]]


@dataclass(frozen=True, slots=True)
class Plan:
    """One conversion, and what it mends."""

    command: str | None = None
    target: str = ""
    options: Options = field(default_factory=dict)
    mended: frozenset[str] = frozenset()
    """Kinds of complaint that are gone in the target."""
    obstacle: str = ""
    """What stood in the way of the first option that could not be taken."""


class Planner:
    """Makes plans for one patient."""

    def __init__(self, patient: Patient, found: list[Found], check: Check) -> None:
        """Take what a first check found, and the check itself, which is run on results."""
        self._patient, self._found, self._check = patient, found, check
        self._taken: set[str] = set()
        self._commands: dict[str, str] = {}

    def plan(self, *, resume: bool = False) -> Plan:
        """The conversion that mends as much as can be; `resume` keeps all that training needs."""
        patient = self._patient
        kinds = Counter(one.complaint.kind for one in self._found)
        options: dict[str, Any] | None = None
        obstacle = ""
        for one in sorted(self._found, key=_place):
            kind, fix = one.complaint.kind, one.fix
            if fix is None or not kinds[kind] or (resume and _drops_training(one)):
                continue
            now, problem = self._tried(patient, _merged(options or {}, fix))
            if now is None and fix.get("plain"):
                fix = {**fix, "drop_objects": True}
                now, problem = self._tried(patient, _merged(options or {}, fix))
            if now is None or now[kind] >= kinds[kind]:
                obstacle = obstacle or problem
                continue
            options, kinds = _merged(options or {}, fix), now
        if options is None:
            return Plan(obstacle=obstacle)
        fixable = (one.complaint.kind for one in self._found if one.fix is not None)
        mended = frozenset(fixable) - {kind for kind, count in kinds.items() if count}
        word = RESUMED if resume else MENDED
        target = self._target(word, self._format(options), word)
        return Plan(self._command(options, target), target, options, mended, obstacle)

    def choice(self, choice: Choice, plan: Plan) -> str | None:
        """The command of a choice, together with what the plan does; None where it would fail.

        Every choice starts from the source: the plan need not have run.
        """
        chosen = {} if choice.word else {"format": "safetensors"}
        for base in (plan.options, {}):
            options = _merged({**base, **chosen}, choice.options)
            known = repr(sorted(options.items(), key=str))
            if known in self._commands:
                return self._commands[known]
            try:
                self._applied(options, self._format(options))
            except CheckpointError:
                continue
            target = self._target(choice.word, self._format(options), choice.word or MENDED)
            self._commands[known] = self._command(options, target)
            return self._commands[known]
        return None

    def _tried(self, patient: Patient, options: Options) -> tuple[Counter[str] | None, str]:
        """How often each kind of complaint is left after a conversion; None where it fails."""
        format = self._format(options)
        try:
            state = self._applied(options, format)
        except CheckpointError as error:
            return None, error.message
        after = Patient(state, None, patient.devices, patient.reference, planned=True)
        return Counter(one.complaint.kind for one in self._check(after)), ""

    def _applied(self, options: Options, format: str) -> Checkpoint:
        """The result of a conversion, as a reader would open it.

        Raises:
            CheckpointError: it cannot be done, or written, or would lose weights with objects.
        """
        source = self._patient.checkpoint
        arguments = {name: value for name, value in options.items() if name != "format"}
        state = Conversion(**arguments).applied(source, format)
        plan = writer(format).plan(state)
        refuse_hollow(state)
        refuse_empty(state, plan)
        if options.get("drop_objects"):
            _refuse_lost_weights(source, state, alone=bool(options.get("model_only")))
        names = encode(state.root).globals if format == "torch-zip" else ()
        details = Details(size=plan.size, protocol=2, globals=names, header={"format": "pt"})
        target = default_target(source.path, MENDED, format, sharded=True)
        return replace(state, path=target, format=format, details=details)

    def _format(self, options: Options) -> str:
        """The format of the target: the one asked for, else the one that the file's name says."""
        if "format" in options:
            return str(options["format"])
        checkpoint = self._patient.checkpoint
        flat = checkpoint.format.startswith("safetensors")
        return "safetensors" if flat else "torch-zip"

    def _target(self, word: str, format: str, instead: str) -> str:
        """A name that is neither there nor given to another command."""
        base = default_target(self._patient.checkpoint.path, instead, format, sharded=True)
        if not word:
            base = f"{base.removesuffix(f'.{instead}.safetensors')}.safetensors"
        found = unused(base, self._taken)
        self._taken.add(found)
        return found

    def _command(self, options: Options, target: str) -> str:
        """The conversion as a shell takes it."""
        checkpoint, format = self._patient.checkpoint, self._format(options)
        words = ["ckptool", "convert", as_argument(checkpoint.path), as_argument(target)]
        if target_format(checkpoint, target) != format:
            words += ["--format", format]
        return shlex.join([*words, *_words(options)])


def _words(options: Options) -> Iterator[str]:
    """Options of a conversion as `ckptool convert` spells them."""
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if name == "format":
            continue
        if value is True:
            yield option
            if name.startswith(("allow_missing", "allow_unexpected")):
                continue
        elif isinstance(value, Checkpoint):
            yield from (option, as_argument(value.path))
        else:
            for one in value if isinstance(value, tuple) else (value,):
                yield from (option, str(one))


def _merged(options: Options, more: Options) -> dict[str, Any]:
    """Options together; patterns and rules after one another, each once."""
    made = dict(options)
    for name, value in more.items():
        old = made.get(name, ())
        if isinstance(value, tuple):
            value = tuple(dict.fromkeys((*old, *value)))
        made[name] = old if name == "format" and old else value
    if "like" in made:  # the names are the reference's, wrappers and all
        made.pop("wrappers", None)
    return made


def _place(one: Found) -> int:
    return min((_ORDER.index(name) for name in one.fix or () if name in _ORDER), default=99)


def _drops_training(one: Found) -> bool:
    """Return True if a fix changes the names or parameters of a training, or drops its state."""
    fix: Mapping[str, Any] = one.fix or {}
    return not _OF_A_MODEL.isdisjoint(fix)


def _refuse_lost_weights(before: Checkpoint, after: Checkpoint, *, alone: bool) -> None:
    """Refuse a conversion in which tensors of a model or an optimizer go with objects.

    Raises:
        NotRepresentable: they do.
    """
    kinds = MODEL_KINDS if alone else (*MODEL_KINDS, "optimizer")
    parts = [part for part in sections(before.root) if part.kind in kinds]
    held = sum(len(part.tensors()) for part in parts)
    kept = [part for part in sections(after.root) if part.kind in kinds]
    if sum(len(part.tensors()) for part in kept) < held:
        tensors = [pair for part in parts for pair in part.tensors()]
        refused = [pair for pair in tensors if is_refused(pair[1])] or tensors
        names = [name_of(path) for path, _ in refused]
        raise NotRepresentable(
            f"{counted(len(names), 'tensor')} of the weights would go with the objects: "
            f"{listed(names, most=3)}"
        )
