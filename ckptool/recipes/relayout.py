"""A checkpoint in another layout, by a recipe."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptool._lazy import pause_gc
from ckptool.core.checkpoint import Change, Checkpoint
from ckptool.core.model import OrderedMap, TensorRef, copy_with_items
from ckptool.core.names import RULES_HINT, group_families
from ckptool.core.optimizers import find_moments
from ckptool.core.sections import MODEL_KINDS, Section, find_model_state_dict, get_named_tensors
from ckptool.core.tree import is_within, name_of
from ckptool.errors import CheckpointError, NameCollision, UsageError
from ckptool.recipes.assembling import TensorMaker
from ckptool.recipes.params import Params
from ckptool.recipes.planning import Plan, Sketch, Sketches, differences, left_over, plan
from ckptool.recipes.recipe import Recipe, all_shipped
from ckptool.recipes.several import nested, prefix_of
from ckptool.transforms.casting import optimizer_tensors, refuse_apart
from ckptool.transforms.names import NamePlan, moved_metadata
from ckptool.words import counted, listed, printable, shell

_MOST_ALIKE = 16
"""Keys that only differ in numbers, of which a recipe is proposed."""


@pause_gc()
def relayout(
    checkpoint: Checkpoint,
    recipe: Recipe,
    params: Mapping[str, int | str],
    *,
    configs: Sequence[Path] = (),
) -> Checkpoint:
    """Return a checkpoint in the layout that a recipe leads to, over the bytes of the source.

    Without paths in the recipe, the model's state dict changes in its place; else the result has
    nothing but the tensors of the recipe. Changes state what became of the tensors, what is left
    out, and whether the recipe leads back.

    Args:
        checkpoint: The source.
        recipe: The recipe, reversed to go back.
        params: Parameters by name, before those of the recipe.
        configs: Folders or files to read `config.json` and its like from, after the source's own.

    Raises:
        UsageError: the recipe does not fit: a rule matches nothing, no rule takes a tensor, a
            member of a group is missing or differs, nothing decides a size, a shape does not fit;
            or there is the state of an optimizer, which cannot follow.
        NameCollision: two tensors get one key.
        NotRepresentable: a tensor has no plain elements, or is quantized.
    """
    checkpoint, file = checkpoint.with_late_values(), checkpoint.path
    if unknown := sorted(params.keys() - recipe.words):
        text = f"recipe {printable(recipe.name)} has no parameter {listed(unknown)}"
        raise UsageError(text, hint=f"use {listed(sorted(filter(None, recipe.words)), 20)}")
    found = Params(recipe.params, params, checkpoint, configs)
    section = None if recipe.uses_paths else find_model_state_dict(checkpoint)
    tensors = _by_path(checkpoint, recipe) if section is None else get_named_tensors(section.node)
    maker = TensorMaker(file)
    made = plan(recipe, tensors, found.values, maker, file)
    if maker.moved:
        refuse_apart(checkpoint, maker.moved)
    changes = [*_changes(checkpoint, recipe, made, found), *maker.changes()]
    changes.append(_way_back(recipe, made, found))
    if section is None or recipe.reversed().uses_paths:
        others = _others(checkpoint, section)
        return checkpoint.with_root(nested(made.tensors), *changes, *others)
    moments = _rearranged_moments(checkpoint, recipe, found.values, made)
    return _in_place(checkpoint, recipe, section, made, moments, changes)


def _by_path(checkpoint: Checkpoint, recipe: Recipe) -> dict[str, TensorRef]:
    """Return the tensors by their paths; outside of state dicts only those that a rule takes."""
    models = [one.path for one in checkpoint.sections if one.kind in MODEL_KINDS]
    apart = optimizer_tensors(checkpoint)
    rules = (rule for rules in recipe.passes for rule in rules)
    every = [*recipe.drop[0], *(one for rule in rules for one in rule.left)]
    wanted = [one for one in every if "/" in one.text]
    found: dict[str, TensorRef] = {}
    for path, tensor in checkpoint.tensors():
        name = name_of(path)
        is_own = any(is_within(path, one) for one in models)
        if path not in apart and (is_own or any(one.covers(name) for one in wanted)):
            if name in found:
                list(checkpoint.tensors)  # which refuses two tensors of one path
            found[name] = tensor
    return found


def _in_place(
    checkpoint: Checkpoint,
    recipe: Recipe,
    section: Section,
    made: Plan[TensorRef],
    moments: Mapping[int, TensorRef] | None,
    changes: Sequence[Change],
) -> Checkpoint:
    """Return the checkpoint with other entries in one state dict; the optimizer follows.

    `moments` take the place of its tensors, by their identities; None: it cannot follow.
    """
    root, file = checkpoint.root, checkpoint.path
    holder = section.holder if section.path else root
    hint = f"take only the weights with ckptool convert {shell(file)} OUT --model-only"
    if not isinstance(holder, dict):
        raise UsageError("the weights are in a pickled module or object", file=file, hint=hint)
    own, dropped = get_named_tensors(section.node), set(made.dropped)
    new = copy_with_items(holder, entries_of(recipe, made, holder, own, file))
    renamed = made.renamed()
    names = NamePlan(file, RULES_HINT)
    names.instead[id(holder)] = new
    if isinstance(new, OrderedMap) and isinstance(new.metadata, dict):
        kept = {old: key for old, key in renamed.items() if old not in dropped}
        new.attributes = {**new.attributes, "_metadata": moved_metadata(new.metadata, kept)}
    if moments is None:
        text = "has an optimizer, and its state would not fit parameters of another layout"
        raise UsageError(text, file=file or None, hint=hint)
    names.instead.update(moments)
    names.note(own, {old: key for old, key in renamed.items() if old != key})
    names.follow(root, checkpoint.sections, lambda _: {})
    if moments:
        text = f"rearranged {counted(len(moments), 'tensor')} of the optimizer like the parameters"
        names.changes.append(Change("follow", text, len(moments)))
    names.changes[:0] = changes
    return names.applied(checkpoint)


def entries_of(
    recipe: Recipe, made: Plan[TensorRef], node: Mapping[Any, Any], own: Collection[str], file: str
) -> dict[Any, Any]:
    """Return the entries of a state dict: the tensors of the result, and values that stay.

    Args:
        recipe: What made the result.
        made: The result.
        node: The state dict before.
        own: The keys of its tensors.
        file: For messages.

    Raises:
        NameCollision: a tensor gets the key of a value.
    """
    drop = recipe.drop[0]
    rest = {
        key: one
        for key, one in node.items()
        if key not in own and not (isinstance(key, str) and any(p.covers(key) for p in drop))
    }
    if both := made.tensors.keys() & rest.keys():
        text = f"a tensor would get the key {listed(sorted(both))}, which a value already has"
        raise NameCollision(text, file=file or None)
    return {**made.tensors, **rest}


def _rearranged_moments(
    checkpoint: Checkpoint, recipe: Recipe, params: Mapping[str, int], made: Plan[TensorRef]
) -> dict[int, TensorRef] | None:
    """Return what takes the place of optimizers' tensors, by their identities.

    A tensor in the state of a parameter that changes, of the parameter's shape, goes through the
    same rules. None: the state is of no known parameter, has tensors of other shapes, or tensors
    became others not one to one.
    """
    changed = {
        old: key for old, key in made.renamed().items() if made.tensors[key] is not made.source[old]
    }
    if made.is_one_to_one and not changed:
        return {}
    left = {id(checkpoint.tensors[path]) for path in optimizer_tensors(checkpoint)}
    if not (left or any(one.kind == "optimizer" for one in checkpoint.sections)):
        return {}
    by_moment: dict[str, dict[str, TensorRef]] = {}
    for name, moment, tensor in find_moments(checkpoint.root, checkpoint.sections):
        is_known = isinstance(name, str)
        if is_known and (name not in changed or tensor.numel == 1):
            left.discard(id(tensor))
        elif is_known and tensor.sizes == made.source[name].sizes:
            left.discard(id(tensor))
            by_moment.setdefault(moment, {})[name] = tensor
    if left or not made.is_one_to_one:
        return None
    rules = tuple(tuple(replace(one, is_optional=True) for one in each) for each in recipe.passes)
    recipe = replace(recipe, passes=rules, drop=((), ()), tied=({}, {}), keeps_rest=True)
    found: dict[int, TensorRef] = {}
    for tensors in by_moment.values():
        new = plan(recipe, tensors, params, TensorMaker(checkpoint.path), checkpoint.path).tensors
        found |= {id(one): new[changed[name]] for name, one in tensors.items()}
    return found


def _others(checkpoint: Checkpoint, section: Section | None) -> Iterator[Change]:
    """Yield changes for what is not in the layout: optimizers, values, other state dicts."""
    for kind, noun in (("optimizer", "optimizer"), ("scheduler", "scheduler"), ("values", "value")):
        parts = [one for one in checkpoint.sections if one.kind == kind]
        if kind == "values":
            names = [name_of(path[:2]) for one in parts for path in one.node]
            names += [name for one in checkpoint.sections for name in _values_in(one)]
        else:
            names = [one.name for one in parts]
        if names:
            labels = [
                one.label for one in group_families((name, None) for name in dict.fromkeys(names))
            ]
            yield Change("left-out", f"{listed(labels, most=20)} ({noun})", len(names))
    if section is not None:
        parts = [one for one in checkpoint.sections if one.kind in MODEL_KINDS]
        for one in parts:
            if one.holder is not section.holder and one.path != section.path:
                text = f"the {one.kind} {printable(one.name)}"
                yield Change("left-out", f"{text} ({counted(len(one.tensors()), 'tensor')})", 1)


def _values_in(section: Section) -> list[str]:
    """Return the paths of what is no tensor in a state dict."""
    if section.kind not in MODEL_KINDS:
        return []
    items = section.node.items()
    return [name_of((*section.path, k)) for k, one in items if not isinstance(one, TensorRef)]


def _changes(
    checkpoint: Checkpoint, recipe: Recipe, made: Plan[TensorRef], found: Params
) -> Iterator[Change]:
    """Yield what the recipe did, for the receipt."""
    direction = " (reversed)" if recipe.is_reversed else ""
    known = [
        f"{name} {value}" + (f" from {found.origins[name]}" if found.origins.get(name) else "")
        for name, value in found.values.items()
    ]
    count, new = len(made.source), len(made.tensors)
    text = (
        f"{printable(recipe.name)}{direction}: rearranged {counted(count, 'tensor')} into {new:,}"
    )
    yield Change("recipe", text + (f" ({', '.join(known)})" if known else ""), count)
    for outcome, rules in zip(made.outcomes, recipe.passes, strict=True):
        for rule in rules:
            taken, _ = outcome.counts.get(rule.number, (0, 0))
            if taken and rule.renames and rule.left != rule.right:
                text = f"{rule.text}: renamed {counted(taken, 'tensor')}"
                yield Change("recipe", text, taken)
            for text, use, count in outcome.lines(rule):
                has_axes = use.equation >= 0
                how = rule.equations[use.equation].text if has_axes else "the same in all"
                yield Change("recipe", f"{text}, {how}", count)
    for key, of in made.untied.items() if not made.aliases else ():
        yield Change("recipe", f"left out {printable(key)}: it is tied to {printable(of)}", 1)
    if made.dropped:
        labels = [one.label for one in group_families((key, None) for key in made.dropped)]
        text = f"{listed(labels, most=20)} (dropped by the recipe)"
        yield Change("left-out", text, len(made.dropped), wanted=True)


def _way_back(recipe: Recipe, made: Plan[TensorRef], found: Params) -> Change:
    """Return the change that states whether the recipe leads back, planned over keys and shapes."""
    sketches = {
        key: Sketch(one.dtype, one.sizes, one.stride, one.place or id(one))
        for key, one in made.tensors.items()
    }
    params = {**found.values, **made.needed}
    why = None
    if made.disputed:
        why = f"no single number works for {listed(sorted(made.disputed))}"
    else:
        try:
            back = plan(recipe.reversed(), sketches, params, Sketches())
            why = next(differences(made, back), None)
        except CheckpointError as error:
            why = error.message
    if why is not None:
        return Change("reversible", f"not reversible: {why}")
    given = {**{name: found.values[name] for name in found.given}, **made.needed}
    option = "" if recipe.is_reversed else " with --reverse"
    words = "".join(f" --param {name}={value}" for name, value in given.items())
    text = f"reversible{option}{words}"
    if made.dropped:
        text += f", except for {counted(len(made.dropped), 'dropped tensor')}"
    if made.has_padding:
        text += ", if the padding is zeros"
    return Change("reversible", text, 1)


def looks_like(keys: Iterable[str]) -> str | None:
    """Return the shipped recipe of which all rules match keys, with nothing left over.

    `NAME`, or `NAME --reverse`; None if there is none, or there are several.
    """
    sample = _sampled(keys)
    fitting = (words for one, words in _directions() if set() in _left_over(one, sample))
    found = list(dict.fromkeys(fitting))
    return found[0] if len(found) == 1 else None


def leads_to(keys: Iterable[str], wanted: Iterable[str]) -> str | None:
    """Return the shipped recipe that makes the wanted keys of some keys.

    All of its rules match on both sides, and what they leave over is the same. `NAME`, or
    `NAME --reverse`; None if there is none, or there are several.
    """
    sample, goal = _sampled(keys), _sampled(wanted)
    found = []
    for one, words in _directions():
        left, right = _left_over(one, sample), _left_over(one.reversed(), goal)
        if any(rest == other and (one.keeps_rest or not rest) for rest in left for other in right):
            found.append(words)
    return found[0] if len(found) == 1 else None


def _directions() -> Iterator[tuple[Recipe, str]]:
    for one in all_shipped():
        yield one, one.name
        yield one.reversed(), f"{one.name} --reverse"


def _left_over(recipe: Recipe, keys: Sequence[str]) -> list[set[str]]:
    """Return what a recipe leaves over of keys, and of keys of the first of several files."""
    before = prefix_of(recipe)
    found = (left_over(recipe, [one + key for key in keys]) for one in dict.fromkeys(("", before)))
    return [one for one in found if one is not None]


def _sampled(keys: Iterable[str]) -> list[str]:
    """Return some keys of each kind: those that only differ in numbers are alike."""
    kinds: dict[str, list[str]] = {}
    for key in sorted(keys):
        alike = kinds.setdefault(re.sub(r"[0-9]+", "0", key), [])
        if len(alike) < _MOST_ALIKE:
            alike.append(key)
    return [key for alike in kinds.values() for key in alike]
