"""Commands apart from the plan, of which the user may choose: each is tried on the header first."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import pairwise

from ckptool.checkpoint import Checkpoint
from ckptool.errors import CheckpointError
from ckptool.formats import writer
from ckptool.formats.identify import as_argument, unused
from ckptool.inspection.doctor.complaint import Choice
from ckptool.inspection.doctor.patient import Patient
from ckptool.inspection.doctor.plan import MENDED, Plan, format_option
from ckptool.transforms import (
    extract,
    prefix_rule,
    regex_rule,
    rename,
    single_state_dict,
    strip_module,
    untie,
)
from ckptool.writing.naming import default_target

__all__ = ["choice_command"]


def choice_command(patient: Patient, plan: Plan, choice: Choice, taken: set[str]) -> str | None:
    """A command apart from the plan, on what the plan writes, else on the file itself.

    Its target is a name that is neither there nor in `taken`, which it joins. What the plan took
    to the root has no key any more. None where it would fail, or change nothing.
    """
    format = plan.format if choice.word else "safetensors"
    words = next(filter(lambda words: _runs(words, plan.state, format), _forms(choice)), None)
    if words is None:
        return None
    target = _target(patient.checkpoint.path, choice.word, format, taken)
    taken.add(target)
    source = as_argument(plan.target if plan.commands else patient.checkpoint.path)
    verb, *options = words
    if verb == "convert":
        return shlex.join(["ckptool", verb, source, as_argument(target), *options])
    chosen = None if plan.commands else format_option(patient.checkpoint, target, format)
    more = ["--format", chosen] if chosen else []
    return shlex.join(["ckptool", verb, *options, source, "-o", as_argument(target), *more])


def _target(file: str, word: str, format: str, taken: set[str]) -> str:
    base = default_target(file, word or MENDED, format, sharded=True)
    if not word:
        base = f"{base.removesuffix(f'.{MENDED}.safetensors')}.safetensors"
    return unused(base, taken)


def _forms(choice: Choice) -> list[tuple[str, ...]]:
    """The words as they are, and without a key."""
    words = choice.words
    if "--key" not in words:
        return [words]
    at = words.index("--key")
    return [words, words[:at] + words[at + 2 :]]


def _runs(words: Sequence[str], state: Checkpoint, format: str) -> bool:
    """Whether a command can be run and its result written, and it is another than what there is."""
    try:
        made = _made(words, state)
        writer(format).plan(made)
    except CheckpointError:
        return False
    return words[0] == "convert" or made.root is not state.root


def _made(words: Sequence[str], state: Checkpoint) -> Checkpoint:
    """What a command makes of the tree.

    Raises:
        CheckpointError: nothing.
    """
    verb, *options = words
    key = next(iter(_told(options, "--key")), None)
    if verb == "extract":
        alone = "--model-only" in options
        return extract(state, key=key, exclude=_told(options, "--exclude"), model_only=alone)
    if verb == "rename":
        rules = [regex_rule(rule) for rule in _told(options, "--map")]
        return rename(state, [*map(prefix_rule, _told(options, "--prefix")), *rules])
    made = strip_module(single_state_dict(state, key))
    return untie(made) if "copy" in _told(options, "--ties") else made


def _told(options: Sequence[str], option: str) -> list[str]:
    """What stands behind each mention of an option."""
    pairs = pairwise(options)
    return [value for name, value in pairs if name == option]
