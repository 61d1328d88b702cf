"""What is examined: the open checkpoint, the state dict that is meant, and where it is to load."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ckptool.checkpoint import Checkpoint
from ckptool.inspection.doctor.wrapping import Wrapping, wrapping
from ckptool.model import OrderedMap, TensorRef
from ckptool.statedict import MODEL_KINDS, Section, model_state_dict, wrapped_names
from ckptool.symbolic.encoder import blockers
from ckptool.wrappers import strip_names

__all__ = ["Patient", "metadata_of", "tensors_of", "unwrapped"]


@dataclass(frozen=True, eq=False)
class Patient:
    """A checkpoint, with what the user said of it."""

    checkpoint: Checkpoint
    key: str | None = None
    """The state dict that is meant, where there are several."""
    devices: tuple[str, ...] = ("cpu",)
    """Device tags for which this machine has a device."""
    reference: Checkpoint | None = None
    """A checkpoint of the architecture that it is to load into."""

    @cached_property
    def blocked(self) -> tuple[str, ...]:
        """What keeps `weights_only=True` from loading a file of this tree (`encoder.blockers`)."""
        return blockers(self.checkpoint.root)

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The named parts."""
        return self.checkpoint.sections

    @cached_property
    def models(self) -> tuple[Section, ...]:
        """The state dicts and modules; what the file has under two names, once."""
        found: dict[int, Section] = {}
        for section in self.sections:
            if section.kind in MODEL_KINDS:
                found.setdefault(id(section.holder), section)
        return tuple(found.values())

    @cached_property
    def optimizers(self) -> tuple[Section, ...]:
        """The states of optimizers, each once."""
        found = {id(s.holder): s for s in reversed(self.sections) if s.kind == "optimizer"}
        return tuple(reversed(found.values()))

    @cached_property
    def model(self) -> Section | None:
        """The state dict to load: the one of `key`, or the only one; None where that is open.

        Raises:
            NotFound: nothing, or several things (`AmbiguousName`), answer to `key`.
        """
        if self.key is not None:
            return model_state_dict(self.checkpoint, self.key)
        return self.models[0] if len(self.models) == 1 else None

    @cached_property
    def wanted(self) -> Section | None:
        """The state dict of the reference, None without one.

        Raises:
            NotFound: it has none, or several (`AmbiguousName`).
        """
        return None if self.reference is None else model_state_dict(self.reference)

    @cached_property
    def wrapping(self) -> Wrapping:
        """What is to change about the wrappers of `model`, so that it has the reference's."""
        names = wrapped_names(self.model.node) if self.model is not None else []
        return wrapping(names, None if self.wanted is None else wrapped_names(self.wanted.node))

    def wrapping_of(self, section: Section) -> Wrapping:
        """The same of any state dict; of those that the reference is not of, for a bare model."""
        if self.model is not None and section.holder is self.model.holder:
            return self.wrapping
        return wrapping(wrapped_names(section.node))


def tensors_of(section: Section) -> dict[str, TensorRef]:
    """The tensors of a model's section by their own names, as in the file."""
    return {
        name: value
        for name, value in section.node.items()
        if isinstance(name, str) and isinstance(value, TensorRef)
    }


def unwrapped(section: Section) -> dict[str, str]:
    """The names of a model's section as in the file, each with what it is without wrappers.

    Raises:
        NameCollision: two of them would be one.
    """
    names = wrapped_names(section.node)
    renamed = strip_names(names).renamed
    return {name: renamed.get(name, name) for name in names}


def metadata_of(section: Section) -> dict[str, object] | None:
    """The `_metadata` of a state dict, None where it has none."""
    found = section.node.metadata if isinstance(section.node, OrderedMap) else None
    return found if isinstance(found, dict) else None
