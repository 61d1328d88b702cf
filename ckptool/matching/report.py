"""What matching comes to: which names fit, by which rules, and what is left on either side."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckptool.model import Shape

if TYPE_CHECKING:
    from ckptool.matching.optimizer_report import OptimizerReport

__all__ = ["Ambiguity", "Cast", "MatchReport", "Mismatch", "Overlap", "Renaming"]


@dataclass(frozen=True, slots=True)
class Renaming:
    """A rule by which names of the file become names of the model.

    `kind` is `wrapper`, `prefix`, `known` (a rename of torch's own history), `inferred`, or `rule`
    (the user's). A name that several rules change is listed by each of them.
    """

    kind: str
    text: str
    """For people: `module. taken off`, `backbone. -> encoder.`, `gamma -> weight`."""
    names: tuple[tuple[str, str], ...]
    """Name in the file and name in the model."""
    rule: str = ""
    """The same as `REGEX=>REPL` for `rename --map`; empty where no single one does it."""

    def to_dict(self) -> dict[str, Any]:
        """The row as `ckptool.match/1` has it; `rule` is null where no single one does it."""
        return {
            "kind": self.kind,
            "text": self.text,
            "rule": self.rule or None,
            "names": [list(pair) for pair in self.names],
        }


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A tensor of another shape than the model's."""

    name: str
    own: str
    """Its name in the file."""
    shape: Shape
    """In the file."""
    wanted: Shape
    """In the model."""

    def to_dict(self) -> dict[str, Any]:
        """The row as `ckptool.match/1` has it."""
        return {
            "name": self.name,
            "own": self.own,
            "shape": list(self.shape),
            "wanted": list(self.wanted),
        }


@dataclass(frozen=True, slots=True)
class Cast:
    """A tensor whose elements change type on the way into the model."""

    name: str
    own: str
    before: str
    after: str
    lossy: bool
    """Whether numbers change: by the values where they are known, else by what the types hold."""
    loss: str = ""
    """What is lost, in words, where values are known: `3 of 64 overflow`."""

    def to_dict(self) -> dict[str, Any]:
        """The row as `ckptool.match/1` has it."""
        return {
            "name": self.name,
            "own": self.own,
            "before": self.before,
            "after": self.after,
            "lossy": self.lossy,
            "loss": self.loss,
        }


@dataclass(frozen=True, slots=True)
class Ambiguity:
    """Names of the file that fit several of the model's, or the reverse: not guessed between."""

    names: tuple[str, ...]
    candidates: tuple[str, ...]
    rules: tuple[str, ...] = ()
    """`REGEX=>REPL`s, any one of which decides it."""

    def to_dict(self) -> dict[str, Any]:
        """The row as `ckptool.match/1` has it."""
        return {
            "names": list(self.names),
            "candidates": list(self.candidates),
            "rules": list(self.rules),
        }


@dataclass(frozen=True, slots=True)
class Overlap:
    """Tensors of the model that share some of their memory, and are not one tensor.

    The file has values for them that cannot be in that memory at once.
    """

    names: tuple[str, ...]
    whole: str = ""
    """The one of `names` whose memory holds that of all the others; empty: none does."""

    def to_dict(self) -> dict[str, Any]:
        """The row as `ckptool.match/1` has it."""
        return {"names": list(self.names), "whole": self.whole}


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchReport:
    """Whether a state dict fits a model, and how it is made to."""

    file: str = ""
    """What the state dict is from; empty: memory."""
    model: str = ""
    """What it is for: a class, or the reference's path."""
    missing_keys: list[str] = field(default_factory=list)
    """Names of the model that nothing of the file fits, as `load_state_dict` returns them."""
    unexpected_keys: list[str] = field(default_factory=list)
    """Names of the file that fit nothing of the model's."""
    mismatched: tuple[Mismatch, ...] = ()
    """Names of both sides, of different shapes."""
    renamed: tuple[Renaming, ...] = ()
    """The rules by which names came to fit, in the order in which they apply."""
    cast: tuple[Cast, ...] = ()
    """Tensors that change type on the way."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Names of the model that are one tensor, which is loaded."""
    untied: tuple[tuple[str, ...], ...] = ()
    """Names that are one tensor in the model, and not equal in the file."""
    overlapping: tuple[Overlap, ...] = ()
    """Names that share memory in the model, and of which one would undo the other."""
    ambiguous: tuple[Ambiguity, ...] = ()
    """Their names are among the missing and the unexpected too."""
    moved: tuple[str, ...] = ()
    """Lists of layers that are counted otherwise on the two sides, in words: that equal numbers
    mean the same layer is not sure."""
    respelled: tuple[str, ...] = ()
    """Lists of layers of which the file has all that the model lacks, by shapes and numbers, in
    words: the names below the numbers are others."""
    reformed: tuple[tuple[str, str], ...] = ()
    """What the file has of the model in another form, and what helps, in words: a parametrization
    on one side alone, one tensor for several."""
    left_out: tuple[tuple[str, str], ...] = ()
    """Names of the file that no model takes, each with the reason: an average's counter."""
    kept: tuple[tuple[str, str], ...] = ()
    """Names of the model that keep what they have, each with the reason: a counter of BatchNorm
    that old files have not."""
    loaded: int = 0
    """Elements of the model's parameters that are loaded, ties once."""
    parameters: int = 0
    """Elements of the model's parameters, ties once; of all tensors where they cannot be told, and
    names where there are no elements."""
    fitting: int = 0
    """Names of the model that are loaded."""
    names: int = 0
    """Names that the model has, those that are `kept` left out."""
    optimizer: OptimizerReport | None = None
    """How its state was matched; None where none was asked for."""
    notes: tuple[str, ...] = ()
    """Sentences worth telling the user."""

    @property
    def coverage(self) -> float:
        """The share of the model's parameters that is loaded, 0 to 1."""
        return self.loaded / self.parameters if self.parameters else 1.0

    @property
    def fits(self) -> bool:
        """Whether all of the model is loaded from all of the file, and nothing lost on the way."""
        return not (
            self.missing_keys
            or self.unexpected_keys
            or self.mismatched
            or self.untied
            or self.overlapping
            or any(cast.lossy for cast in self.cast)
            or (self.optimizer is not None and self.optimizer.problems)
        )

    def with_changes(self, **changes: Any) -> MatchReport:
        """The same with other fields."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """The document `ckptool.match/1`."""
        return {
            "schema": "ckptool.match/1",
            "file": self.file,
            "model": self.model,
            "fits": self.fits,
            "coverage": self.coverage,
            "loaded": self.loaded,
            "parameters": self.parameters,
            "fitting": self.fitting,
            "names": self.names,
            "missing_keys": list(self.missing_keys),
            "unexpected_keys": list(self.unexpected_keys),
            "mismatched": [mismatch.to_dict() for mismatch in self.mismatched],
            "renamed": [renaming.to_dict() for renaming in self.renamed],
            "cast": [cast.to_dict() for cast in self.cast],
            "tied": [list(names) for names in self.tied],
            "untied": [list(names) for names in self.untied],
            "overlapping": [overlap.to_dict() for overlap in self.overlapping],
            "ambiguous": [ambiguity.to_dict() for ambiguity in self.ambiguous],
            "moved": list(self.moved),
            "respelled": list(self.respelled),
            "reformed": [{"text": text, "helps": helps} for text, helps in self.reformed],
            "left_out": [{"name": name, "reason": reason} for name, reason in self.left_out],
            "kept": [{"name": name, "reason": reason} for name, reason in self.kept],
            "optimizer": self.optimizer and self.optimizer.to_dict(),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """A table, repeated layers folded, as `ckptool match` prints it."""
        from ckptool.render.match import match_text

        return match_text(self)
