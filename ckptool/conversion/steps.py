"""The steps of `convert`, in the order in which its options apply."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import takewhile
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
    extract_state_dict,
    run_steps,
)
from ckptool.transforms.tree_edits import METADATA, is_in_header
from ckptool.words import listed

STEPS: tuple[type[Step], ...] = (
    Salvage, Masters, Concat, Flatten, Take, Overlay, Strip, Wrap, Rename, Relayout, Reshape, Fit,
    Plain, Untie, Cast, Compact, Remap, Drop, Move, Set, Nest,
)  # fmt: skip
"""The order in which the options of a command apply; in Python the caller chooses. A recipe that
selects tensors by path comes before `Take`."""
_BEFORE_TAKE = STEPS[: STEPS.index(Take)]


_REPEATED = (tuple, list, dict)
"""Types of the values of options that can be repeated; empty means not given."""
_NEEDED: Mapping[type[Step], tuple[str, str, str]] = {
    Fit: ("like", "a reference", "add --like FILE"),
    Overlay: ("source", "another file", "add --overlay FILE"),
    Relayout: ("recipe", "a recipe", "add --recipe NAME; ckptool recipes lists them"),
}
"""By step, the field that its other options need, a description, and the hint."""


def make_steps(options: Mapping[str, Any]) -> list[Step]:
    """Return the steps for the options of `convert`, in the order of `STEPS`.

    Steps that need the whole file, such as a recipe for its paths, come before all others.

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
        if not (value is None or value is False or (isinstance(value, _REPEATED) and not value))
    }
    steps = [step for kind in STEPS if (step := _make_step(kind, given)) is not None]
    return sorted(steps, key=lambda step: not _is_before_take(step))


def _is_before_take(step: Step) -> bool:
    """Return True if a step needs the whole file, not only the state dict that is taken."""
    return isinstance(step, _BEFORE_TAKE) or (isinstance(step, Relayout) and step.loaded.uses_paths)


def position_for(steps: Sequence[Step], kind: type[Step]) -> int:
    """Return the position for a step of this kind among steps in the order of `STEPS`."""
    before = STEPS[: STEPS.index(kind)]
    return sum(isinstance(step, before) for step in steps)


def _make_step(kind: type[Step], given: Mapping[str, Any]) -> Step | None:
    """Return the step of a class with its options among `given`; None if none of them is given.

    Raises:
        UsageError: if an option has a wrong value, or needs another one.
    """
    if kind.flag:  # a step without fields, by one option: `compact`, or `ties=copy` with a value
        name, _, value = kind.flag.partition("=")
        if value and given.get(name, value) not in ("keep", value):
            raise UsageError(f"{name} takes 'keep' or {value!r}, not {given[name]!r}")
        return kind() if given.get(name) == (value or True) else None
    option_by_field = {
        field.name: kind.options.get(field.name, field.name) for field in fields(kind)
    }
    arguments = {
        field: given[option] for field, option in option_by_field.items() if option in given
    }
    needed_field, description, hint = _NEEDED.get(kind, ("", "", ""))
    if arguments and needed_field and needed_field not in arguments:
        option_names = ", ".join(
            f"--{kind.options.get(field, field).replace('_', '-')}" for field in arguments
        )
        verb = "needs" if len(arguments) == 1 else "need"
        raise UsageError(f"{option_names} {verb} {description}", hint=hint)
    if kind is Strip:
        return _make_strip(arguments, given)
    if kind is Take and arguments and "like" in given:
        arguments["lazy"] = True  # `Fit` comes later and may leave lazy parameters out
    if kind is Plain and arguments:
        arguments.setdefault("plain", False)  # its default in Python is True
    return kind(**arguments) if arguments else None


def _make_strip(arguments: Mapping[str, Any], given: Mapping[str, Any]) -> Strip | None:
    """Return the step that strips wrapper prefixes; None if no option asks for it.

    `arguments` are the options of `Strip` among all options `given` to `convert`.
    """
    wrappers = given.get("wrappers")
    if wrappers not in (None, "strip", "keep"):
        raise UsageError(f"wrappers takes 'strip' or 'keep', not {wrappers!r}")
    if wrappers is not None and "like" in given:
        raise UsageError("--like decides the wrapper prefixes: leave out --wrappers")
    if wrappers == "keep" and arguments:
        raise UsageError("choose the submodule to strip (--at) or --wrappers keep, not both")
    if wrappers == "keep":
        return Strip(levels=0)
    return Strip(**arguments) if arguments or wrappers else None


def add_implied_steps(steps: Iterable[Step], target: str) -> Iterator[Step]:
    """Yield the steps, and the steps that the format `target` implies.

    A flat format gets only the state dict; safetensors and similar formats get it without wrapper
    prefixes, by convention. `Salvage` comes after `Take`, because the rest may be damaged.
    """
    all_steps, target_format = list(steps), load_format(target)
    ordered = [step for step in all_steps if not isinstance(step, Salvage)]
    takes = [step for step in ordered if isinstance(step, Take)]
    gives_state_dict = any(step.model_only for step in takes)
    if target_format.flat and not gives_state_dict:
        key_takes = [step for step in takes if step.key is not None]
        if key_takes:  # the state dict of the part that the user takes
            position = ordered.index(key_takes[-1]) + 1
        else:  # the state dict of the file, after the steps that need the whole file
            position = len(list(takewhile(_is_before_take, ordered)))
        ordered.insert(position, _OnlyStateDict(after_take=bool(key_takes)))

    def is_up_to_take(step: Step) -> bool:
        """Return True for the steps that choose the entries to convert, and those before them."""
        return _is_before_take(step) or isinstance(step, (_OnlyStateDict, Take))

    choosing_count = len(list(takewhile(is_up_to_take, ordered)))
    yield from ordered[:choosing_count]
    yield from (step for step in all_steps if isinstance(step, Salvage))
    if target_format.tensors_only and not any(isinstance(step, (Strip, Fit)) for step in all_steps):
        yield Strip()
    yield from ordered[choosing_count:]


@dataclass(frozen=True)
class _OnlyStateDict(Step):
    """Take the only state dict, for a flat format."""

    after_take: bool = False
    """True if `Take(key=...)` already took a part; then any dict counts as a state dict."""

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with the state dict as its root.

        If the user took a part that is a dict but no state dict, return the checkpoint unchanged.
        """
        try:
            return extract_state_dict(checkpoint)
        except NotFound as error:
            is_taken = self.after_take and isinstance(checkpoint.root, dict)
            if is_taken and not isinstance(error, AmbiguousName):  # which is a NotFound
                return checkpoint
            raise


def apply_steps(checkpoint: Checkpoint, steps: Iterable[Step], target: str) -> Checkpoint:
    """Return the checkpoint after all steps, in the form that the format `target` needs.

    A root that is a single tensor has no key for a flat format, so `Nest` gives it one first.

    Raises:
        UsageError: if the result is nested and `target` is flat.
        CheckpointError: if a step fails.
    """
    remaining = list(steps)
    nest_steps = [step for step in remaining if isinstance(step, Nest)]
    if nest_steps and isinstance(checkpoint.root, TensorRef):
        checkpoint = run_steps(checkpoint, nest_steps)
        remaining = [step for step in remaining if not isinstance(step, Nest)]
    elif nest_steps and load_format(target).flat:
        raise UsageError(
            f"{target} stores one flat state dict, which cannot be nested",
            hint="write a .pth, or change the keys with --rename '^=>KEY.'",
        )
    # Joined ranks must not be split along the dimension along which they were joined.
    splits = [step for step in remaining if isinstance(step, Reshape) and step.split]
    for concat in (step for step in remaining if isinstance(step, Concat)):
        for split in splits:
            refuse_mixed(checkpoint, concat, split)
    _refuse_values(checkpoint, remaining, target)
    result = run_steps(checkpoint, add_implied_steps(remaining, target))
    if load_format(target).tensors_only:  # which has no storages, so their changes have no effect
        changes = tuple(change for change in result.changes if not change.of_storages)
        result = replace(result, changes=changes)
    return result


def _refuse_values(checkpoint: Checkpoint, steps: Iterable[Step], target: str) -> None:
    """Refuse to set values or header strings that the format cannot store."""
    target_format = load_format(target)
    paths = [path for step in steps if isinstance(step, Set) for path in step.values]
    header_paths = [path for path in paths if is_in_header(checkpoint, path)]
    if header_paths and not target_format.header_key:
        raise UsageError(
            f"{target} has no header strings: {listed(header_paths, most=3)}",
            hint="write a .safetensors, or set a value of the tree: --set KEY=VALUE",
        )
    tree_paths = [path for path in paths if path not in header_paths]
    if tree_paths and target_format.tensors_only:
        raise UsageError(
            f"{target} stores no values except header strings: {listed(tree_paths, most=3)}",
            hint=f"--set '{METADATA}/{tree_paths[0]}=\"...\"' sets a header string",
        )
