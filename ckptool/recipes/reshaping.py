"""Steps of one rule: tensors split and fused, other shapes, and ranks of Megatron joined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ckptool.core.addressing import NameIndex
from ckptool.core.checkpoint import Change, Checkpoint
from ckptool.core.model import Path, TensorRef, copy_with_items, find_tensors
from ckptool.core.names import group_families
from ckptool.core.sections import MODEL_KINDS, Section, get_named_tensors
from ckptool.core.tree import name_of
from ckptool.errors import UsageError
from ckptool.formats.distributed.megatron import is_rank_folder
from ckptool.recipes.assembling import TensorMaker
from ckptool.recipes.axes import Equation, Sum
from ckptool.recipes.names import Pattern, Variable
from ckptool.recipes.planning import plan_recipe
from ckptool.recipes.recipe import Recipe, RecipeRule
from ckptool.recipes.relayout import merge_entries
from ckptool.tensors.bytewise import has_same_elements
from ckptool.transforms.casting import find_optimizer_paths, replace_tensors
from ckptool.transforms.dequantizing import refuse_dependent_tensors
from ckptool.transforms.names import list_distinct_sections, replace_entries
from ckptool.transforms.resizing import SectionRule, SectionWork, parse_interpolation, parse_resize
from ckptool.transforms.step import Step, check_list_option
from ckptool.words import counted, few, listed, printable, shell


@dataclass(frozen=True)
class Reshape(Step):
    """Give tensors of the model other shapes, rule by rule in the order of the fields.

    A tensor that is tied to one that is resized changes with it.
    """

    on_files: ClassVar[str] = "its results are computed when the file is written"

    resize: Iterable[str] = ()
    """`GLOB=ROWS` each: rows are cut, or added as the mean of the others, or, with
    `GLOB=ROWS:zero`, zero."""
    interpolate_pos: Iterable[str] = ()
    """`GLOB=HxW` each: position embeddings of a ViT for another grid of patches, as timm makes
    them."""
    split: Iterable[str] = ()
    """`*.qkv=>*.q,*.k,*.v@DIM` each: equal parts along a dimension."""
    fuse: Iterable[str] = ()
    """`*.q,*.k,*.v=>*.qkv@DIM` each: the parts joined."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            UsageError: a rule is none, or a text is in place of a list of rules.
        """
        for name in ("resize", "interpolate_pos", "split", "fuse"):
            object.__setattr__(self, name, check_list_option(name, getattr(self, name)))
        self._make_steps()  # which parses every rule

    def _make_steps(self) -> list[tuple[str, SectionRule]]:
        """Return each rule of the fields with its function, in their order."""
        kinds: tuple[tuple[Iterable[str], Callable[[str], SectionRule]], ...] = (
            (self.resize, parse_resize),
            (self.interpolate_pos, parse_interpolation),
            (self.split, _parse_split),
            (self.fuse, _parse_fuse),
        )
        return [(rule, kind(rule)) for rules, kind in kinds for rule in rules]

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with other shapes.

        Raises:
            UsageError: a rule matches nothing, or does not fit a tensor; the tensors are in a
                pickled module; there is the state of an optimizer, which would no longer fit.
            NameCollision: a key is there already.
            NotRepresentable: a tensor is quantized, or has no elements that can be computed with.
        """
        for rule, step in self._make_steps():
            checkpoint = _apply_rule(checkpoint, rule, step)
        return checkpoint


def _apply_rule(checkpoint: Checkpoint, rule: str, step: SectionRule) -> Checkpoint:
    """Return the checkpoint after one rule, which `step` applies to each state dict.

    Raises:
        UsageError: if the rule matches no tensor, or the file has the state of an optimizer.
    """
    file, works = checkpoint.path, dict[int, SectionWork]()  # by `id` of the state dict
    for section in list_distinct_sections(checkpoint.sections):
        if section.kind in MODEL_KINDS and (work := step(section, file)).used:
            works[id(section.holder)] = work
    if not works:
        raise UsageError(f"no tensor of the model matches {printable(rule)!r}", file=file or None)
    if find_optimizer_paths(checkpoint) or any(
        section.kind == "optimizer" for section in checkpoint.sections
    ):
        text = "has an optimizer, and its state would not fit parameters of another shape"
        hint = f"take only the weights with ckptool convert {shell(file)} OUT --model-only"
        raise UsageError(text, file=file, hint=hint)
    refuse_dependent_tensors(checkpoint, set().union(*(work.used for work in works.values())))
    changes = (change for work in works.values() for change in work.changes)
    return replace_entries(
        checkpoint, {node_id: work.items for node_id, work in works.items()}, *changes
    )


def _parse_split(text: str) -> SectionRule:
    """Return the function of a rule of `--split`: the inverse of joining equal parts."""
    example = "*.qkv.weight=>*.q.weight,*.k.weight,*.v.weight@0"
    (whole,), parts, dim = _parse_sides("split", example, text)
    join_rule = _make_join_rule(whole, parts, dim, are_equal=True)
    return _make_section_rule("split", join_rule.invert(), dim)


def _parse_fuse(text: str) -> SectionRule:
    """Return the function of a rule of `--fuse`."""
    example = "*.q.weight,*.k.weight,*.v.weight=>*.qkv.weight@0"
    parts, (whole,), dim = _parse_sides("fuse", example, text)
    return _make_section_rule("fuse", _make_join_rule(whole, parts, dim), dim)


def _parse_sides(option: str, example: str, rule: str) -> tuple[list[Pattern], list[Pattern], int]:
    """Parse `LEFT=>RIGHT@DIM`, lists of keys with commas, and return left, right and dimension.

    One key is the whole tensor: on the left for `option` "split", on the right for "fuse". All keys
    have equally many `*`, which match the same texts.
    """
    names, _, dim = rule.rpartition("@")
    left_text, _, right_text = names.partition("=>")
    left, right = ([*map(str.strip, text.split(","))] for text in (left_text, right_text))
    keys = [*left, *right]
    whole, parts = (left, right) if option == "split" else (right, left)
    has_dim = dim.isascii() and dim.isdigit() and len(dim) < 3
    has_equal_stars = all(keys) and len({text.count("*") for text in keys}) == 1
    if not has_dim or not has_equal_stars or len(whole) != 1 or len(parts) < 2:
        text = f"{printable(rule)!r} does not name one whole tensor and its parts"
        raise UsageError(
            text, hint=f"use --{option} '{example}', with equally many * on both sides"
        )
    if len(set(parts)) < len(parts):
        raise UsageError(f"{printable(rule)!r} has a part twice")
    return [*map(_glob_pattern, left)], [*map(_glob_pattern, right)], int(dim)


def _make_join_rule(
    whole: Pattern, parts: Sequence[Pattern], dim: int, *, are_equal: bool = False
) -> RecipeRule:
    """Return the rule that joins parts along a dimension: `p0 ..., p1 ... -> (p0 + p1) ...`.

    With `are_equal`, all parts have one size: its inverse splits a tensor into equal parts.
    """
    front = tuple(f"d{index}" for index in range(dim))
    sizes = tuple("part" if are_equal else f"p{index}" for index in range(len(parts)))
    left = tuple((*front, size, "...") for size in sizes)
    right = (*front, f"({' + '.join(sizes)})", "...")
    text = f"{', '.join(map(' '.join, left))} -> {' '.join(right)}"
    equation = Equation(left, ((*front, Sum(sizes), "..."),), text)
    return RecipeRule(tuple(parts), (whole,), (equation,), is_optional=True, number=0)


def _glob_pattern(text: str) -> Pattern:
    """Return the pattern of a key in which each `*` is a variable."""
    literals = text.split("*")
    variables = (Variable(f"x{index}", "text") for index in range(len(literals) - 1))
    return Pattern(text, tuple(literals), tuple(variables))


def _make_section_rule(kind: str, rule: RecipeRule, dim: int) -> SectionRule:
    """Return the function that applies `rule`, which splits or joins along `dim`, to a section.

    `kind` is that of the changes that it reports.
    """
    recipe = Recipe(kind, "", ((rule,),), {}, keeps_rest=True)

    def apply(section: Section, file: str) -> SectionWork:
        """Apply the rule to a section, and return its new entries; none if no key matches."""
        tensors, maker = get_named_tensors(section.node), TensorMaker(file)
        if not any(pattern.covers(name) for name in tensors for pattern in rule.left):
            return SectionWork([], set(), [])
        result = plan_recipe(recipe, tensors, params={}, maker=maker, file=file)
        lines = result.outcomes[0].describe(rule)  # the recipe has one rule
        changes = [
            Change(kind, f"{text}, along dimension {dim}", count) for text, _, count in lines
        ]
        entries = merge_entries(recipe, result, section.node, tensors, file)
        return SectionWork([*entries.items()], maker.moved, [*changes, *maker.report_changes()])

    return apply


@dataclass(frozen=True)
class Concat(Step):
    """Take the tree of the first rank of Megatron, with the tensors joined from all ranks.

    Other tensors of the ranks (optimizer, random generators) are left out.
    """

    on_files: ClassVar[str] = "the ranks are in the folder of a Megatron iteration"

    options: ClassVar[Mapping[str, str]] = {"rules": "concat"}

    rules: Iterable[str]
    """`GLOB=DIM` each: the dimension along which the ranks split tensors; the first decides."""

    def __post_init__(self) -> None:
        """Parse the rules.

        Raises:
            UsageError: if one is not a glob with a dimension.
        """
        object.__setattr__(self, "rules", check_list_option("concat", self.rules))
        for rule in self.rules:
            _parse_concat(rule)

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with the ranks joined.

        Raises:
            UsageError: a rule matches nothing; there are no ranks; or these differ in their keys,
                in a tensor that no rule names, or in another dimension.
        """
        file = checkpoint.path
        ranks = checkpoint.root if isinstance(checkpoint.root, dict) else {}
        if not ranks or not all(map(is_rank_folder, ranks)):
            hint = "give the folder of one iteration, which has a folder mp_rank_00"
            raise UsageError("has no Megatron ranks to concatenate", file=file, hint=hint)
        trees = [root if isinstance(root, dict) else {} for root in ranks.values()]
        models = [
            dict(checkpoint.with_root({"model": tree.get("model")}).tensors()) for tree in trees
        ]
        first_tree, first_model = trees[0], models[0]
        differing_paths = {
            name_of(path) for model in models for path in model.keys() ^ first_model.keys()
        }
        if differing_paths:
            raise UsageError(
                f"has tensors that only some ranks have: {few(sorted(differing_paths))}", file=file
            )
        joined = self._join_models(dict(zip(ranks, models, strict=True)), file)
        left_out = [
            key for key, node in first_tree.items() if key != "model" and any(find_tensors([node]))
        ]
        root = copy_with_items(
            first_tree, ((key, node) for key, node in first_tree.items() if key not in left_out)
        )
        text = f"joined {counted(len(joined), 'tensor')} from {counted(len(ranks), 'rank')}"
        changes = [Change("concat", text, len(joined))]
        if shared := [name_of(path) for path in first_model if path not in joined]:
            text = f"kept one copy of tensors that are equal in all ranks: {_list_families(shared)}"
            changes.append(Change("keep", text, len(shared)))
        if left_out:
            text = f"entries of single ranks ({listed(map(printable, map(str, left_out)))})"
            changes.append(Change("left-out", text, len(left_out)))
        return checkpoint.with_root(replace_tensors(root, joined), *changes)

    def _join_models(
        self, model_by_rank: Mapping[Any, Mapping[Path, TensorRef]], file: str
    ) -> dict[Path, TensorRef]:
        """Return the tensors that match a rule, by path, each joined from all ranks.

        Raises:
            UsageError: if a rule matches nothing, or a tensor differs that no rule matches.
        """
        first_model = next(iter(model_by_rank.values()))
        index = NameIndex(first_model.items(), file)
        dims: dict[int, int] = {}  # by position of the tensor in the model
        for glob, dim in map(_parse_concat, self.rules):
            if not (matches := index.select(glob, endings=False)):
                raise UsageError(f"no tensor of the model matches {printable(glob)!r}", file=file)
            for position in matches:
                dims.setdefault(position, dim)  # the first rule that matches decides
        joined, differing = dict[Path, TensorRef](), list[str]()
        joined_by_shards = dict[tuple[int, ...], TensorRef]()
        for position, path in enumerate(first_model):
            shards = {rank: model[path] for rank, model in model_by_rank.items()}
            first, *others = shards.values()
            if position in dims:
                key = (dims[position], *map(id, shards.values()))  # Tied tensors stay tied.
                if key not in joined_by_shards:
                    joined_tensor = _join_ranks(name_of(path), shards, dims[position], file)
                    joined_by_shards[key] = joined_tensor
                joined[path] = joined_by_shards[key]
            elif not all(_is_same(first, other) for other in others):
                differing.append(name_of(path))
        if differing:
            text = (
                f"its ranks differ in {counted(len(differing), 'tensor')}, but no rule joins them"
            )
            hint = (
                "add --concat 'GLOB=DIM' for each kind, with the dimension along which "
                "Megatron split it"
            )
            raise UsageError(f"{text}: {_list_families(differing)}", file=file, hint=hint)
        return joined


def refuse_mixed(checkpoint: Checkpoint, concat: Concat, reshape: Reshape) -> None:
    """Refuse to split tensors along the dimension along which the ranks were joined.

    Each rank has a share of every part: of gate and up, of q, k and v. Joined, and cut into equal
    parts, these would be mixed.

    Raises:
        UsageError: naming one such tensor.
    """
    index = NameIndex(checkpoint.tensors(), checkpoint.path)
    dims: dict[int, int] = {}  # by position of the tensor in the checkpoint
    for rule in concat.rules:
        glob, dim = _parse_concat(rule)
        for position in index.select(glob, endings=False):
            dims.setdefault(position, dim)  # the first rule that matches decides
    example = "*.qkv.weight=>*.q.weight,*.k.weight,*.v.weight@0"
    splits = [_parse_sides("split", example, rule) for rule in reshape.split]
    for position, dim in dims.items():
        path, _tensor = index.nodes[position]
        name = str(path[-1])
        for (whole,), _, split_dim in splits:
            if dim == split_dim and whole.covers(name):
                raise UsageError(
                    f"each rank has a share of every part of {printable(name)!r}, so splitting it "
                    "after joining would mix the parts",
                    file=checkpoint.path or None,
                    hint="split it rank by rank with --recipe llama-megatron-to-hf; list others "
                    "with ckptool recipes",
                )


def _list_families(names: Iterable[str]) -> str:
    """Return the names as a list with folded layers."""
    entries = ((name, None) for name in names)  # None: no facts that could keep names apart
    return listed((family.label for family in group_families(entries)), most=40)


def _parse_concat(rule: str) -> tuple[str, int]:
    """Return the glob and the dimension of a rule `GLOB=DIM`."""
    glob, _, dim = rule.rpartition("=")
    if not glob or not (dim.isascii() and dim.isdigit() and len(dim) < 3):
        hint = "use --concat '*.linear_qkv.weight=0', for example"
        raise UsageError(f"{printable(rule)!r} is not a glob with a dimension", hint=hint)
    return glob, int(dim)


def _is_same(one: TensorRef, other: TensorRef) -> bool:
    """Return True if two tensors have the same dtype, shape and elements."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and has_same_elements(one, other)


def _join_ranks(name: str, by_rank: Mapping[str, TensorRef], dim: int, file: str) -> TensorRef:
    """Return one tensor, joined from those of the ranks along a dimension.

    Raises:
        UsageError: if they differ in dtype or in another dimension.
    """
    tensors = {f"{rank}/{name}": tensor for rank, tensor in by_rank.items()}
    whole, *parts = (Pattern(key, (key,), variables=()) for key in (name, *tensors))
    rules = (_make_join_rule(whole, parts, dim),)
    recipe = Recipe("concat", about="", passes=(rules,), params={})
    return plan_recipe(recipe, tensors, {}, TensorMaker(file), file).tensors[name]
