"""The plan of a conversion by a recipe: its passes, groups of tensors, and differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ckptool.core.names import group_families
from ckptool.recipes.axes import Shape
from ckptool.recipes.recipe import RecipeRule
from ckptool.words import listed, printable


class TensorLike(Protocol):
    """The properties of a tensor that planning needs."""

    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def sizes(self) -> Shape: ...  # noqa: D102
    @property
    def stride(self) -> Shape: ...  # noqa: D102
    @property
    def place(self) -> Any: ...  # noqa: D102


class Sketch(NamedTuple):
    """The header of a tensor: dtype, shape, strides and identity."""

    dtype: str
    sizes: Shape
    stride: Shape
    place: Any


T = TypeVar("T", bound=TensorLike)


NO_EQUATION = -1
"""The number of the equation of a rule without one."""


class Use(NamedTuple):
    """The rule, and its equation, by which a tensor was taken or made."""

    rule: int
    """The number of the rule in its pass."""
    equation: int
    """The number of the equation in the rule; `NO_EQUATION` if it has none."""


class Stack(NamedTuple):
    """The tensors of one key of a rule in one group."""

    key: str
    """The key; `{rank}` in it stands for the numbers of several tensors."""
    shape: Shape
    """The shape of each tensor."""
    tensors: int
    """The number of tensors."""

    def __str__(self) -> str:
        """Return the key, the shape, and how many there are."""
        return f"{self.key} {list(self.shape)}" + (f" x {self.tensors}" if self.tensors > 1 else "")


class Group(NamedTuple):
    """Tensors that a rule took together, and the result."""

    use: Use
    left: tuple[Stack, ...]
    right: tuple[Stack, ...]


@dataclass
class Outcome(Generic[T]):
    """The result of one pass."""

    tensors: dict[str, T] = field(default_factory=dict)
    taken: dict[str, Use] = field(default_factory=dict)
    """By key before the pass, the rule that took it; without the keys that no rule took."""
    made: dict[str, Use] = field(default_factory=dict)
    """By key after the pass, the rule that made it."""
    first_keys: dict[str, str] = field(default_factory=dict)
    """By key before the pass, the first key that it became."""
    counts: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By number of a rule, the number of tensors that it took, and of those that it made."""
    groups: list[Group] = field(default_factory=list)
    """The groups of the rules that do more than rename."""

    def describe(self, rule: RecipeRule) -> Iterator[tuple[str, Use, int]]:
        """Yield the groups of a rule, folded by layer: text, use, and number of source tensors.

        `{rank}/layers.{0..31}.wq [2, 4] x 2 -> layers.{0..31}.q [4, 4]`
        """
        groups = [group for group in self.groups if group.use.rule == rule.number]
        labeled = []  # groups of one family have the same equation, shapes and counts
        for group in groups:
            sizes = ((stack.shape, stack.tensors) for stack in (*group.left, *group.right))
            labeled.append((group.left[0].key, (group.use, *sizes)))
        for family in group_families(labeled):
            members = [groups[number] for number in family.numbers]
            # For each stack of a side: this stack in all members.
            left = zip(*(group.left for group in members), strict=True)
            right = zip(*(group.right for group in members), strict=True)
            text = " -> ".join(", ".join(map(_fold_stacks, side)) for side in (left, right))
            taken = sum(stack.tensors for group in members for stack in group.left)
            yield text, members[0].use, taken


@dataclass
class Plan(Generic[T]):
    """The result of a recipe for some tensors."""

    source: dict[str, T]
    """The given tensors by key, without the dropped ones."""
    dropped: list[str]
    """Keys that the recipe leaves out."""
    outcomes: list[Outcome[T]] = field(default_factory=list)
    """The outcome of each pass."""
    tensors: dict[str, T] = field(default_factory=dict)
    """The result."""
    aliases: set[str] = field(default_factory=set)
    """Keys that the source lacks and that were added, because a tied key is there."""
    untied: dict[str, str] = field(default_factory=dict)
    """Keys left out of the result, each with the tied key that stays."""
    needed: dict[str, int] = field(default_factory=dict)
    """Parameters that only the inverse conversion needs."""
    disputed: set[str] = field(default_factory=set)
    """Parameters in `needed` that would have different values for different tensors."""
    is_one_to_one: bool = True
    """True if each tensor became exactly one, and none were joined."""
    has_padding: bool = False
    """True if padding was cut off."""

    def map_first_keys(self) -> dict[str, str]:
        """Return the first key that each source key became, if that key is in the result."""
        new_keys = {key: key for key in self.source}
        for outcome in self.outcomes:
            first_keys = outcome.first_keys
            new_keys = {old: first_keys.get(key, key) for old, key in new_keys.items()}
        return {old: key for old, key in new_keys.items() if key in self.tensors}


def _fold_stacks(stacks: Sequence[Stack]) -> str:
    """Return the text of the stacks of one key in several groups, with their numbers folded."""
    keys = (family.label for family in group_families((stack.key, None) for stack in stacks))
    return str(stacks[0]._replace(key=listed(keys)))


def find_differences(forward: Plan[Any], back: Plan[Any]) -> Iterator[str]:
    """Yield the first difference after the conversion and its inverse, as a phrase.

    The inverse has to use the same rules and equations on the same keys, and to give each tensor of
    the source its dtype and shape. Tensors that it leaves out as tied are no difference.
    """
    ties = back.untied
    for forward_pass, back_pass in zip(forward.outcomes, reversed(back.outcomes), strict=True):
        for before, after in (
            (forward_pass.made, back_pass.taken),
            (forward_pass.taken, back_pass.made),
        ):
            if before != after:
                keys = (*before, *after)
                key = next(key for key in keys if before.get(key) != after.get(key))
                yield f"in reverse, another rule or equation matches {printable(key)!r}"
                return
    for key, tensor in forward.source.items():
        if key in ties:
            continue
        restored = back.tensors.get(key)
        if restored is None or (restored.dtype, restored.sizes) != (tensor.dtype, tensor.sizes):
            became = "be missing" if restored is None else f"have shape {list(restored.sizes)}"
            yield f"{printable(key)!r} would {became}"
            return
    if extra := next((key for key in back.tensors if key not in forward.source), None):
        yield f"{printable(extra)!r} would be new"
