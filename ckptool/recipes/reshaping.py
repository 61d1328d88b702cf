"""Steps of one rule: tensors split and fused, other shapes, and ranks of Megatron joined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

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
from ckptool.recipes.planning import plan
from ckptool.recipes.recipe import Recipe, RecipeRule
from ckptool.recipes.relayout import entries_of
from ckptool.tensors.bytewise import has_same_elements
from ckptool.transforms.casting import optimizer_tensors, refuse_apart, tensors_placed
from ckptool.transforms.names import distinct, with_items
from ckptool.transforms.resizing import SectionRule, SectionWork, interpolating, resizing
from ckptool.transforms.step import Step, listed_option
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
            object.__setattr__(self, name, listed_option(name, getattr(self, name)))
        self._steps()

    def _steps(self) -> list[tuple[str, SectionRule]]:
        kinds: tuple[tuple[Iterable[str], Callable[[str], SectionRule]], ...] = (
            (self.resize, resizing),
            (self.interpolate_pos, interpolating),
            (self.split, _splitting),
            (self.fuse, _fusing),
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
        for rule, step in self._steps():
            checkpoint = _after(checkpoint, rule, step)
        return checkpoint


def _after(checkpoint: Checkpoint, rule: str, step: SectionRule) -> Checkpoint:
    file, works = checkpoint.path, dict[int, SectionWork]()
    for part in distinct(checkpoint.sections):
        if part.kind in MODEL_KINDS and (work := step(part, file)).used:
            works[id(part.holder)] = work
    if not works:
        raise UsageError(f"no tensor of the model matches {printable(rule)!r}", file=file or None)
    if optimizer_tensors(checkpoint) or any(one.kind == "optimizer" for one in checkpoint.sections):
        text = "has an optimizer, and its state would not fit parameters of another shape"
        hint = f"take only the weights with ckptool convert {shell(file)} OUT --model-only"
        raise UsageError(text, file=file, hint=hint)
    refuse_apart(checkpoint, set().union(*(work.used for work in works.values())))
    changes = (one for work in works.values() for one in work.changes)
    return with_items(checkpoint, {at: work.items for at, work in works.items()}, *changes)


def _splitting(text: str) -> SectionRule:
    example = "*.qkv.weight=>*.q.weight,*.k.weight,*.v.weight@0"
    (whole,), parts, dim = _parsed("split", example, text)
    return _by_rule("split", _rule_of(whole, parts, dim, are_equal=True).reversed(), dim)


def _fusing(text: str) -> SectionRule:
    example = "*.q.weight,*.k.weight,*.v.weight=>*.qkv.weight@0"
    parts, (whole,), dim = _parsed("fuse", example, text)
    return _by_rule("fuse", _rule_of(whole, parts, dim), dim)


def _parsed(option: str, example: str, rule: str) -> tuple[list[Pattern], list[Pattern], int]:
    """Return the patterns on both sides of a rule, one of them alone on its side."""
    names, _, dim = rule.rpartition("@")
    left, right = ([*map(str.strip, one.split(","))] for one in names.partition("=>")[::2])
    every = [*left, *right]
    sides = (left, right) if option == "split" else (right, left)
    is_dim = dim.isascii() and dim.isdigit() and len(dim) < 3
    fits = all(every) and len({one.count("*") for one in every}) == 1
    if not is_dim or not fits or len(sides[0]) != 1 or len(sides[1]) < 2:
        text = f"{printable(rule)!r} does not name one whole tensor and its parts"
        raise UsageError(
            text, hint=f"use --{option} '{example}', with equally many * on both sides"
        )
    if len(set(sides[1])) < len(sides[1]):
        raise UsageError(f"{printable(rule)!r} has a part twice")
    return [*map(_pattern, left)], [*map(_pattern, right)], int(dim)


def _rule_of(
    whole: Pattern, parts: Sequence[Pattern], dim: int, *, are_equal: bool = False
) -> RecipeRule:
    """Return the rule that joins parts along a dimension: `p0 ..., p1 ... -> (p0 + p1) ...`."""
    front = tuple(f"d{at}" for at in range(dim))
    sizes = tuple("part" if are_equal else f"p{at}" for at in range(len(parts)))
    left = tuple((*front, size, "...") for size in sizes)
    right = (*front, f"({' + '.join(sizes)})", "...")
    text = f"{', '.join(map(' '.join, left))} -> {' '.join(right)}"
    equation = Equation(left, ((*front, Sum(sizes), "..."),), text)
    return RecipeRule(tuple(parts), (whole,), (equation,), True, 0)


def _pattern(text: str) -> Pattern:
    """Return the pattern of a key in which each `*` is a variable."""
    literals = text.split("*")
    variables = (Variable(f"x{at}", "text") for at in range(len(literals) - 1))
    return Pattern(text, tuple(literals), tuple(variables))


def _by_rule(kind: str, rule: RecipeRule, dim: int) -> SectionRule:
    recipe = Recipe(kind, "", ((rule,),), {}, keeps_rest=True)

    def step(part: Section, file: str) -> SectionWork:
        tensors, maker = get_named_tensors(part.node), TensorMaker(file)
        if not any(pattern.covers(name) for name in tensors for pattern in rule.left):
            return SectionWork([], set(), [])
        made = plan(recipe, tensors, {}, maker, file)
        lines = made.outcomes[0].lines(rule)
        changes = [
            Change(kind, f"{text}, along dimension {dim}", count) for text, _, count in lines
        ]
        entries = entries_of(recipe, made, part.node, tensors, file)
        return SectionWork([*entries.items()], maker.moved, [*changes, *maker.changes()])

    return step


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
        """Check the rules.

        Raises:
            UsageError: one is not a glob with a dimension.
        """
        object.__setattr__(self, "rules", listed_option("concat", self.rules))
        for rule in self.rules:
            _place(rule)

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with the ranks joined.

        Raises:
            UsageError: a rule matches nothing; there are no ranks; or these differ in their keys,
                in a tensor that no rule names, or in another dimension.
        """
        file, places = checkpoint.path, [_place(rule) for rule in self.rules]
        ranks = checkpoint.root if isinstance(checkpoint.root, dict) else {}
        if not ranks or not all(map(is_rank_folder, ranks)):
            hint = "give the folder of one iteration, which has a folder mp_rank_00"
            raise UsageError("has no Megatron ranks to concatenate", file=file, hint=hint)
        trees = [root if isinstance(root, dict) else {} for root in ranks.values()]
        models = [
            dict(checkpoint.with_root({"model": one.get("model")}).tensors()) for one in trees
        ]
        apart = {name_of(path) for one in models for path in one.keys() ^ models[0].keys()}
        if apart:
            raise UsageError(
                f"has tensors that only some ranks have: {few(sorted(apart))}", file=file
            )
        index, dims = NameIndex(models[0].items(), file), dict[int, int]()
        for glob, dim in places:
            if not (found := index.select(glob, endings=False)):
                raise UsageError(f"no tensor of the model matches {printable(glob)!r}", file=file)
            for at in found:
                dims.setdefault(at, dim)
        fused, whole, differing = dict[tuple[int, ...], TensorRef](), dict[Path, TensorRef](), []
        for at, (path, first) in enumerate(models[0].items()):
            every = [one[path] for one in models]
            if at in dims:
                key = (dims[at], *map(id, every))  # ties stay
                if key not in fused:
                    fused[key] = _joined(
                        name_of(path), dict(zip(ranks, every, strict=True)), dims[at], file
                    )
                whole[path] = fused[key]
            elif not all(_same(first, one) for one in every[1:]):
                differing.append(name_of(path))
        if differing:
            what = f"but no rule joins them: {_kinds(differing)}"
            hint = (
                "add --concat 'GLOB=DIM' for each kind, with the dimension along which "
                "Megatron split it"
            )
            text = f"its ranks differ in {counted(len(differing), 'tensor')}, {what}"
            raise UsageError(text, file=file, hint=hint)
        lost = [key for key, one in trees[0].items() if key != "model" and any(find_tensors([one]))]
        root = copy_with_items(
            trees[0], ((key, one) for key, one in trees[0].items() if key not in lost)
        )
        text = f"joined {counted(len(whole), 'tensor')} from {counted(len(ranks), 'rank')}"
        changes = [Change("concat", text, len(whole))]
        if once := [name_of(path) for path in models[0] if path not in whole]:
            text = f"kept one copy of tensors that are equal in all ranks: {_kinds(once)}"
            changes.append(Change("keep", text, len(once)))
        if lost:
            text = f"entries of single ranks ({listed(map(printable, map(str, lost)))})"
            changes.append(Change("left-out", text, len(lost)))
        return checkpoint.with_root(tensors_placed(root, whole), *changes)


def refuse_mixed(checkpoint: Checkpoint, concat: Concat, reshape: Reshape) -> None:
    """Refuse to split what was joined from ranks along the same dimension.

    Each rank has a share of every part: of gate and up, of q, k and v. Joined, and cut into equal
    parts, these would be mixed.

    Raises:
        UsageError: naming one such tensor.
    """
    index, dims = NameIndex(checkpoint.tensors(), checkpoint.path), dict[int, int]()
    for rule in concat.rules:
        glob, dim = _place(rule)
        for at in index.select(glob, endings=False):
            dims.setdefault(at, dim)  # the first rule that matches decides
    example = "*.qkv.weight=>*.q.weight,*.k.weight,*.v.weight@0"
    splits = [_parsed("split", example, rule) for rule in reshape.split]
    for at, dim in dims.items():
        name = str(index.nodes[at][0][-1])
        for (whole,), _, along in splits:
            if dim == along and whole.covers(name):
                raise UsageError(
                    f"each rank has a share of every part of {printable(name)!r}, so splitting it "
                    "after joining would mix the parts",
                    file=checkpoint.path or None,
                    hint="split it rank by rank with --recipe llama-megatron-to-hf; list others "
                    "with ckptool recipes",
                )


def _kinds(names: Iterable[str]) -> str:
    return listed((one.label for one in group_families((name, None) for name in names)), most=40)


def _place(rule: str) -> tuple[str, int]:
    glob, _, dim = rule.rpartition("=")
    if not glob or not (dim.isascii() and dim.isdigit() and len(dim) < 3):
        hint = "use --concat '*.linear_qkv.weight=0', for example"
        raise UsageError(f"{printable(rule)!r} is not a glob with a dimension", hint=hint)
    return glob, int(dim)


def _same(one: TensorRef, other: TensorRef) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and has_same_elements(one, other)


def _joined(name: str, every: Mapping[str, TensorRef], dim: int, file: str) -> TensorRef:
    """Return the tensors of one name, by rank, joined along a dimension.

    Raises:
        UsageError: they differ in their types or in another dimension.
    """
    tensors = {f"{rank}/{name}": one for rank, one in every.items()}
    whole, *parts = (Pattern(key, (key,), ()) for key in (name, *tensors))
    recipe = Recipe("concat", "", ((_rule_of(whole, parts, dim),),), {})
    return plan(recipe, tensors, {}, TensorMaker(file), file).tensors[name]
