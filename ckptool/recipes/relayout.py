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
from ckptool.recipes.outcome import NO_EQUATION, Plan, Sketch, find_differences
from ckptool.recipes.params import Params
from ckptool.recipes.planning import Sketches, find_left_over, plan_recipe
from ckptool.recipes.recipe import Recipe, Sides, load_shipped
from ckptool.recipes.several import first_prefix, nest_entries
from ckptool.transforms.casting import find_optimizer_paths
from ckptool.transforms.dequantizing import refuse_dependent_tensors
from ckptool.transforms.metadata import move_metadata
from ckptool.transforms.names import NamePlan
from ckptool.words import counted, listed, printable, shell

_MAX_KEYS_PER_KIND = 16
"""The number of keys of one kind, which only differ in numbers, that a proposal looks at."""


@pause_gc()
def relayout(
    checkpoint: Checkpoint,
    recipe: Recipe,
    params: Mapping[str, int | str],
    *,
    configs: Sequence[Path] = (),
) -> Checkpoint:
    """Return a checkpoint in the layout that a recipe leads to, over the bytes of the source.

    Without paths in the recipe, the model's state dict changes in its place; otherwise the result
    has only the tensors of the recipe. The changes report the rearranged tensors, the parts left
    out, and if the recipe is reversible.

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
    parameters = Params(recipe.params, params, checkpoint, configs)
    section = None if recipe.uses_paths else find_model_state_dict(checkpoint)
    tensors = (
        _select_tensors(checkpoint, recipe) if section is None else get_named_tensors(section.node)
    )
    maker = TensorMaker(file)
    result = plan_recipe(recipe, tensors, parameters.values, maker, file)
    if maker.moved:
        refuse_dependent_tensors(checkpoint, maker.moved)
    changes = [*_report_changes(checkpoint, recipe, result, parameters), *maker.report_changes()]
    changes.append(_report_reversibility(recipe, result, parameters))
    if section is None or recipe.invert().uses_paths:
        others = _report_left_out(checkpoint, section)
        return checkpoint.with_root(nest_entries(result.tensors), *changes, *others)
    moments = _rearrange_moments(checkpoint, recipe, parameters.values, result)
    return _replace_section(checkpoint, recipe, section, result, moments, changes)


def _select_tensors(checkpoint: Checkpoint, recipe: Recipe) -> dict[str, TensorRef]:
    """Return the tensors by path: those of models, and others that a rule with a path matches.

    Tensors of optimizers are never included.
    """
    models = [section.path for section in checkpoint.sections if section.kind in MODEL_KINDS]
    optimizer_paths = find_optimizer_paths(checkpoint)
    rules = (rule for rules in recipe.passes for rule in rules)
    patterns = [*recipe.drop.source, *(pattern for rule in rules for pattern in rule.left)]
    path_patterns = [pattern for pattern in patterns if "/" in pattern.text]
    tensors: dict[str, TensorRef] = {}
    for path, tensor in checkpoint.tensors():
        name = name_of(path)
        is_in_model = any(is_within(path, model) for model in models)
        if path not in optimizer_paths and (
            is_in_model or any(pattern.covers(name) for pattern in path_patterns)
        ):
            if name in tensors:
                list(checkpoint.tensors)  # raises AmbiguousName: two tensors have one path
            tensors[name] = tensor
    return tensors


def _replace_section(
    checkpoint: Checkpoint,
    recipe: Recipe,
    section: Section,
    result: Plan[TensorRef],
    moments: Mapping[int, TensorRef] | None,
    changes: Sequence[Change],
) -> Checkpoint:
    """Return the checkpoint with the new entries in one state dict; the optimizer follows.

    `moments` maps identities of optimizer tensors to new ones; None: the optimizer cannot follow.
    `changes` are reported before those made here.

    Raises:
        UsageError: if the optimizer cannot follow, or the state dict is not a plain dict.
    """
    root, file = checkpoint.root, checkpoint.path
    holder = section.holder if section.path else root
    hint = f"take only the weights with ckptool convert {shell(file)} OUT --model-only"
    if not isinstance(holder, dict):
        raise UsageError("the weights are in a pickled module or object", file=file, hint=hint)
    tensors, dropped = get_named_tensors(section.node), set(result.dropped)
    new_holder = copy_with_items(holder, merge_entries(recipe, result, holder, tensors, file))
    renamed = result.map_first_keys()
    names = NamePlan(file, RULES_HINT)
    names.replacements[id(holder)] = new_holder
    if isinstance(new_holder, OrderedMap) and isinstance(new_holder.metadata, dict):
        new_keys = {old: key for old, key in renamed.items() if old not in dropped}
        new_holder.attributes = {
            **new_holder.attributes,
            "_metadata": move_metadata(new_holder.metadata, new_keys),
        }
    if moments is None:
        text = "has an optimizer, and its state would not fit parameters of another layout"
        raise UsageError(text, file=file or None, hint=hint)
    names.replacements.update(moments)
    names.note_renames(tensors, {old: key for old, key in renamed.items() if old != key})
    # An optimizer that shares no names with this state dict stays.
    names.plan_optimizers(root, checkpoint.sections, rename_alone=lambda _: {})
    if moments:
        text = f"rearranged {counted(len(moments), 'tensor')} of the optimizer like the parameters"
        names.changes.append(Change("follow", text, len(moments)))
    names.changes[:0] = changes
    return names.apply_to(checkpoint)


def merge_entries(
    recipe: Recipe,
    result: Plan[TensorRef],
    node: Mapping[Any, Any],
    tensor_keys: Collection[str],
    file: str,
) -> dict[Any, Any]:
    """Return the entries of the new state dict: the tensors of the result, and the old values.

    Values are the entries of `node` that are not tensors, without those that the recipe drops.

    Args:
        recipe: The recipe.
        result: The result of the recipe.
        node: The old state dict.
        tensor_keys: The keys of the old tensors.
        file: The path for messages.

    Raises:
        NameCollision: if a tensor gets the key of a value.
    """
    values = {
        key: entry
        for key, entry in node.items()
        if key not in tensor_keys
        and not (
            isinstance(key, str) and any(pattern.covers(key) for pattern in recipe.drop.source)
        )
    }
    if both := result.tensors.keys() & values.keys():
        text = f"a tensor would get the key {listed(sorted(both))}, which a value already has"
        raise NameCollision(text, file=file or None)
    return {**result.tensors, **values}


def _rearrange_moments(
    checkpoint: Checkpoint, recipe: Recipe, params: Mapping[str, int], result: Plan[TensorRef]
) -> dict[int, TensorRef] | None:
    """Return the new tensors of the optimizer by the identities of the old ones.

    A tensor in the state of a changed parameter, with the parameter's shape, goes through the same
    rules, all of which are optional. Scalars, and the state of unchanged parameters, stay. Returns
    None if the optimizer cannot follow: a parameter is unknown, its state has another shape, or a
    tensor was split or joined.
    """
    changed = {
        old: key
        for old, key in result.map_first_keys().items()
        if result.tensors[key] is not result.source[old]
    }
    if result.is_one_to_one and not changed:
        return {}
    # Tensors of the optimizer that are not known to follow.
    remaining = {id(checkpoint.tensors[path]) for path in find_optimizer_paths(checkpoint)}
    if not (remaining or any(section.kind == "optimizer" for section in checkpoint.sections)):
        return {}
    parameters_by_moment: dict[str, dict[str, TensorRef]] = {}  # `exp_avg`: tensor by parameter
    for name, moment, tensor in find_moments(checkpoint.root, checkpoint.sections):
        is_known = isinstance(name, str)
        if is_known and (name not in changed or tensor.numel == 1):
            remaining.discard(id(tensor))
        elif is_known and tensor.sizes == result.source[name].sizes:
            remaining.discard(id(tensor))
            parameters_by_moment.setdefault(moment, {})[name] = tensor
    if remaining or not result.is_one_to_one:
        return None
    # A moment exists for some of the parameters, so most rules match nothing.
    passes = tuple(
        tuple(replace(rule, is_optional=True) for rule in rules) for rules in recipe.passes
    )
    recipe = replace(recipe, passes=passes, drop=Sides((), ()), tied=Sides({}, {}), keeps_rest=True)
    replacements: dict[int, TensorRef] = {}
    for tensors in parameters_by_moment.values():
        rearranged = plan_recipe(
            recipe, tensors, params, TensorMaker(checkpoint.path), checkpoint.path
        ).tensors
        replacements |= {id(tensor): rearranged[changed[name]] for name, tensor in tensors.items()}
    return replacements


def _report_left_out(checkpoint: Checkpoint, section: Section | None) -> Iterator[Change]:
    """Yield changes for the entries outside the layout: optimizers, values, other state dicts.

    `section` is the converted state dict; None if the recipe has selected tensors by path.
    """
    sections = checkpoint.sections
    for kind, noun in (("optimizer", "optimizer"), ("scheduler", "scheduler"), ("values", "value")):
        names = [other.name for other in sections if other.kind == kind]
        if kind == "values":
            # A section of values has all values outside other sections, by full path. Only the
            # first two components are listed, so that a large container is listed as one.
            value_paths = (path for other in sections if other.kind == kind for path in other.node)
            names = [name_of(path[:2]) for path in value_paths]
            # And the values between the tensors of state dicts.
            names += [name for other in sections for name in _list_values(other)]
        if names:
            families = group_families((name, None) for name in dict.fromkeys(names))
            labels = [family.label for family in families]
            yield Change("left-out", f"{listed(labels, most=20)} ({noun})", len(names))
    if section is None:
        return
    for other in sections:
        is_converted = other.holder is section.holder or other.path == section.path
        if other.kind in MODEL_KINDS and not is_converted:
            text = f"the {other.kind} {printable(other.name)}"
            yield Change("left-out", f"{text} ({counted(len(other.tensors()), 'tensor')})", 1)


def _list_values(section: Section) -> list[str]:
    """Return the paths of the entries of a state dict that are not tensors."""
    if section.kind not in MODEL_KINDS:
        return []
    items = section.node.items()
    return [
        name_of((*section.path, key)) for key, value in items if not isinstance(value, TensorRef)
    ]


def _report_changes(
    checkpoint: Checkpoint, recipe: Recipe, result: Plan[TensorRef], parameters: Params
) -> Iterator[Change]:
    """Yield the changes for the receipt: the result, the work of each rule, dropped tensors."""
    direction = " (reversed)" if recipe.is_reversed else ""
    parameter_texts = [  # `heads 32 from config.json`
        f"{name} {value}"
        + (f" from {parameters.origins[name]}" if parameters.origins.get(name) else "")
        for name, value in parameters.values.items()
    ]
    count, n_results = len(result.source), len(result.tensors)
    tensors = counted(count, "tensor")
    text = f"{printable(recipe.name)}{direction}: rearranged {tensors} into {n_results:,}"
    yield Change(
        "recipe", text + (f" ({', '.join(parameter_texts)})" if parameter_texts else ""), count
    )
    for outcome, rules in zip(result.outcomes, recipe.passes, strict=True):
        for rule in rules:
            taken, _created = outcome.counts.get(rule.number, (0, 0))
            if taken and rule.renames and rule.left != rule.right:
                text = f"{rule.text}: renamed {counted(taken, 'tensor')}"
                yield Change("recipe", text, taken)
            for text, use, n_tensors in outcome.describe(rule):
                has_equation = use.equation != NO_EQUATION
                how = rule.equations[use.equation].text if has_equation else "the same in all"
                yield Change("recipe", f"{text}, {how}", n_tensors)
    # A tied key that the file lacks was added first (`aliases`): leaving it out again is no news.
    reported_untied = {} if result.aliases else result.untied
    for key, tied_key in reported_untied.items():
        yield Change("recipe", f"left out {printable(key)}: it is tied to {printable(tied_key)}", 1)
    if result.dropped:
        labels = [family.label for family in group_families((key, None) for key in result.dropped)]
        text = f"{listed(labels, most=20)} (dropped by the recipe)"
        # Wanted by the recipe, so it is no loss.
        yield Change("left-out", text, len(result.dropped), wanted=True)


def _report_reversibility(recipe: Recipe, result: Plan[TensorRef], parameters: Params) -> Change:
    """Return the change that states if the inverse recipe restores the source.

    The inverse is planned over keys and shapes only, with the parameters of the recipe and those
    that only the inverse needs, which the change lists as options.
    """
    sketches = {
        key: Sketch(tensor.dtype, tensor.sizes, tensor.stride, tensor.place or id(tensor))
        for key, tensor in result.tensors.items()
    }
    params = {**parameters.values, **result.needed}
    reason = None
    if result.disputed:
        reason = f"no single number works for {listed(sorted(result.disputed))}"
    else:
        try:
            back = plan_recipe(recipe.invert(), sketches, params, Sketches())
            reason = next(find_differences(result, back), None)
        except CheckpointError as error:
            reason = error.message
    if reason is not None:
        return Change("reversible", f"not reversible: {reason}")
    needed_params = {name: parameters.values[name] for name in parameters.given} | result.needed
    option = "" if recipe.is_reversed else " with --reverse"
    options = "".join(f" --param {name}={value}" for name, value in needed_params.items())
    text = f"reversible{option}{options}"
    if result.dropped:
        text += f", except for {counted(len(result.dropped), 'dropped tensor')}"
    if result.has_padding:
        text += ", if the padding is zeros"
    return Change("reversible", text, 1)


def guess_layout(keys: Iterable[str]) -> str | None:
    """Return the only shipped recipe whose rules match all of the keys, with nothing left over.

    The result is `NAME` or `NAME --reverse`; None if there is none, or several.
    """
    sampled_keys = _sample_keys(keys)
    matches = [
        arguments
        for recipe, arguments in _iterate_directions()
        if any(not left_over for left_over in _find_left_over(recipe, sampled_keys))
    ]
    return matches[0] if len(matches) == 1 else None


def find_recipe(keys: Iterable[str], wanted: Iterable[str]) -> str | None:
    """Return the only shipped recipe that turns the keys into the wanted keys.

    All of its rules match on both sides, and the same keys are left over. `NAME`, or
    `NAME --reverse`; None if there is none, or several.
    """
    source_keys, target_keys = _sample_keys(keys), _sample_keys(wanted)
    matches = []
    for recipe, arguments in _iterate_directions():
        left_in_source = _find_left_over(recipe, source_keys)
        left_in_target = _find_left_over(recipe.invert(), target_keys)
        if any(
            keys_left in left_in_target and (recipe.keeps_rest or not keys_left)
            for keys_left in left_in_source
        ):
            matches.append(arguments)
    return matches[0] if len(matches) == 1 else None


def _iterate_directions() -> Iterator[tuple[Recipe, str]]:
    """Yield each shipped recipe in both directions, with its arguments."""
    for recipe in load_shipped():
        yield recipe, recipe.name
        yield recipe.invert(), f"{recipe.name} --reverse"


def _find_left_over(recipe: Recipe, keys: Sequence[str]) -> list[set[str]]:
    """Return the keys that a recipe leaves over, for each way to read the keys.

    They may be all keys, or those of the first of several files, which the recipe knows with a
    prefix. A way in which a rule matches nothing is left out.
    """
    left_over = (
        find_left_over(recipe, [prefix + key for key in keys])
        for prefix in dict.fromkeys(("", first_prefix(recipe)))  # once if both are ""
    )
    return [keys_left for keys_left in left_over if keys_left is not None]


def _sample_keys(keys: Iterable[str]) -> list[str]:
    """Return a few keys of each kind: keys of a kind only differ in numbers."""
    kinds: dict[str, list[str]] = {}
    for key in sorted(keys):
        alike = kinds.setdefault(re.sub(r"[0-9]+", "0", key), [])
        if len(alike) < _MAX_KEYS_PER_KIND:
            alike.append(key)
    return [key for alike in kinds.values() for key in alike]
