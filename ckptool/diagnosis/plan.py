"""The one `convert` that mends what can be mended.

Each complaint names the options of `Conversion` that mend it; a test proves this over all fixtures.
They are added one complaint after the other, and stay where the conversion of the header succeeds:
one with `like` succeeds only if the result fits the reference.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ckptool.checkpoint import Checkpoint
from ckptool.conversion import Conversion
from ckptool.diagnosis.complaint import Choice, Found, Options, Patient, Reference
from ckptool.errors import CheckpointError, NotRepresentable
from ckptool.formats import format_of, shard_of, writer
from ckptool.formats.identify import unused
from ckptool.hollow import refuse_hollow
from ckptool.inspection.info import convert_command, weights
from ckptool.statedict import MODEL_KINDS
from ckptool.symbolic.encoder import blockers
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


@dataclass(frozen=True, slots=True)
class Plan:
    """One conversion, and what it mends."""

    command: str | None = None
    target: str = ""
    options: Options = field(default_factory=dict)
    mended: frozenset[str] = frozenset()
    """Kinds of complaint that are not in the target."""
    obstacle: str = ""
    """What stood in the way of the first option that could not be taken."""


class Planner:
    """Makes plans for one patient."""

    def __init__(self, patient: Patient, found: Iterable[Found]) -> None:
        """Take what the checks found."""
        self._patient = patient
        self._fixes = sorted((one for one in found if one.fix is not None), key=_place)
        self._taken: set[str] = set()
        self._commands: dict[str, str] = {}

    def plan(self, *, resume: bool = False) -> Plan:
        """Return the conversion that mends most; `resume` keeps all that training needs."""
        options: dict[str, Any] | None = None
        state = self._patient.checkpoint
        mended: set[str] = set()
        obstacle = ""
        for one in self._fixes:
            fix: Options = one.fix or {}
            if resume and not _OF_A_MODEL.isdisjoint(fix):
                continue
            if options is not None and fix.get("plain") and not blockers(state.root):
                mended.add(one.kind)  # the objects are gone with what was left out
                continue
            for more in (fix, {**fix, "drop_objects": True})[: 1 + ("plain" in fix)]:
                merged = _merged(options or {}, more)
                try:
                    state = state if merged == options else self._applied(merged)
                except CheckpointError as error:
                    problem = error.message
                    continue
                options = merged
                mended.add(one.kind)
                break
            else:
                obstacle = obstacle or problem
        if options is None:
            return Plan(obstacle=obstacle)
        command, target = self._command(options, RESUMED if resume else MENDED)
        return Plan(command, target, options, frozenset(mended), obstacle)

    def choice(self, choice: Choice, plan: Plan) -> str | None:
        """Return the command of a choice combined with the plan, or None if it would fail.

        The command reads the source: the plan need not have run.
        """
        chosen = {} if choice.word else {"format": "safetensors"}
        for base in (plan.options, {}):
            options = _merged({**base, **chosen}, choice.options)
            known = repr(sorted(options.items(), key=str))
            with suppress(CheckpointError):
                if known not in self._commands:
                    self._applied(options)
                    self._commands[known], _ = self._command(options, choice.word)
                return self._commands[known]
        return None

    def _applied(self, options: Options) -> Checkpoint:
        """Convert the header.

        Raises:
            CheckpointError: it cannot be done, or written, or would lose weights with objects.
        """
        source, format = self._patient.checkpoint, self._format(options)
        arguments: dict[str, Any] = {
            name: value.like if isinstance(value, Reference) else value
            for name, value in options.items()
            if name != "format"
        }
        state = Conversion(**arguments).applied(source, format)
        refuse_hollow(state)
        refuse_empty(state, writer(format).plan(state))
        if options.get("drop_objects"):
            _refuse_lost_weights(source, state, alone=bool(options.get("model_only")))
        return state

    def _format(self, options: Options) -> str:
        """Return the target format: the option, else safetensors or torch as the source is."""
        if "format" in options:
            return str(options["format"])
        checkpoint = self._patient.checkpoint
        flat = format_of(checkpoint.format).tensors_only
        return "safetensors" if flat else "torch-zip"

    def _command(self, options: Options, word: str) -> tuple[str, str]:
        """Return the command of a conversion, and its target, which is no other command's."""
        checkpoint, format = self._patient.checkpoint, self._format(options)
        target = default_target(checkpoint.path, word or MENDED, format, sharded=True)
        if not (word or shard_of(checkpoint.format)):  # beside an index it would be a second one
            target = f"{target.removesuffix(f'.{MENDED}.safetensors')}.safetensors"
        target = unused(target, self._taken)
        self._taken.add(target)
        shown = {name: value for name, value in options.items() if name != "format"}
        if target_format(checkpoint, target) != format:
            shown = {"format": format, **shown}
        return convert_command(checkpoint.path, target, shown), target


def _merged(options: Options, more: Options) -> dict[str, Any]:
    """Return both options; patterns and rules are concatenated without duplicates."""
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


def _refuse_lost_weights(before: Checkpoint, after: Checkpoint, *, alone: bool) -> None:
    """Refuse a conversion in which tensors of a model or an optimizer go with objects.

    Raises:
        NotRepresentable: they do.
    """
    kinds = MODEL_KINDS if alone else (*MODEL_KINDS, "optimizer")
    tensors = weights(before.root, kinds)
    if len(weights(after.root, kinds)) < len(tensors):
        refused = [pair for pair in tensors if is_refused(pair[1])] or tensors
        names = [name_of(path) for path, _ in refused]
        raise NotRepresentable(
            f"{counted(len(names), 'tensor')} of the weights would go with the objects: "
            f"{listed(names, most=3)}"
        )
