"""The steps of `convert`, in the order in which its options apply."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ckptool.conversion.fit import Fit
from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import TensorRef
from ckptool.errors import AmbiguousName, NotFound, UsageError
from ckptool.formats import load_format
from ckptool.recipes import Relayout
from ckptool.recipes.reshaping import Concat, Reshape, refuse_mixed
from ckptool.transforms import (
    Cast,
    Compact,
    Drop,
    Flatten,
    Masters,
    Move,
    Nest,
    Overlay,
    Plain,
    Remap,
    Rename,
    Salvage,
    Set,
    Step,
    Strip,
    Take,
    Untie,
    Wrap,
    changed,
    single_state_dict,
)
from ckptool.transforms.tree_edits import METADATA, is_of_header
from ckptool.words import listed

STEPS: tuple[type[Step], ...] = (
    Salvage, Masters, Concat, Flatten, Take, Overlay, Strip, Wrap, Rename, Relayout, Reshape, Fit,
    Plain, Untie, Cast, Compact, Remap, Drop, Move, Set, Nest,
)  # fmt: skip
"""The order in which the options of a command apply; in Python the caller chooses. A recipe that
selects tensors by path comes before `Take`."""
_BEFORE_TAKE = STEPS[: STEPS.index(Take)]


_SEVERAL = (tuple, list, dict)
_NEEDED: Mapping[type[Step], tuple[str, str, str]] = {
    Fit: ("like", "a reference", "add --like FILE"),
    Overlay: ("source", "another file", "add --overlay FILE"),
    Relayout: ("recipe", "a recipe", "add --recipe NAME; ckptool recipes lists them"),
}
"""By step, the field that its other options need, a description, and the hint."""


def steps_of(options: Mapping[str, Any]) -> list[Step]:
    """Return the steps for the options of `convert`, in the order of `STEPS`.

    Args:
        options: Values by option name, such as `model_only`; None, False and empty values mean that
            the option is not given.

    Raises:
        UsageError: if an option has a wrong value, excludes another, or needs another that is not
            given.
    """
    given = {
        name: value
        for name, value in options.items()
        if not (value is None or value is False or (isinstance(value, _SEVERAL) and not value))
    }
    steps = [step for kind in STEPS if (step := _step(kind, given)) is not None]
    return sorted(steps, key=lambda one: not _is_before_take(one))


def _is_before_take(step: Step) -> bool:
    """Return True if a step needs the whole file, not only the state dict that is taken."""
    return isinstance(step, _BEFORE_TAKE) or (isinstance(step, Relayout) and step.loaded.uses_paths)


def place_in(steps: Sequence[Step], kind: type[Step]) -> int:
    """Return the position for a step of this kind among steps in the order of `STEPS`."""
    before = STEPS[: STEPS.index(kind)]
    return sum(isinstance(one, before) for one in steps)


def _step(kind: type[Step], given: Mapping[str, Any]) -> Step | None:
    if kind.flag:
        name, _, value = kind.flag.partition("=")
        if value and given.get(name, value) not in ("keep", value):
            raise UsageError(f"{name} takes 'keep' or {value!r}, not {given[name]!r}")
        return kind() if given.get(name) == (value or True) else None
    named = {kind.options.get(one.name, one.name): one for one in fields(kind)}
    own = {one.name: given[name] for name, one in named.items() if name and name in given}
    needed, what, hint = _NEEDED.get(kind, ("", "", ""))
    if own and needed and needed not in own:
        about = ", ".join(f"--{kind.options.get(one, one).replace('_', '-')}" for one in own)
        verb = "needs" if len(own) == 1 else "need"
        raise UsageError(f"{about} {verb} {what}", hint=hint)
    if kind is Strip:
        return _strip(own, given)
    if kind is Take and own and "like" in given:
        own["lazy"] = True
    if kind is Plain and own:
        own.setdefault("plain", False)
    return kind(**own) if own else None


def _strip(own: Mapping[str, Any], given: Mapping[str, Any]) -> Strip | None:
    wrappers = given.get("wrappers")
    if wrappers not in (None, "strip", "keep"):
        raise UsageError(f"wrappers takes 'strip' or 'keep', not {wrappers!r}")
    if wrappers is not None and "like" in given:
        raise UsageError("--like decides the wrapper prefixes: leave out --wrappers")
    if wrappers == "keep" and own:
        raise UsageError("choose the submodule to strip (--at) or --wrappers keep, not both")
    if wrappers == "keep":
        return Strip(levels=0)
    return Strip(**own) if own or wrappers else None


def with_implied(steps: Iterable[Step], target: str) -> Iterator[Step]:
    """Yield the steps, with those that the format `target` implies.

    A flat format gets only the state dict; safetensors and similar formats get it without wrapper
    prefixes, by convention. `Salvage` comes after `Take`, because the rest may be damaged.
    """
    every, known = list(steps), load_format(target)
    kinds = {type(one) for one in every}
    todo = [one for one in every if not isinstance(one, Salvage)]
    at = next((n for n, one in enumerate(todo) if not _is_before_take(one)), len(todo))
    takes = [n for n, one in enumerate(todo) if isinstance(one, Take) and one.key is not None]
    if known.flat and not any(isinstance(one, Take) and one.model_only for one in todo):
        todo.insert(takes[-1] + 1 if takes else at, _OnlyStateDict(chosen=bool(takes)))
    after = next(
        (
            n
            for n, one in enumerate(todo)
            if not (_is_before_take(one) or isinstance(one, (_OnlyStateDict, Take)))
        ),
        len(todo),
    )
    if known.tensors_only and kinds.isdisjoint((Strip, Fit)):
        todo.insert(after, Strip())
    todo[after:after] = [one for one in every if isinstance(one, Salvage)]
    yield from todo


@dataclass(frozen=True)
class _OnlyStateDict(Step):
    """Take the only state dict, for a flat format."""

    chosen: bool = False
    """True if the user chose the section, so that any dict counts as a state dict."""

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with the state dict as its root."""
        try:
            return single_state_dict(checkpoint)
        except AmbiguousName:
            raise
        except NotFound:
            if self.chosen and isinstance(checkpoint.root, dict):
                return checkpoint
            raise


def converted(checkpoint: Checkpoint, steps: Iterable[Step], target: str) -> Checkpoint:
    """Return the checkpoint after all steps, in the form that the format `target` needs.

    Raises:
        UsageError: if the result is nested and `target` is flat.
        CheckpointError: if a step fails.
    """
    todo = list(steps)
    nests = [one for one in todo if isinstance(one, Nest)]
    if nests and isinstance(checkpoint.root, TensorRef):  # which has no option
        checkpoint = changed(checkpoint, nests)
        todo = [one for one in todo if not isinstance(one, Nest)]
    elif nests and load_format(target).flat:
        raise UsageError(
            f"{target} stores one flat state dict, which cannot be nested",
            hint="write a .pth, or change the keys with --rename '^=>KEY.'",
        )
    for concat in (one for one in todo if isinstance(one, Concat)):
        for reshape in (one for one in todo if isinstance(one, Reshape) and one.split):
            refuse_mixed(checkpoint, concat, reshape)
    _refuse_values(checkpoint, todo, target)
    made = changed(checkpoint, with_implied(todo, target))
    if load_format(target).tensors_only:
        kept = tuple(one for one in made.changes if not one.of_storages)
        made = replace(made, changes=kept)
    return made


def _refuse_values(checkpoint: Checkpoint, steps: Iterable[Step], target: str) -> None:
    """Refuse to set values or header strings that the format cannot store."""
    known = load_format(target)
    paths = [path for one in steps if isinstance(one, Set) for path in one.values]
    header = [path for path in paths if is_of_header(checkpoint, path)]
    if header and not known.header_key:
        raise UsageError(
            f"{target} has no header strings: {listed(header, 3)}",
            hint="write a .safetensors, or set a value of the tree: --set KEY=VALUE",
        )
    values = [path for path in paths if path not in header]
    if values and known.tensors_only:
        raise UsageError(
            f"{target} stores no values except header strings: {listed(values, 3)}",
            hint=f"--set '{METADATA}/{values[0]}=\"...\"' sets a header string",
        )
