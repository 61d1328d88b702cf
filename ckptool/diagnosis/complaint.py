"""Complaints with their fixes, and the checkpoint that the checks examine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ckptool.conversion.fit import Reference
from ckptool.core.checkpoint import Checkpoint
from ckptool.core.finding import Finding
from ckptool.core.names import group_families, map_to_bare_names
from ckptool.core.sections import (
    Section,
    choose_only_model,
    find_likely_models,
    find_model_state_dict,
    list_wrappable_keys,
)
from ckptool.diagnosis.companions import Companion, recognize_companion
from ckptool.quotes import Quote
from ckptool.symbolic.encoder import find_blockers
from ckptool.transforms import Step
from ckptool.words import printable, shell

Steps = tuple[Step, ...]

_MOST_NAMES = 8
"""The most names of a complaint."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A conversion outside the plan, and the word before the extension of its target.

    Without a word the target is a safetensors file with the name of the source.
    """

    steps: Steps
    word: str = ""
    code: str = ""
    """The Python code that loads the target, called FILE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint(Finding):
    """One reason why a plain `torch.load` and `load_state_dict` fail or mislead.

    `text` is the fact about the file. `where` lists its first paths with repeated layers folded,
    then `and 12 more`. `hint` is the advice if no command helps, or in addition to one.
    """

    quote: Quote | None = None
    """The error of the library that loads the file."""
    effect: str = ""
    """What happens without the fix, or the reason."""
    commands: tuple[str, ...] = ()
    """The command of the plan, if it fixes this."""
    alternatives: tuple[str, ...] = ()
    """Commands outside the plan. The user can choose one."""
    code: str = ""
    """The Python code that loads the file of an alternative, if the usual call does not."""
    fix: Steps | None = None
    """The steps that fix it: None if no command helps, empty if any rewrite does."""
    format: str | None = None
    """The target format that fixes it."""
    choices: tuple[Choice, ...] = ()
    """Conversions that can replace `fix`. The user can choose one."""
    resume: Steps | None = None
    """The steps that fix it but keep the training state, if `fix` drops that."""

    @property
    def why(self) -> str:
        """The error of torch and its effect."""
        return "; ".join(filter(None, (str(self.quote or ""), self.effect)))

    def to_dict(self) -> dict[str, Any]:
        """Return the complaint as an entry of `ckptool.doctor/1`."""
        return {
            "kind": self.kind,
            "severity": self.severity,
            "what": self.text,
            "where": list(self.where),
            "why": self.why,
            "commands": list(self.commands),
            "alternatives": list(self.alternatives),
            "remedy": self.hint or "",
        }


@dataclass(frozen=True, eq=False)
class Subject:
    """A checkpoint, with the options that the user gave."""

    checkpoint: Checkpoint
    key: str | None = None
    """The path of the state dict, if the file has several."""
    devices: tuple[str, ...] = ("cpu",)
    """The devices of this machine."""
    reference: Reference | None = None
    """The model to load it into."""

    @cached_property
    def companion(self) -> Companion | None:
        """The kind of file without weights that a trainer saved here, if known."""
        return recognize_companion(self.checkpoint)

    @cached_property
    def blocked(self) -> tuple[str, ...]:
        """The globals for which `weights_only=True` rejects this tree (`encoder.blockers`)."""
        return find_blockers(self.checkpoint.root)

    @cached_property
    def models(self) -> tuple[Section, ...]:
        """The state dicts and modules, each once."""
        return find_likely_models(self.checkpoint)

    @cached_property
    def optimizers(self) -> tuple[Section, ...]:
        """The optimizer states, each once: several paths may lead to one object."""
        optimizers = [
            section for section in self.checkpoint.sections if section.kind == "optimizer"
        ]
        return tuple({id(section.holder): section for section in optimizers}.values())

    @cached_property
    def model(self) -> Section | None:
        """The state dict to load: the one at `key`, or the only one; None if there are several.

        Raises:
            NotFound: `key` is missing or ambiguous (`AmbiguousName`).
        """
        if self.key is not None:
            return find_model_state_dict(self.checkpoint, self.key)
        return choose_only_model(self.models)

    @cached_property
    def is_training(self) -> bool:
        """True if the file has an optimizer or scheduler next to a model."""
        kinds = {section.kind for section in self.checkpoint.sections}
        return bool(self.models) and not kinds.isdisjoint(("optimizer", "scheduler"))

    def is_compared(self, section: Section) -> bool:
        """Return True if the reference decides which keys this state dict should have."""
        model = self.model
        return self.reference is not None and model is not None and section.holder is model.holder


def map_to_bare_keys(section: Section) -> dict[str, str]:
    """Map each key of a model to the key without wrapper prefixes.

    If two keys would become equal, all keep their prefixes.
    """
    return map_to_bare_names(list_wrappable_keys(section.node))


def summarize_names(names: Iterable[str], max_count: int = _MOST_NAMES) -> tuple[str, ...]:
    """Return the first names with repeated layers folded: `layers.{0..11}.weight`, `and 4 more`."""
    folded = group_families((name, None) for name in names)  # by the names alone
    hidden = sum(len(family.names) for family in folded[max_count:])
    tail = (f"and {hidden:,} more",) if hidden else ()
    return (*(printable(family.label) for family in folded[:max_count]), *tail)


def fill_in_path(text: str, path: str) -> str:
    """Replace FILE in a hint by the path, quoted for a shell, or in `call(FILE)` for Python."""
    text = re.sub(r"(?<=\()FILE\b", lambda _: repr(path), text)
    return re.sub(r"\bFILE\b", lambda _: shell(path), text)
