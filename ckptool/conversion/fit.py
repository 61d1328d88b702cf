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
    """Its keys, shapes and dtypes."""

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
        """Check the options, and turn lists of globs into tuples.

        Raises:
            UsageError: if `transpose` or `no_transpose` is not a list of globs.
        """
        for name in ("transpose", "no_transpose"):
            object.__setattr__(self, name, check_list_option(name, getattr(self, name)))
        for name in ("allow_missing", "allow_unexpected", "allow_mismatched"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (bool, str)):
                object.__setattr__(self, name, tuple(value))
        self._transpose_rules()  # raises if they are wrong

    def _transpose_rules(self) -> TransposeRules:
        """Return the parsed rules of `transpose` and `no_transpose`.

        Raises:
            UsageError: if one is not a glob.
        """
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
        plan.plan_optimizers(
            checkpoint.root, sections, lambda names: _match_bare_names(names, namings)
        )
        return plan.apply_to(checkpoint)


def match_section(checkpoint: Checkpoint, section: Section, like: ModelTarget) -> MatchReport:
    """Match one state dict with a model, by keys, shapes and dtypes only."""
    with closing(StateDict(checkpoint, section)) as state:
        return plan_load(state, like, by_type=True).report


@dataclass(frozen=True, eq=False)
class _Naming:
    """One state dict, its match with the model, and the keys that it gets."""

    section: Section
    fit: LoadPlan
    names: dict[str, str]
    """The new key of every key."""
    tied_names: dict[str, tuple[str, ...]]
    """By new key, the keys of the model that are tied to it and not in the file."""

    @property
    def _removed_keys(self) -> frozenset[str]:
        """Keys of the file to leave out: the model has none or another shape for them.

        Plain values stay, and so do entries that a module's own loading code places.
        """
        report = self.fit.report
        removed_keys = {key for key, _ in report.left_out} | {*report.unexpected_keys}
        removed_keys |= {mismatch.own for mismatch in report.mismatched}
        return frozenset((removed_keys & self.names.keys()) - {*self.fit.undecided.values()})

    def add_to_plan(self, plan: NamePlan) -> None:
        """Plan the state dict with its new and tied keys, and with transposed tensors.

        Keys that do not fit the model are removed, except from a pickled module.

        Raises:
            NotRepresentable: if it is that of a pickled module, and keys would change.
        """
        section, removed_keys = self.section, self._removed_keys
        renamed = {name: new for name, new in self.names.items() if new != name}
        if section.kind == "module" and (renamed or self.tied_names):
            raise NotRepresentable(
                f"the pickled module at {describe_path(section.path)} cannot have other keys: "
                "its class defines them",
                file=plan.file or None,
                hint="add --model-only to convert it to a state dict",
            )
        plan.plan_state_dict(section, list(self.names), renamed)
        if section.kind != "module" and (removed_keys or self.tied_names):
            holder = plan.replacements.get(id(section.holder), section.holder)
            plan.replacements[id(section.holder)] = self._complete_state_dict(
                plan, holder, frozenset(self.names[name] for name in removed_keys)
            )
        for layout in self.fit.report.layouts:
            file_key = layout.own
            tensor = section.node[file_key]
            plan.replacements[id(tensor)] = tensor.permuted(layout.axes)
        plan.changes.extend(self._describe_changes())

    def _complete_state_dict(
        self, plan: NamePlan, holder: Any, removed_keys: frozenset[str]
    ) -> Any:
        """Return the renamed state dict with the tied keys, and without the keys `removed_keys`.

        `holder` is the dict, or the pickled object of a subclass of dict: its steps of kind "set"
        have the entries.

        Raises:
            NameCollision: if two entries have the same new key.
        """

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
                text = f"{printable(name)!r} would be twice in {describe_path(self.section.path)}"
                raise NameCollision(text, file=plan.file or None, hint=_HINT)
            items_by_name[name] = value
        return copy_with_items(holder, items_by_name)

    def _describe_changes(self) -> Iterator[Change]:
        """Yield the changes of keys, tensors and ties, and the keys that do not match.

        Left-out keys are `wanted`, because the caller allowed to leave them out: without that,
        `Fit` has raised an error before.
        """
        report, path = self.fit.report, describe_path(self.section.path)
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
        removed_keys = self._removed_keys
        keys_for_own_code = {*self.fit.undecided.values()}  # a module's own code loads these
        for name, reason in report.left_out:  # by a load into the model, with its reason
            text = f"{printable(name)}: {printable(reason)}"
            if name in removed_keys:
                yield Change("left-out", text, 1, wanted=True)
            elif name in keys_for_own_code:  # kept, under the key of the model
                yield Change("fit", f"{text}, as {printable(self.names[name])}", 1)
            # The others are plain values, which stay as they are.
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
    transpose_rules: TransposeRules,
) -> list[_Naming]:
    """Match each state dict of a checkpoint with a model.

    Raises:
        NotFound: if there is no state dict.
    """
    models = [section for section in sections if section.kind in MODEL_KINDS]
    if not models and is_flat(checkpoint.root):  # tensors without the names of a model
        models = [Section((), "state_dict", checkpoint.root, checkpoint.root)]
    models = models or [find_model_state_dict(checkpoint)]
    namings = []
    for section in models:
        with closing(StateDict(checkpoint, section)) as state:
            fit = plan_load(state, like, transpose_rules=transpose_rules, as_stored=True)
        if len(models) > 1:  # messages must name the state dict
            file = f"{checkpoint.path} ({describe_path(section.path)})"
            fit = fit.with_changes(file=file)
        namings.append(_name_keys(section, fit))
    return namings


def _name_keys(section: Section, fit: LoadPlan) -> _Naming:
    """Return the new key of each key of a matched state dict, and the tied keys.

    Tensors of another shape, or with undecided axes, get the model's keys too. If several keys of
    the model are tied to one key of the file, it keeps its own key, or gets the one of the matched
    rules, or else the first.
    """
    names = {key: key for key in list_wrappable_keys(section.node)}
    names.update((mismatch.own, mismatch.name) for mismatch in fit.report.mismatched)
    names.update((key, model_key) for model_key, key in fit.undecided.items())
    model_keys_by_key: dict[str, list[str]] = {}
    for model_key, key in fit.pairs.items():
        model_keys_by_key.setdefault(key, []).append(model_key)
    tied_names = {}
    for key, model_keys in model_keys_by_key.items():
        preferred = (key, fit.match.renamed.get(key, key))
        names[key] = new = next((name for name in preferred if name in model_keys), model_keys[0])
        if len(model_keys) > 1:
            tied_names[new] = tuple(name for name in model_keys if name != new)
    return _Naming(section, fit, names, tied_names)


def _refuse_mismatches(namings: list[_Naming], allowance: Allowance) -> None:
    """Refuse state dicts that do not fit; the hint names one that fits.

    Raises:
        MatchError: for the first that does not fit.
    """
    refusals = {naming.section.name: naming.fit.refusal_error(allowance) for naming in namings}
    refused = next(filter(None, refusals.values()), None)
    if refused is None:
        return
    for name, refusal in refusals.items():
        if refusal is None:
            refused.advise(Remedy((("key", name),), " takes only the matching state dict"))
            break
    raise refused


def _match_bare_names(names: list[str], namings: Iterable[_Naming]) -> dict[str, str]:
    """Return the new names of parameters in an optimizer, by old name, without unchanged ones.

    They are those of the first state dict with a key in common, compared without wrapper prefixes.
    """
    bare_names = map_to_bare_names(names)
    for naming in namings:
        bare_keys = map_to_bare_names(naming.names)
        new_keys = {bare_keys[key]: new for key, new in naming.names.items()}
        if not new_keys.keys().isdisjoint(bare_names.values()):
            return {
                name: new_keys[bare_name]
                for name, bare_name in bare_names.items()
                if bare_name in new_keys and new_keys[bare_name] != name
            }
    return {}
