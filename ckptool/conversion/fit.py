"""The step that gives a checkpoint the keys of a model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from ckptool.core.checkpoint import Change, Checkpoint
from ckptool.core.model import Opaque, copy_with_items
from ckptool.core.names import map_to_bare_names
from ckptool.core.placeholders import refuse_placeholders
from ckptool.core.sections import (
    MODEL_KINDS,
    Section,
    find_model_state_dict,
    is_flat,
    list_wrappable_keys,
)
from ckptool.core.tree import describe_path
from ckptool.errors import NameCollision, NotRepresentable
from ckptool.loading.plan import LoadPlan, describe_like, plan_load
from ckptool.loading.source import StateDict
from ckptool.loading.target import ModelTarget
from ckptool.matching import Allowance, Allowed, MatchReport
from ckptool.matching.layouts import TransposeRules
from ckptool.remedies import Remedy
from ckptool.transforms.names import NamePlan, list_distinct_sections
from ckptool.transforms.step import Step, check_list_option
from ckptool.words import counted, listed, printable

if TYPE_CHECKING:
    import torch

Like: TypeAlias = (
    "torch.nn.Module | Mapping[str, Any] | Iterable[str] | os.PathLike[str] | Checkpoint"
)
"""A path, an open checkpoint, a model, a state dict, shapes by key, or keys."""

_HINT = "ckptool match shows which keys match, and by which rules"


@dataclass(frozen=True, eq=False, repr=False)
class Reference:
    """The target model of a file, and its name in a command."""

    like: Like
    """An open checkpoint, a model or a state dict."""
    word: str
    """Its name in a command."""
    target: ModelTarget
    """Its slots."""

    def __str__(self) -> str:
        """Return its name in a command."""
        return self.word


@dataclass(frozen=True)
class Fit(Step):
    """Give every state dict the keys of a model, with the order and dtypes of the file.

    `_metadata` and parameter names in optimizers change accordingly. Keys of the model that are
    tied to a key of the file are added after it. Unexpected tensors and tensors of another shape
    are left out if that is allowed. Entries for a module's own loading code get the key that it
    expects.
    """

    on_files: ClassVar[str] = "ckptool.load_into(model, state_dict) loads it"

    like: Like | Reference
    """A file, a model or a state dict that has the new keys."""
    like_key: str | None = None
    """The path of the state dict of `like`, if it has several."""
    transpose: Iterable[str] = ()
    """Globs of keys of `like`; see `ckptool.match`."""
    no_transpose: Iterable[str] = ()
    """Globs of keys of `like`; see `ckptool.match`."""
    allow_missing: Allowed = None
    """True, or globs of the keys of `like` that may be missing."""
    allow_unexpected: Allowed = None
    """True, or globs of keys to leave out if `like` does not have them."""
    allow_mismatched: Allowed = False
    """True, or globs of keys to leave out if the shape differs."""
    min_coverage: float | None = None
    """The minimum share of the parameters of `like` that the file must have, 0 to 1."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            UsageError: if `transpose` or `no_transpose` is not a list of globs.
        """
        for name in ("transpose", "no_transpose"):
            object.__setattr__(self, name, check_list_option(name, getattr(self, name)))
        for name in ("allow_missing", "allow_unexpected", "allow_mismatched"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (bool, str)):
                object.__setattr__(self, name, tuple(value))
        self._transpose_rules()

    def _transpose_rules(self) -> TransposeRules:
        """Return the rules parse `transpose` and `no_transpose`."""
        return TransposeRules.parse(self.transpose, self.no_transpose)

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with the keys of the model.

        Raises:
            MatchError: if a state dict does not fit; it has the report.
            NotFound: if there is no state dict.
            NotRepresentable: if a pickled module would need other keys, which its class
                determines, or tensors are placeholders.
            NameCollision: if two entries would get the same key.
        """
        # A lazy parameter counts as missing, which may be allowed.
        refuse_placeholders(checkpoint, kinds=("meta", "part"))
        allowance = Allowance(
            missing=self.allow_missing,
            unexpected=self.allow_unexpected,
            mismatched=self.allow_mismatched,
            lossy_cast=True,
            min_coverage=self.min_coverage,
        )
        plan = NamePlan(checkpoint.path, _HINT)
        sections = list_distinct_sections(checkpoint.sections)
        like = self.like
        if isinstance(like, Reference):
            target = like.target
        else:
            target = describe_like(like, key=self.like_key)
        namings = _match_sections(checkpoint, sections, target, self._transpose_rules())
        _refuse_mismatches(namings, allowance)
        for naming in namings:
            naming.add_to_plan(plan)
        plan.plan_optimizers(checkpoint.root, sections, lambda own: _match_bare_names(own, namings))
        return plan.apply_to(checkpoint)


def match_section(checkpoint: Checkpoint, part: Section, like: ModelTarget) -> MatchReport:
    """Match one state dict with a model, by keys, shapes and dtypes only."""
    with closing(StateDict(checkpoint, part)) as state:
        return plan_load(state, like, by_type=True).report


@dataclass(frozen=True, eq=False)
class _Naming:
    """One state dict, and its match with the model."""

    part: Section
    fit: LoadPlan
    names: dict[str, str]
    """The new key of every key."""
    tied_names: dict[str, tuple[str, ...]]
    """By new key, the keys of the model that are tied to it and not in the file."""

    @property
    def _removed_keys(self) -> frozenset[str]:
        """Keys that the model does not have, except those of plain values."""
        report, stays = self.fit.report, {*self.fit.undecided.values()}
        names = {name for name, _ in report.left_out} | {*report.unexpected_keys}
        names |= {mismatch.own for mismatch in report.mismatched}
        return frozenset((names & self.names.keys()) - stays)

    def add_to_plan(self, plan: NamePlan) -> None:
        """Plan the state dict with its new keys."""
        part, removed_keys = self.part, self._removed_keys
        renamed = {name: new for name, new in self.names.items() if new != name}
        if part.kind == "module" and (renamed or self.tied_names):
            raise NotRepresentable(
                f"the pickled module at {describe_path(part.path)} cannot have other keys: "
                "its class defines them",
                file=plan.file or None,
                hint="add --model-only to convert it to a state dict",
            )
        plan.plan_state_dict(part, list(self.names), renamed)
        if part.kind != "module" and (removed_keys or self.tied_names):
            holder = plan.replacements.get(id(part.holder), part.holder)
            plan.replacements[id(part.holder)] = self._complete_state_dict(
                plan, holder, frozenset(self.names[name] for name in removed_keys)
            )
        for layout in self.fit.report.layouts:
            node = part.node[layout.own]
            plan.replacements[id(node)] = node.permuted(layout.axes)
        plan.changes.extend(self._describe_changes())

    def _complete_state_dict(
        self, plan: NamePlan, holder: Any, removed_keys: frozenset[str]
    ) -> Any:
        """Return the renamed state dict with the tied keys, and without the keys `removed_keys`."""

        def iterate_entries(items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
            """Yield the entries of the file that stay, each with its tied keys."""
            for name, value in items:
                if name not in removed_keys:
                    yield name, value
                    yield from ((tied_name, value) for tied_name in self.tied_names.get(name, ()))

        if isinstance(holder, Opaque):
            steps = [
                (kind, list(iterate_entries(value)) if kind == "set" else value)
                for kind, value in holder.steps
            ]
            return replace(holder, steps=steps)
        items_by_name: dict[Any, Any] = {}
        for name, value in iterate_entries(holder.items()):
            if name in items_by_name:
                text = f"{printable(name)!r} would be twice in {describe_path(self.part.path)}"
                raise NameCollision(text, file=plan.file or None, hint=_HINT)
            items_by_name[name] = value
        return copy_with_items(holder, items_by_name)

    def _describe_changes(self) -> Iterator[Change]:
        """Yield the changes of keys, tensors and ties, and the keys that do not match."""
        report, path = self.fit.report, describe_path(self.part.path)
        mismatched = [entry.name for entry in report.mismatched]
        for renaming in report.renamed:
            count = len(renaming.names)
            text = f"renamed {counted(count, 'key')} of {path} with {printable(renaming.text)}"
            yield Change("fit", text, count)
        if transposed := [entry.name for entry in report.layouts]:
            text = (
                f"transposed {counted(len(transposed), 'tensor')} of {path}: {listed(transposed)}"
            )
            yield Change("fit", text, len(transposed))
        for new, tied_names in self.tied_names.items():
            text = f"added {listed(tied_names)}, which the model ties to {printable(new)}"
            yield Change("fit", text, len(tied_names))
        removed_keys, undecided = self._removed_keys, {*self.fit.undecided.values()}
        for name, reason in report.left_out:
            text = f"{printable(name)}: {printable(reason)}"
            if name in removed_keys:
                yield Change("left-out", text, 1, wanted=True)
            elif name in undecided:
                yield Change("fit", f"{text}, as {printable(self.names[name])}", 1)
        for names, problem in (
            (report.missing_keys, f"of the model missing from {path}"),
            (report.unexpected_keys, f"of {path} that the model does not have"),
            (mismatched, f"of {path} with another shape than in the model"),
        ):
            if names:
                text = f"{counted(len(names), 'key')} {problem}: {listed(names)}"
                kind = "warning" if names is report.missing_keys else "left-out"
                yield Change(kind, text, len(names), wanted=kind == "left-out")


def _match_sections(
    checkpoint: Checkpoint,
    sections: list[Section],
    like: ModelTarget,
    choices: TransposeRules | None,
) -> list[_Naming]:
    """Match each state dict of a checkpoint with a model."""
    parts = [part for part in sections if part.kind in MODEL_KINDS]
    if not parts and is_flat(checkpoint.root):
        parts = [Section((), "state_dict", checkpoint.root, checkpoint.root)]
    parts = parts or [find_model_state_dict(checkpoint)]
    namings = []
    for part in parts:
        with closing(StateDict(checkpoint, part)) as state:
            fit = plan_load(state, like, choices=choices, as_stored=True)
        if len(parts) > 1:
            file = f"{checkpoint.path} ({describe_path(part.path)})"
            fit = fit.with_changes(file=file)
        namings.append(_name_keys(part, fit))
    return namings


def _name_keys(part: Section, fit: LoadPlan) -> _Naming:
    """Return the new key of each key of a matched state dict, and the tied keys."""
    names = {name: name for name in list_wrappable_keys(part.node)}
    names.update((mismatch.own, mismatch.name) for mismatch in fit.report.mismatched)
    names.update((key, name) for name, key in fit.undecided.items())
    targets_by_own: dict[str, list[str]] = {}
    for target, key in fit.pairs.items():
        targets_by_own.setdefault(key, []).append(target)
    tied_names = {}
    for key, targets in targets_by_own.items():
        preferred = (key, fit.match.renamed.get(key, key))
        names[key] = new = next((name for name in preferred if name in targets), targets[0])
        if len(targets) > 1:
            tied_names[new] = tuple(name for name in targets if name != new)
    return _Naming(part, fit, names, tied_names)


def _refuse_mismatches(namings: list[_Naming], allowance: Allowance) -> None:
    """Refuse state dicts that do not fit; the hint names one that fits.

    Raises:
        MatchError: for the first that does not fit.
    """
    refusals = {naming.part.name: naming.fit.refusal_error(allowance) for naming in namings}
    refused = next(filter(None, refusals.values()), None)
    if refused is None:
        return
    for name, refusal in refusals.items():
        if refusal is None:
            refused.advise(Remedy((("key", name),), " takes only the matching state dict"))
            break
    raise refused


def _match_bare_names(names: list[str], namings: Iterable[_Naming]) -> dict[str, str]:
    """Return new names for an optimizer that has the names without wrapper prefixes."""
    bare = map_to_bare_names(names)
    for naming in namings:
        theirs = map_to_bare_names(naming.names)
        new = {theirs[name]: new for name, new in naming.names.items()}
        if not new.keys().isdisjoint(bare.values()):
            return {
                name: new[bare_name]
                for name, bare_name in bare.items()
                if bare_name in new and new[bare_name] != name
            }
    return {}
