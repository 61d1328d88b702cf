"""Complaints, what mends each of them, and the patient that the checks examine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ckptool.conversion.fit import Reference
from ckptool.core.checkpoint import Checkpoint
from ckptool.core.finding import Finding
from ckptool.core.names import bare_names, families
from ckptool.core.sections import (
    Section,
    likely_models,
    model_state_dict,
    only_model,
    wrapped_names,
)
from ckptool.diagnosis.companions import Companion, companion_of
from ckptool.quotes import Quote
from ckptool.symbolic.encoder import blockers
from ckptool.transforms import Step
from ckptool.words import printable, shell

Steps = tuple[Step, ...]

_MOST_PLACES = 8


@dataclass(frozen=True, slots=True)
class Choice:
    """A conversion apart from the plan, and the word that its target has before its ending.

    Without a word the target is a safetensors file of the source's name.
    """

    steps: Steps
    word: str = ""
    code: str = ""
    """The Python that loads the target, which is called FILE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint(Finding):
    """One reason why a plain `torch.load` and `load_state_dict` fail or mislead.

    `text` is what the file is or has, `where` its paths, repeated layers folded, at most some
    (`and 12 more` where there are more), `hint` what helps where no command does, or next to it.
    """

    quote: Quote | None = None
    """The error of the library that loads the file."""
    effect: str = ""
    """What happens otherwise, or why."""
    commands: tuple[str, ...] = ()
    """The command of the plan, where it fixes this."""
    alternatives: tuple[str, ...] = ()
    """Commands apart from the plan, of which one may be chosen."""
    code: str = ""
    """The Python that loads what an alternative writes, where the usual call does not."""
    fix: Steps | None = None
    """The steps that fix it: None where no command helps, empty where any rewrite does."""
    format: str | None = None
    """The format in which it is no more."""
    choices: tuple[Choice, ...] = ()
    """Conversions of which one may be chosen in place of `fix`."""
    resume: Steps | None = None
    """What fixes it for a training that resumes with the reference, where `fix` drops that."""

    @property
    def why(self) -> str:
        """What happens, with the text of torch's own error."""
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
    """A checkpoint, with what the user said of it."""

    checkpoint: Checkpoint
    key: str | None = None
    """The state dict that is meant, where there are several."""
    devices: tuple[str, ...] = ("cpu",)
    """Device tags for which this machine has a device."""
    reference: Reference | None = None
    """The model that it is to load into."""

    @cached_property
    def companion(self) -> Companion | None:
        """What a trainer saved as this file next to a model, if it is known."""
        return companion_of(self.checkpoint)

    @cached_property
    def blocked(self) -> tuple[str, ...]:
        """What keeps `weights_only=True` from loading a file of this tree (`encoder.blockers`)."""
        return blockers(self.checkpoint.root)

    @cached_property
    def models(self) -> tuple[Section, ...]:
        """The state dicts and modules; one that the file has under two names, once."""
        return likely_models(self.checkpoint)

    @cached_property
    def optimizers(self) -> tuple[Section, ...]:
        """The states of optimizers, each once."""
        found = (one for one in self.checkpoint.sections if one.kind == "optimizer")
        return tuple({id(one.holder): one for one in found}.values())

    @cached_property
    def model(self) -> Section | None:
        """The state dict to load: the one of `key`, or the only one; None where that is open.

        Raises:
            NotFound: nothing, or several things (`AmbiguousName`), answer to `key`.
        """
        if self.key is not None:
            return model_state_dict(self.checkpoint, self.key)
        return only_model(self.models)

    @cached_property
    def is_training(self) -> bool:
        """Whether a training saved it to resume: an optimizer or scheduler lies beside a model."""
        kinds = {section.kind for section in self.checkpoint.sections}
        return bool(self.models) and not kinds.isdisjoint(("optimizer", "scheduler"))

    def is_compared(self, section: Section) -> bool:
        """Return True if the reference alone decides which names a state dict should have."""
        model = self.model
        return self.reference is not None and model is not None and section.holder is model.holder


def unwrapped(section: Section) -> dict[str, str]:
    """Map each name of a model's section to the name without wrappers.

    If two names would become equal, all keep their wrappers.
    """
    return bare_names(wrapped_names(section.node))


def names_of(names: Iterable[str], most: int = _MOST_PLACES) -> tuple[str, ...]:
    """Return the first names with repeated layers folded (`layers.{0..11}.weight`)."""
    found = families((name, None) for name in names)
    left = sum(len(family.names) for family in found[most:])
    more = (f"and {left:,} more",) if left else ()
    return (*(printable(family.label) for family in found[:most]), *more)


def with_file(text: str, path: str) -> str:
    """Return a hint with the file's name for FILE: a string of Python, or a word of a shell."""
    text = re.sub(r"(?<=\()FILE\b", lambda _: repr(path), text)
    return re.sub(r"\bFILE\b", lambda _: shell(path), text)
