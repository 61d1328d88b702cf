"""What the rules of a recipe make of tensors: over keys, shapes and dtypes; no byte is read.

The same code plans the way there, over the tensors of a file, and the way back, over `Sketch`es of
what came of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from ckptool.core.model import MAX_ELEMENTS, row_major_strides
from ckptool.core.names import find_similar, group_families
from ckptool.errors import LimitExceeded, NameCollision, UsageError
from ckptool.recipes.assembling import BoxAxis, Piece, ordered
from ckptool.recipes.axes import Equation, Misfit, Part, Shape
from ckptool.recipes.names import MAX_KEY, Pattern, Values, first_missing, is_number
from ckptool.recipes.recipe import Recipe, RecipeRule
from ckptool.words import counted, listed, printable

_MOST_PIECES = 2_000_000
"""Parts of tensors that a plan has memory for."""
_SAME = Equation.parse("... -> ...")
"""What a rule without axes does, for messages."""


class TensorLike(Protocol):
    """What planning knows of a tensor."""

    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def sizes(self) -> Shape: ...  # noqa: D102
    @property
    def stride(self) -> Shape: ...  # noqa: D102
    @property
    def place(self) -> Any: ...  # noqa: D102


class Sketch(NamedTuple):
    """A tensor of which there is no more than what planning knows."""

    dtype: str
    sizes: Shape
    stride: Shape
    place: Any


T = TypeVar("T", bound=TensorLike)


class Maker(Protocol[T]):
    """Makes tensors for a plan: real ones, or sketches."""

    def prepare(self, key: str, tensor: T, *, in_rows: bool = False) -> T:
        """Return a tensor that pieces can be taken of; `in_rows`: over its elements in a row."""

    def make(
        self, key: str, shape: Shape, pieces: Sequence[Piece], members: Sequence[T], place: Any
    ) -> T:
        """Return the tensor that pieces of some members make, one piece of each.

        `place` is another one for other pieces or members.
        """

    def is_same(self, one: T, other: T) -> bool:
        """Return whether two tensors of one dtype and shape have the same elements."""


class Sketches:
    """A maker of sketches."""

    def prepare(self, key: str, tensor: Sketch, *, in_rows: bool = False) -> Sketch:
        """Return the sketch, in rows if it is to be."""
        return tensor._replace(stride=row_major_strides(tensor.sizes)) if in_rows else tensor

    def make(
        self,
        key: str,
        shape: Shape,
        pieces: Sequence[Piece],
        members: Sequence[Sketch],
        place: Any,
    ) -> Sketch:
        """Return the sketch of what pieces of sketches make."""
        return Sketch(members[0].dtype, shape, row_major_strides(shape), place)

    def is_same(self, one: Sketch, other: Sketch) -> bool:
        """Return True: that is known since the way there."""
        return True


class Use(NamedTuple):
    """By which rule, and by which of its equations, a tensor was taken or made."""

    rule: int
    equation: int
    """-1: the rule has none."""


class Stack(NamedTuple):
    """The tensors of one key of a rule in one group."""

    key: str
    """`{rank}` stands for the numbers of several."""
    shape: Shape
    """Of each."""
    tensors: int

    def __str__(self) -> str:
        """Return the key, the shape, and how many there are."""
        return f"{self.key} {list(self.shape)}" + (f" x {self.tensors}" if self.tensors > 1 else "")


class Group(NamedTuple):
    """Tensors that a rule took together, and what it made of them."""

    use: Use
    left: tuple[Stack, ...]
    right: tuple[Stack, ...]


@dataclass
class Outcome(Generic[T]):
    """What one pass made of the tensors."""

    tensors: dict[str, T] = field(default_factory=dict)
    taken: dict[str, Use] = field(default_factory=dict)
    """By the keys before the pass; those that no rule took are not in it."""
    made: dict[str, Use] = field(default_factory=dict)
    """By the keys after the pass."""
    first_keys: dict[str, str] = field(default_factory=dict)
    """By the keys before the pass, the first that each of them became."""
    counts: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By rule, how many tensors it took and how many it made."""
    groups: list[Group] = field(default_factory=list)
    """Of the rules that do more than rename."""

    def lines(self, rule: RecipeRule) -> Iterator[tuple[str, Use, int]]:
        """Yield what a rule did with tensors of some shapes, folded by layer, and their number.

        `{rank}/layers.{0..31}.wq [2, 4] x 2 -> layers.{0..31}.q [4, 4]`
        """
        groups = [one for one in self.groups if one.use.rule == rule.number]
        alike = (
            (one.left[0].key, (one.use, *((s.shape, s.tensors) for s in (*one.left, *one.right))))
            for one in groups
        )
        for family in group_families(alike):
            members = [groups[number] for number in family.numbers]
            _, *both = zip(*members, strict=True)
            sides = (zip(*side, strict=True) for side in both)
            text = " -> ".join(", ".join(map(_folded, side)) for side in sides)
            yield text, members[0].use, sum(one.tensors for group in members for one in group.left)


@dataclass
class Plan(Generic[T]):
    """What a recipe makes of some tensors."""

    source: dict[str, T]
    """The tensors that it was given, without those that were dropped."""
    dropped: list[str]
    outcomes: list[Outcome[T]] = field(default_factory=list)
    """Of each pass, in their order."""
    tensors: dict[str, T] = field(default_factory=dict)
    """The result."""
    aliases: set[str] = field(default_factory=set)
    """Keys that the source does not have, but a key that it is tied to."""
    untied: dict[str, str] = field(default_factory=dict)
    """Keys left out of the result, each with that of the same tensor."""
    needed: dict[str, int] = field(default_factory=dict)
    """Parameters that the way back needs, beside those of the way there."""
    disputed: set[str] = field(default_factory=set)
    """Those of them that are not the same for all tensors."""
    is_one_to_one: bool = True
    """Whether each tensor became one other, which nothing else became."""
    has_padding: bool = False
    """Whether padding was cut off."""

    def renamed(self) -> dict[str, str]:
        """Return the first key that each one of the source became, if that is in the result."""
        found = {key: key for key in self.source}
        for outcome in self.outcomes:
            new = outcome.first_keys
            found = {old: new.get(key, key) for old, key in found.items()}
        return {old: key for old, key in found.items() if key in self.tensors}


def _folded(stacks: Sequence[Stack]) -> str:
    """Return the stacks of one key in several groups, their numbers folded."""
    keys = (family.label for family in group_families((one.key, None) for one in stacks))
    return str(stacks[0]._replace(key=listed(keys)))


Match: TypeAlias = "Callable[[str], Values | None]"


class _Template(NamedTuple):
    """What an equation does to tensors of some shapes, for groups of as many members."""

    shapes: list[Shape]
    pieces: list[dict[tuple[int, ...], list[Piece]]]
    """By key on the right, then by the number in each variable that only the right side has."""


class _Member(NamedTuple, Generic[T]):
    key: str
    tensor: T


class _Renamed(NamedTuple, Generic[T]):
    """A tensor under its new key; without a `use` it is the old one."""

    old: str
    key: str
    tensor: T
    use: Use | None


class _Members(Generic[T]):
    """Tensors that a rule takes together."""

    def __init__(self, rule: RecipeRule, values: Values) -> None:
        self.rule, self.values = rule, values
        self.members: list[dict[tuple[int, ...], _Member[T]]] = [{} for _ in rule.left]

    @property
    def keys(self) -> list[str]:
        """The keys of all members."""
        return [one.key for held in self.members for one in held.values()]

    def shown(self, use: Use, made: Sequence[Sequence[tuple[str, T]]]) -> Group:
        """Return what is told of the group, and of the tensors that were made for each key."""
        left = [[one.tensor for one in held.values()] for held in self.members]
        right = [[tensor for _, tensor in side] for side in made]
        sides = (
            tuple(
                Stack(pattern.fill(self.values), tensors[0].sizes, len(tensors))
                for pattern, tensors in zip(patterns, every, strict=True)
                if tensors
            )
            for patterns, every in ((self.rule.left, left), (self.rule.right, right))
        )
        return Group(use, *sides)


def plan(
    recipe: Recipe,
    tensors: Mapping[str, T],
    params: Mapping[str, int],
    maker: Maker[T],
    file: str = "",
) -> Plan[T]:
    """Return what a recipe makes of tensors by their keys.

    Raises:
        UsageError: a rule matches nothing, no rule takes a tensor, a member of a group is missing
            or differs, nothing decides a size, or a shape does not fit.
        NameCollision: two tensors get one key.
    """
    if longest := next((key for key in tensors if len(key) > MAX_KEY), None):
        text = f"a key has {len(longest):,} characters, more than {MAX_KEY:,}"
        raise UsageError(text, file=file or None)
    planner = _Planner(recipe, params, maker, file or None)
    return planner.run(tensors)


class _Planner(Generic[T]):
    """One run of a recipe over some tensors."""

    def __init__(
        self, recipe: Recipe, params: Mapping[str, int], maker: Maker[T], file: str | None
    ) -> None:
        self._recipe, self._params, self._maker, self._file = recipe, params, maker, file
        self._templates: dict[Any, _Template] = {}
        self._known: dict[Any, T] = {}
        self._pieces = 0
        self._plan: Plan[T]

    def run(self, tensors: Mapping[str, T]) -> Plan[T]:
        recipe = self._recipe
        drop, is_path = recipe.drop[0], recipe.uses_paths
        gone = {key for key in tensors if any(one.covers(key, is_path=is_path) for one in drop)}
        source = {key: one for key, one in tensors.items() if key not in gone}
        self._plan = Plan(source, [key for key in tensors if key in gone])
        now, untouched = dict(source), set(source)
        for key, of in recipe.tied[0].items():
            if key not in now and of in now:
                now[key] = now[of]
                self._plan.aliases.add(key)
        for rules in recipe.passes:
            outcome = self._pass([rule.bound(self._params) for rule in rules], now)
            self._plan.outcomes.append(outcome)
            now = outcome.tensors
            numbers = {rule.number for rule in rules if not self._recipe.passes_on(rule)}
            untouched -= {key for key, use in outcome.taken.items() if use.rule in numbers}
        left = [key for key in (*source, *now) if key in untouched]
        left = list(dict.fromkeys([*left, *recipe.unfinished(now)]))
        if left and not recipe.keeps_rest:
            text = f"no rule of {printable(recipe.name)} matches {counted(len(left), 'tensor')}"
            first = listed(left, most=5)
            hint = 'leave them out with --exclude GLOB, or use rest = "keep" in the recipe'
            raise self._error(f"{text}: {first}", hint)
        if source and untouched == source.keys():
            text = f"no tensor matches a rule of {printable(recipe.name)}"
            raise self._error(f"{text}; the file has {listed(source, most=5)}")
        for key, of in recipe.tied[1].items():
            if key in now and of in now and now[key].place == now[of].place is not None:
                self._plan.untied[key] = of
        self._plan.tensors = {key: one for key, one in now.items() if key not in self._plan.untied}
        return self._plan

    def _error(self, text: str, hint: str | None = None) -> UsageError:
        return UsageError(text, file=self._file, hint=hint)

    def _matchers(self, every: Iterable[Pattern]) -> Iterator[Match]:
        """Yield the `match` of each pattern; without a `/` it is compared with the last key."""
        for one in every:
            is_whole = "/" in one.text or not self._recipe.uses_paths
            yield one.match if is_whole else one.match_last

    def _pass(self, rules: Sequence[RecipeRule], tensors: Mapping[str, T]) -> Outcome[T]:
        outcome = Outcome[T]()
        matchers = [
            (match, rule, at, rule.common, rule.stacked[at], rule.renames)
            for rule in rules
            for at, match in enumerate(self._matchers(rule.left))
        ]
        groups: dict[Any, _Members[T]] = {}
        order: list[_Renamed[T] | _Members[T]] = []
        for key, tensor in tensors.items():
            for match, rule, at, common, stacked, renames in matchers:
                values = match(key)
                if values is None:
                    continue
                if renames:
                    use = outcome.taken[key] = Use(rule.number, -1)
                    order.append(_Renamed(key, rule.right[0].fill(values), tensor, use))
                    break
                name = rule.number, *(values[one] for one in common)
                group = groups.get(name)
                if group is None:
                    group = groups[name] = _Members(rule, {one: values[one] for one in common})
                    order.append(group)
                self._join(group, at, [values[one] for one in stacked], _Member(key, tensor))
                break
            else:
                order.append(_Renamed(key, key, tensor, None))
        self._put(order, outcome)
        for rule in rules:
            if rule.number not in outcome.counts and not rule.is_optional:
                wanted = " and ".join(repr(printable(one.text)) for one in rule.left)
                near = [one for pattern in rule.left for one in find_similar(pattern.text, tensors)]
                text = f"no tensor matches {wanted}; the file has {listed(near or tensors)}"
                hint = "add ? to the key to make it optional"
                raise self._error(text, hint)
        return outcome

    def _join(
        self, group: _Members[T], at: int, numbers: Sequence[str | int], member: _Member[T]
    ) -> None:
        """Put a tensor into its group."""
        held = group.members[at]
        if odd := next((one for one in numbers if not is_number(one)), None):
            text = f"{printable(member.key)!r} would be joined with others, but "
            raise self._error(
                f"{text}{printable(str(odd))!r} does not define the order: {group.rule.text}"
            )
        number = tuple(map(int, numbers))
        if number in held:
            both = f"{printable(held[number].key)!r} and {printable(member.key)!r}"
            raise NameCollision(
                f"{both} have the same position in {group.rule.text}", file=self._file
            )
        held[number] = member

    def _put(self, order: Sequence[_Renamed[T] | _Members[T]], outcome: Outcome[T]) -> None:
        """Put what the rules made into the outcome, in the order of the source."""
        tensors, counts = outcome.tensors, outcome.counts
        for one in order:
            use: Use | None
            if isinstance(one, _Members):
                keys = one.keys
                use, sides = self._applied(one)
                made = [pair for side in sides for pair in side]
                self._plan.is_one_to_one &= len(keys) == len(made) == 1
                outcome.groups.append(one.shown(use, sides))
                outcome.taken.update(dict.fromkeys(keys, use))
            else:
                keys, use, made = [one.old], one.use, [(one.key, one.tensor)]
            for key, tensor in made:
                if key in tensors:
                    raise self._collision(outcome, key, keys[0])
                tensors[key] = tensor
                if use is not None:
                    outcome.made[key] = use
            if use is not None:
                for key in keys:
                    outcome.first_keys[key] = made[0][0]
                taken, became = counts.get(use.rule, (0, 0))
                counts[use.rule] = taken + len(keys), became + len(made)

    def _collision(self, outcome: Outcome[T], key: str, second: str) -> NameCollision:
        first = next((old for old, new in outcome.first_keys.items() if new == key), key)
        both = f"{printable(first)!r} and {printable(second)!r}"
        return NameCollision(f"{both} would both become {printable(key)!r}", file=self._file)

    def _applied(self, group: _Members[T]) -> tuple[Use, list[list[tuple[str, T]]]]:
        """Return which equation a group fits, and the tensors that are made for each key."""
        rule, counts = group.rule, self._counts(group)
        firsts = [held[(0,) * len(next(iter(held)))] for held in group.members]
        if not rule.takes_single or len(firsts) > 1:
            self._check_alike(group, firsts)
        misfits: list[UsageError] = []
        for at, equation in enumerate(rule.equations or (None,)):
            sizes = {**self._params, **counts}
            use = Use(rule.number, at if equation else -1)
            try:
                return use, self._made(group, firsts, use, counts, sizes)
            except Misfit as misfit:
                misfits.append(self._misfit(group, firsts, equation or _SAME, misfit, sizes))
        raise misfits[0]

    def _counts(self, group: _Members[T]) -> dict[str, int]:
        """Return how many there are of each variable that only the source has."""
        rule, counts = group.rule, dict[str, int]()
        if rule.takes_single and all(group.members):
            return counts
        for pattern, names, held in zip(rule.left, rule.stacked, group.members, strict=True):
            for at, name in enumerate(names):
                highest = max((number[at] for number in held), default=-1)
                counts[name] = max(counts.get(name, 0), 1 + highest, pattern.choices_of(name))
        for pattern, names, held in zip(rule.left, rule.stacked, group.members, strict=True):
            lacking = first_missing(held, [counts[name] for name in names])
            if lacking is not None:
                values = {**group.values, **dict(zip(names, lacking, strict=True))}
                key = pattern.fill(values)
                is_taken = key in self._plan.source
                state = "is used by another rule" if is_taken else "is missing"
                text = f"{printable(key)!r} {state}, but belongs to {listed(group.keys)}"
                raise self._error(f"{text}: {rule.text}")
        for name, count in counts.items():
            if (given := self._params.get(name, count)) != count:
                text = f"the file has {count:,} of {{{name}}}, but --param gives {given:,}"
                raise self._error(f"{text}: {rule.text}")
        return counts

    def _check_alike(self, group: _Members[T], firsts: Sequence[_Member[T]]) -> None:
        """Refuse members of other shapes or dtypes."""
        for first, held in zip(firsts, group.members, strict=True):
            for one in held.values():
                differs = one.tensor.sizes != first.tensor.sizes
                if differs or one.tensor.dtype != firsts[0].tensor.dtype:
                    other = first if differs else firsts[0]
                    pair = (f"{printable(m.key)!r} is {m.tensor.dtype} {list(m.tensor.sizes)}"
                            for m in (one, other))  # fmt: skip
                    text = ", but ".join(pair)
                    raise self._error(f"{text}, in the same group: {group.rule.text}")

    def _made(
        self,
        group: _Members[T],
        firsts: Sequence[_Member[T]],
        use: Use,
        counts: Mapping[str, int],
        sizes: dict[str, int],
    ) -> list[list[tuple[str, T]]]:
        """Return the tensors that an equation makes of a group, for each key on the right.

        Raises:
            Misfit: it does not fit their shapes.
        """
        rule, maker = group.rule, self._maker
        if use.equation < 0:
            self._check_same(group, frozenset())
            self._note(counts, counts)
            numbers = self._numbers(rule.unstacked[0], rule.right[0], sizes)
            return [[(self._key(group, 0, number), firsts[0].tensor) for number in numbers]]
        equation = rule.equations[use.equation]
        tensors = [
            {number: maker.prepare(one.key, one.tensor) for number, one in held.items()}
            for held in group.members
        ]
        for at, held in enumerate(tensors):
            if len(held) > 1 and len({one.stride for one in held.values()}) > 1:
                keys = group.members[at]
                tensors[at] = {n: maker.prepare(keys[n].key, one, in_rows=True)
                               for n, one in held.items()}  # fmt: skip
        views = [next(iter(held.values())) for held in tensors]
        name = (use, *((one.sizes, one.stride) for one in views), *counts.items())
        template = self._templates.get(name)
        if template is None:
            template = self._template(rule, equation, views, counts, sizes)
            self._templates[name] = template
        if not rule.takes_single:
            self._check_same(group, equation.right_axes)
        made: list[list[tuple[str, T]]] = [[] for _ in template.shapes]
        for at, (shape, every) in enumerate(zip(template.shapes, template.pieces, strict=True)):
            for number, pieces in every.items():
                key = self._key(group, at, number)
                members = [tensors[one.key][one.member] for one in pieces]
                place = id(template), at, number, tuple([one.place for one in members])
                tensor = self._known.get(place)
                if tensor is None:  # else what is tied stays tied
                    tensor = maker.make(key, shape, pieces, members, place)
                    self._known[place] = tensor
                made[at].append((key, tensor))
        return made

    def _key(self, group: _Members[T], at: int, number: tuple[int, ...]) -> str:
        names = group.rule.unstacked[at]
        key = group.rule.right[at].fill({**group.values, **dict(zip(names, number, strict=True))})
        if len(key) > MAX_KEY:
            raise self._error(f"a key would have {len(key):,} characters: {group.rule.text}")
        return key

    def _check_same(self, group: _Members[T], axes: frozenset[str]) -> None:
        """Refuse members that differ although no axis follows their variables.

        Raises:
            UsageError: naming two.
        """
        for names, held in zip(group.rule.stacked, group.members, strict=True):
            if all(name in axes for name in names):
                continue
            for number, one in held.items():
                pairs = zip(names, number, strict=True)
                first = held[tuple(at if name in axes else 0 for name, at in pairs)]
                if one is not first and not self._maker.is_same(first.tensor, one.tensor):
                    both = f"{printable(first.key)!r} and {printable(one.key)!r}"
                    text = f"{both} differ, but the recipe expects the same elements"
                    raise self._error(f"{text}: {group.rule.text}")

    def _numbers(
        self, names: Sequence[str], pattern: Pattern, sizes: Mapping[str, int]
    ) -> list[tuple[int, ...]]:
        """Return the numbers of the variables that only the target has.

        Raises:
            Misfit: nothing decides how many there are.
        """
        counts = []
        for name in names:
            count = pattern.choices_of(name) or sizes.get(name)
            if count is None:
                raise Misfit(f"the number of {{{name}}} is unknown", None, (name,))
            counts.append(count)
        self._claim(prod(counts))
        return list(product(*map(range, counts)))

    def _claim(self, count: int) -> None:
        """Count pieces and tensors, before there is memory for them."""
        self._pieces += count
        if self._pieces > _MOST_PIECES:
            text = f"the recipe creates more than {_MOST_PIECES:,} tensors or parts of tensors"
            raise LimitExceeded(text, file=self._file, hint="give smaller numbers with --param")

    def _template(
        self,
        rule: RecipeRule,
        equation: Equation,
        views: Sequence[T],
        counts: Mapping[str, int],
        sizes: dict[str, int],
    ) -> _Template:
        shapes, strides = [one.sizes for one in views], [one.stride for one in views]
        equation = equation.spread([len(shape) for shape in shapes])
        equation.solve(shapes, sizes)
        targets = equation.right_shapes(sizes)
        if any(prod(shape) > MAX_ELEMENTS for shape in targets):
            raise Misfit("the result would have too many elements")
        steps = [row_major_strides(shape) for shape in targets]
        pieces: list[dict[tuple[int, ...], list[Piece]]] = [
            {number: [] for number in self._numbers(names, pattern, sizes)}
            for names, pattern in zip(rule.unstacked, rule.right, strict=True)
        ]
        for source, taken, target, goal in rule.paired(equation, sizes):
            stacked, unstacked = rule.stacked[source], rule.unstacked[target]
            axes = ordered(
                [
                    BoxAxis(
                        size,
                        step * strides[source][at],
                        goal.axes[name][2] * steps[target][goal.axes[name][1]],
                    )
                    for name, (size, at, step) in taken.axes.items()
                    if name in goal.axes
                ]
            )
            start, place = (
                _offset(taken.starts, strides[source]),
                _offset(goal.starts, steps[target]),
            )
            along = [_step(goal, name, steps[target]) for name in stacked]
            across = [_step(taken, name, strides[source]) for name in unstacked]
            members = [range(counts[name]) if name in goal.axes else range(1) for name in stacked]
            self._claim(prod(map(len, members)) * len(pieces[target]))
            for member in product(*members):
                there = place + _offset(member, along)
                for number, held in pieces[target].items():
                    here = start + _offset(number, across)
                    held.append(Piece(source, member, here, there, axes))
        self._look_back(rule, equation, targets, counts, sizes)
        return _Template(targets, pieces)

    def _look_back(
        self,
        rule: RecipeRule,
        equation: Equation,
        targets: Sequence[Shape],
        counts: Mapping[str, int],
        sizes: Mapping[str, int],
    ) -> None:
        """Note the parameters without which the way back could not be planned."""
        parts = (one for parts in equation.left_parts(sizes) for one in parts)
        if any(part.is_padding and part.numel for part in parts):
            self._plan.has_padding = True
        self._note([name for name in counts if name not in equation.right_axes], counts)
        try:
            counted_there = {name: sizes[name] for names in rule.unstacked for name in names}
            equation.reversed().solve(targets, {**self._params, **counted_there})
        except Misfit as misfit:
            free = [name for name in misfit.axes if name in counts or name.startswith("_")]
            self._note(free or misfit.axes, sizes)

    def _note(self, names: Iterable[str], sizes: Mapping[str, int]) -> None:
        for name in names:
            if self._plan.needed.setdefault(name, sizes[name]) != sizes[name]:
                self._plan.disputed.add(name)

    def _misfit(
        self,
        group: _Members[T],
        firsts: Sequence[_Member[T]],
        equation: Equation,
        misfit: Misfit,
        sizes: Mapping[str, int],
    ) -> UsageError:
        """Return the error about tensors that do not fit an equation, with all sizes."""
        chosen = firsts if misfit.tensor is None else [firsts[misfit.tensor]]
        which = ", ".join(
            f"{printable(m.key)!r} of shape {list(m.tensor.sizes)}" for m in chosen[:4]
        )
        names = sorted(equation.axes | {name for v in group.rule.unstacked for name in v})
        known = ", ".join(f"{name} {sizes.get(name, '?')}" for name in names)
        text = f"{which} {'do' if len(chosen) > 1 else 'does'} not fit {equation.text!r}"
        hint = " ".join(f"--param {name}=NUMBER" for name in misfit.axes[:1])
        text = f"{text}: {misfit.text}; {known or 'no axes'}"
        return self._error(text, f"add {hint}" if hint else None)


def _offset(numbers: Iterable[int], steps: Iterable[int]) -> int:
    return sum(number * step for number, step in zip(numbers, steps, strict=True))


def _step(part: Part, name: str, steps: Shape) -> int:
    """Return how far a part moves with the number of a variable that is one of its axes."""
    if name not in part.axes:
        return 0
    _, at, step = part.axes[name]
    return step * steps[at]


def differences(there: Plan[Any], back: Plan[Any]) -> Iterator[str]:
    """Yield what is not as it was, after the way there and back; a phrase for each kind."""
    ties = back.untied
    for there_pass, back_pass in zip(there.outcomes, reversed(back.outcomes), strict=True):
        for before, after in (
            (there_pass.made, back_pass.taken),
            (there_pass.taken, back_pass.made),
        ):
            if before != after:
                keys = (*before, *after)
                key = next(key for key in keys if before.get(key) != after.get(key))
                yield f"in reverse, another rule or equation matches {printable(key)!r}"
                return
    for key, tensor in there.source.items():
        if key in ties:
            continue
        found = back.tensors.get(key)
        if found is None or (found.dtype, found.sizes) != (tensor.dtype, tensor.sizes):
            became = "be missing" if found is None else f"have shape {list(found.sizes)}"
            yield f"{printable(key)!r} would {became}"
            return
    if more := next((key for key in back.tensors if key not in there.source), None):
        yield f"{printable(more)!r} would be new"


def left_over(recipe: Recipe, keys: Iterable[str]) -> set[str] | None:
    """Return the keys that no rule of a recipe takes; None if a rule matches none of them."""
    drop, is_path = recipe.drop[0], recipe.uses_paths
    now = [key for key in keys if not any(one.covers(key, is_path=is_path) for one in drop)]
    tied = recipe.tied[0]
    now += [key for key, of in tied.items() if key not in now and of in now]
    untouched = set(now)
    for rules in recipe.passes:
        used, new = set[int](), dict[str, None]()
        for key in now:
            found = _taker(rules, key)
            if found is None:
                new[key] = None
                continue
            rule, values = found
            used.add(rule.number)
            if not recipe.passes_on(rule):
                untouched.discard(key)
            for pattern, names in zip(rule.right, rule.unstacked, strict=True):
                new[pattern.fill({**values, **dict.fromkeys(names, 0)})] = None
        if any(rule.number not in used and not rule.is_optional for rule in rules):
            return None
        now = list(new)
    return untouched | {*recipe.unfinished(now)}


def _taker(rules: Iterable[RecipeRule], key: str) -> tuple[RecipeRule, Values] | None:
    for rule in rules:
        for pattern in rule.left:
            if any(one.shift and not one.shift.lstrip("-").isdigit() for one in pattern.variables):
                continue  # by a parameter, which keys do not tell
            values = pattern.match(key)
            if values is not None:
                return rule, values
    return None
