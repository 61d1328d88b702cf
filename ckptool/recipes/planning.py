"""Plan a conversion: apply the rules of a recipe to keys, shapes and dtypes, reading no bytes.

The same code plans the conversion of the tensors in a file, and the reverse conversion of the
result, whose tensors are `Sketch`es.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias

from ckptool.core.model import MAX_ELEMENTS, row_major_strides
from ckptool.core.names import find_similar
from ckptool.errors import LimitExceeded, NameCollision, UsageError
from ckptool.recipes.assembling import BoxAxis, Piece, merge_axes
from ckptool.recipes.axes import Equation, Misfit, Part, Shape
from ckptool.recipes.names import MAX_KEY, Pattern, Values, find_first_missing, is_number
from ckptool.recipes.outcome import NO_EQUATION, Group, Outcome, Plan, Sketch, Stack, T, Use
from ckptool.recipes.recipe import Recipe, RecipeRule
from ckptool.words import counted, listed, printable

_MAX_PIECES = 2_000_000
"""Parts of tensors that a plan has memory for."""
_IDENTITY_EQUATION = Equation.parse("... -> ...")
"""The equation of a rule without axes, for messages."""


class Maker(Protocol[T]):
    """Makes tensors for a plan: real ones, or sketches."""

    def prepare(self, key: str, tensor: T, *, in_rows: bool = False) -> T:
        """Return a tensor from which pieces can be taken; with `in_rows`, in row-major order."""

    def make(
        self, key: str, shape: Shape, pieces: Sequence[Piece], members: Sequence[T], place: Any
    ) -> T:
        """Return the tensor for `key` that is made of pieces, each from the member at its position.

        Its `place` is unique for these pieces and members.
        """

    def is_same(self, one: T, other: T) -> bool:
        """Return True if two tensors of one dtype and shape have the same elements."""


class Sketches:
    """A maker of sketches."""

    def prepare(self, key: str, tensor: Sketch, *, in_rows: bool = False) -> Sketch:
        """Return the sketch; with `in_rows`, in row-major order."""
        return tensor._replace(stride=row_major_strides(tensor.sizes)) if in_rows else tensor

    def make(
        self,
        key: str,
        shape: Shape,
        pieces: Sequence[Piece],
        members: Sequence[Sketch],
        place: Any,
    ) -> Sketch:
        """Return the sketch; only a maker of real tensors needs `key` and `pieces`."""
        return Sketch(members[0].dtype, shape, row_major_strides(shape), place)

    def is_same(self, one: Sketch, other: Sketch) -> bool:
        """Return True: the forward conversion has compared the elements."""
        return True


Match: TypeAlias = "Callable[[str], Values | None]"
"""Returns the values of a pattern's variables in a key, or None."""


class _Template(NamedTuple):
    """The pieces of an equation for tensors of some shapes, for all groups of this size."""

    shapes: list[Shape]
    pieces: list[dict[tuple[int, ...], list[Piece]]]
    """By key on the right, then by its numbers in the variables that only the right side has."""


class _Member(NamedTuple, Generic[T]):
    """A tensor with its key, in a group."""

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
        """Start without members; `values` are the common variables of all keys of the group."""
        self.rule, self.values = rule, values
        self.members: list[dict[tuple[int, ...], _Member[T]]] = [{} for _ in rule.left]
        """For each key on the left, the members by their numbers in the stacked variables."""

    @property
    def keys(self) -> list[str]:
        """The keys of all members."""
        return [member.key for members in self.members for member in members.values()]

    def describe(self, use: Use, made: Sequence[Sequence[tuple[str, T]]]) -> Group:
        """Return the group for the report: a `Stack` for each key of the rule that has tensors.

        `made` has, for each key on the right, the new tensors with their full keys.
        """
        left = [[member.tensor for member in members.values()] for members in self.members]
        right = [[tensor for _, tensor in keyed_tensors] for keyed_tensors in made]
        left_stacks, right_stacks = (
            tuple(
                Stack(pattern.fill(self.values), tensors[0].sizes, len(tensors))
                for pattern, tensors in zip(patterns, tensor_lists, strict=True)
                if tensors
            )
            for patterns, tensor_lists in ((self.rule.left, left), (self.rule.right, right))
        )
        return Group(use, left_stacks, right_stacks)


def plan_recipe(
    recipe: Recipe,
    tensors: Mapping[str, T],
    params: Mapping[str, int],
    maker: Maker[T],
    file: str = "",
) -> Plan[T]:
    """Return the result of a recipe for tensors by their keys.

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
        """Take the recipe, its parameters, and the maker of tensors; errors name `file`."""
        self._recipe, self._params, self._maker, self._file = recipe, params, maker, file
        self._templates: dict[Any, _Template] = {}
        """By rule, equation, shapes and strides: the pieces, which many groups share."""
        self._made_by_identity: dict[Any, T] = {}
        """By template and sources, the tensor that was made, so that ties are kept."""
        self._n_pieces = 0
        """The number of pieces and tensors so far, which is limited."""
        self._plan: Plan[T]
        """The plan, which `run` creates and all methods complete."""

    def run(self, tensors: Mapping[str, T]) -> Plan[T]:
        """Run all passes, and return the plan.

        Before them, a missing key is added if a key that it is tied to exists (`aliases`). After
        them, tied keys of the target are left out (`untied`). A rule that only keeps a key for the
        next pass does not count as a match.

        Raises:
            UsageError: if a rule matches no tensor, or a tensor no rule.
        """
        recipe = self._recipe
        is_path = recipe.uses_paths
        dropped = {
            key
            for key in tensors
            if any(pattern.covers(key, is_path=is_path) for pattern in recipe.drop.source)
        }
        source = {key: tensor for key, tensor in tensors.items() if key not in dropped}
        self._plan = Plan(source, [key for key in tensors if key in dropped])
        current, untouched = dict(source), set(source)
        for key, tied_key in recipe.tied.source.items():
            if key not in current and tied_key in current:
                current[key] = current[tied_key]
                self._plan.aliases.add(key)
        for rules in recipe.passes:
            outcome = self._run_pass([rule.bind(self._params) for rule in rules], current)
            self._plan.outcomes.append(outcome)
            current = outcome.tensors
            matching_rules = {rule.number for rule in rules if not recipe.keeps_for_next_pass(rule)}
            untouched -= {key for key, use in outcome.taken.items() if use.rule in matching_rules}
        self._refuse_unmatched(untouched, current)
        for key, tied_key in recipe.tied.target.items():
            if (
                key in current
                and tied_key in current
                and current[key].place == current[tied_key].place is not None
            ):
                self._plan.untied[key] = tied_key
        self._plan.tensors = {
            key: tensor for key, tensor in current.items() if key not in self._plan.untied
        }
        return self._plan

    def _refuse_unmatched(self, untouched: set[str], result: Mapping[str, T]) -> None:
        """Refuse tensors that no rule matches, unless the recipe keeps the rest.

        `untouched` are keys of the source that no pass took; `result` has the final keys.

        Raises:
            UsageError: if there are some, or no rule matches any tensor.
        """
        recipe, source = self._recipe, self._plan.source
        unmatched = [key for key in (*source, *result) if key in untouched]
        unmatched = list(dict.fromkeys([*unmatched, *recipe.find_unfinished(result)]))
        if unmatched and not recipe.keeps_rest:
            text = (
                f"no rule of {printable(recipe.name)} matches {counted(len(unmatched), 'tensor')}"
            )
            first = listed(unmatched, most=5)
            hint = 'leave them out with --exclude GLOB, or use rest = "keep" in the recipe'
            raise self._usage_error(f"{text}: {first}", hint)
        if source and untouched == source.keys():
            text = f"no tensor matches a rule of {printable(recipe.name)}"
            raise self._usage_error(f"{text}; the file has {listed(source, most=5)}")

    def _usage_error(self, text: str, hint: str | None = None) -> UsageError:
        """Return an error that names the file."""
        return UsageError(text, file=self._file, hint=hint)

    def _list_matchers(self, patterns: Iterable[Pattern]) -> Iterator[Match]:
        """Yield the function that matches keys with each pattern.

        In a recipe for paths, a pattern without a `/` only matches the last key of a path.
        """
        for pattern in patterns:
            is_whole = "/" in pattern.text or not self._recipe.uses_paths
            yield pattern.match if is_whole else pattern.match_last

    def _run_pass(self, rules: Sequence[RecipeRule], tensors: Mapping[str, T]) -> Outcome[T]:
        """Apply the rules of one pass to all tensors; the first that matches takes a tensor.

        A rule that only renames takes each tensor alone, any other takes groups of tensors with
        equal values of the common variables. A tensor without a rule keeps its key.

        Raises:
            UsageError: if a rule that is not optional matches no tensor.
        """
        outcome = Outcome[T]()
        # `side` is the index of the pattern among the keys on the left of its rule.
        matchers = [
            (match, rule, side, rule.common, rule.stacked[side], rule.renames)
            for rule in rules
            for side, match in enumerate(self._list_matchers(rule.left))
        ]
        groups: dict[Any, _Members[T]] = {}  # by rule and values of its common variables
        order: list[_Renamed[T] | _Members[T]] = []
        for key, tensor in tensors.items():
            for match, rule, side, common, stacked, renames in matchers:
                values = match(key)
                if values is None:
                    continue
                if renames:
                    use = outcome.taken[key] = Use(rule.number, NO_EQUATION)
                    order.append(_Renamed(key, rule.right[0].fill(values), tensor, use))
                    break
                group_id = rule.number, *(values[name] for name in common)
                group = groups.get(group_id)
                if group is None:
                    group = groups[group_id] = _Members(
                        rule, {name: values[name] for name in common}
                    )
                    order.append(group)
                self._add_member(
                    group, side, [values[name] for name in stacked], _Member(key, tensor)
                )
                break
            else:
                order.append(_Renamed(key, key, tensor, None))
        self._collect_results(order, outcome)
        for rule in rules:
            if rule.number not in outcome.counts and not rule.is_optional:
                wanted = " and ".join(repr(printable(pattern.text)) for pattern in rule.left)
                similar = [
                    key for pattern in rule.left for key in find_similar(pattern.text, tensors)
                ]
                text = f"no tensor matches {wanted}; the file has {listed(similar or tensors)}"
                hint = "add ? to the key to make it optional"
                raise self._usage_error(text, hint)
        return outcome

    def _add_member(
        self, group: _Members[T], side: int, values: Sequence[str | int], member: _Member[T]
    ) -> None:
        """Add a tensor to its group, at its position in the stacked variables.

        Raises:
            UsageError: if a stacked variable is not a number.
            NameCollision: if the position has a tensor already.
        """
        members = group.members[side]
        if text_value := next((value for value in values if not is_number(value)), None):
            text = f"{printable(member.key)!r} would be joined with others, but "
            raise self._usage_error(
                f"{text}{printable(str(text_value))!r} does not define the order: {group.rule.text}"
            )
        numbers = tuple(map(int, values))
        if numbers in members:
            both = f"{printable(members[numbers].key)!r} and {printable(member.key)!r}"
            raise NameCollision(
                f"{both} have the same position in {group.rule.text}", file=self._file
            )
        members[numbers] = member

    def _collect_results(
        self, order: Sequence[_Renamed[T] | _Members[T]], outcome: Outcome[T]
    ) -> None:
        """Add the results of the rules to the outcome, in the order of the source.

        `order` has renamed tensors and complete groups, to which their rules are applied here.
        """
        tensors, counts = outcome.tensors, outcome.counts
        for entry in order:
            use: Use | None
            if isinstance(entry, _Members):
                keys = entry.keys
                use, sides = self._apply_rule(entry)
                made = [pair for side in sides for pair in side]
                self._plan.is_one_to_one &= len(keys) == len(made) == 1
                outcome.groups.append(entry.describe(use, sides))
                outcome.taken.update(dict.fromkeys(keys, use))
            else:
                keys, use, made = [entry.old], entry.use, [(entry.key, entry.tensor)]
            for key, tensor in made:
                if key in tensors:
                    raise self._collision_error(outcome, key, keys[0])
                tensors[key] = tensor
                if use is not None:
                    outcome.made[key] = use
            if use is not None:
                for key in keys:
                    outcome.first_keys[key] = made[0][0]
                taken, created = counts.get(use.rule, (0, 0))
                counts[use.rule] = taken + len(keys), created + len(made)

    def _collision_error(self, outcome: Outcome[T], key: str, second: str) -> NameCollision:
        """Return the error that `second` and an earlier tensor would both become `key`."""
        first = next((old for old, new in outcome.first_keys.items() if new == key), key)
        both = f"{printable(first)!r} and {printable(second)!r}"
        return NameCollision(f"{both} would both become {printable(key)!r}", file=self._file)

    def _apply_rule(self, group: _Members[T]) -> tuple[Use, list[list[tuple[str, T]]]]:
        """Return the equation that fits a group, and the tensors that it makes for each key.

        The first equation of the rule with fitting shapes applies. A rule without equations makes
        the same tensors under other keys.

        Raises:
            UsageError: if none fits, with the reason for the first.
        """
        rule, counts = group.rule, self._count_members(group)
        # The first member for each key has the number 0 in all stacked variables. It exists,
        # because `_count_members` refuses missing members.
        firsts = [members[(0,) * len(names)]
                  for names, members in zip(rule.stacked, group.members, strict=True)]  # fmt: skip
        if not rule.takes_single or len(firsts) > 1:  # one tensor has no other to be like
            self._check_alike(group, firsts)
        errors: list[UsageError] = []
        for index, equation in enumerate(rule.equations or (None,)):
            sizes = {**self._params, **counts}
            use = Use(rule.number, index if equation else NO_EQUATION)
            try:
                return use, self._make_tensors(group, firsts, use, counts, sizes)
            except Misfit as misfit:
                errors.append(
                    self._misfit_error(group, firsts, equation or _IDENTITY_EQUATION, misfit, sizes)
                )
        raise errors[0]

    def _count_members(self, group: _Members[T]) -> dict[str, int]:
        """Return the number of values of each variable that only the source has.

        It follows from the largest number among the members, or from the choices of the pattern.

        Raises:
            UsageError: if a member below it is missing, or `--param` gives another number.
        """
        rule, counts = group.rule, dict[str, int]()
        if rule.takes_single and all(group.members):  # complete, and without such variables
            return counts
        for pattern, names, members in zip(rule.left, rule.stacked, group.members, strict=True):
            for index, name in enumerate(names):
                highest = max((numbers[index] for numbers in members), default=-1)
                counts[name] = max(counts.get(name, 0), 1 + highest, pattern.count_choices(name))
        for pattern, names, members in zip(rule.left, rule.stacked, group.members, strict=True):
            missing = find_first_missing(members, [counts[name] for name in names])
            if missing is not None:
                values = {**group.values, **dict(zip(names, missing, strict=True))}
                key = pattern.fill(values)
                is_in_source = key in self._plan.source
                state = "is used by another rule" if is_in_source else "is missing"
                text = f"{printable(key)!r} {state}, but belongs to {listed(group.keys)}"
                raise self._usage_error(f"{text}: {rule.text}")
        for name, count in counts.items():
            if (given := self._params.get(name, count)) != count:
                text = f"the file has {count:,} of {{{name}}}, but --param gives {given:,}"
                raise self._usage_error(f"{text}: {rule.text}")
        return counts

    def _check_alike(self, group: _Members[T], firsts: Sequence[_Member[T]]) -> None:
        """Refuse members of one key with different shapes, and a group with different dtypes.

        `firsts` are the first member of each key.

        Raises:
            UsageError: naming two that differ.
        """
        for first, members in zip(firsts, group.members, strict=True):
            for member in members.values():
                differs = member.tensor.sizes != first.tensor.sizes
                if differs or member.tensor.dtype != firsts[0].tensor.dtype:
                    other = first if differs else firsts[0]
                    text = ", but ".join(
                        f"{printable(m.key)!r} is {m.tensor.dtype} {list(m.tensor.sizes)}"
                        for m in (member, other)
                    )
                    raise self._usage_error(f"{text}, in the same group: {group.rule.text}")

    def _make_tensors(
        self,
        group: _Members[T],
        firsts: Sequence[_Member[T]],
        use: Use,
        counts: Mapping[str, int],
        sizes: dict[str, int],
    ) -> list[list[tuple[str, T]]]:
        """Return the tensors that an equation makes of a group, for each key on the right.

        Without an equation, all members must be equal, and the first gets all keys of the right
        side. With one, members of different strides are put in row-major order, so that one
        template of pieces serves all.

        Arguments are the first member for each key on the left, the number of values of each
        stacked variable, and all known sizes of axes, which the equation completes.

        Raises:
            Misfit: if the equation does not fit their shapes.
        """
        rule, maker = group.rule, self._maker
        if use.equation == NO_EQUATION:
            self._check_same(group, axes=frozenset())
            self._note_needed(counts, sizes=counts)  # the way back makes this many equal tensors
            source_tensor = firsts[0].tensor
            target_numbers = self._list_numbers(rule.unstacked[0], rule.right[0], sizes)
            keys = [self._make_key(group, 0, numbers) for numbers in target_numbers]
            return [[(key, source_tensor) for key in keys]]
        equation = rule.equations[use.equation]
        tensors = [
            {
                numbers: maker.prepare(member.key, member.tensor)
                for numbers, member in group_members.items()
            }
            for group_members in group.members
        ]
        for side, group_members in enumerate(tensors):
            if len({tensor.stride for tensor in group_members.values()}) > 1:
                tensors[side] = {
                    numbers: maker.prepare(group.members[side][numbers].key, tensor, in_rows=True)
                    for numbers, tensor in group_members.items()
                }
        views = [next(iter(group_members.values())) for group_members in tensors]
        template_key = (use, *((view.sizes, view.stride) for view in views), *counts.items())
        template = self._templates.get(template_key)
        if template is None:
            template = self._make_template(rule, equation, views, counts, sizes)
            self._templates[template_key] = template
        if not rule.takes_single:  # members along axes that the result lacks must be equal
            self._check_same(group, equation.right_axes)
        made: list[list[tuple[str, T]]] = [[] for _ in template.shapes]
        for side, (shape, pieces_by_numbers) in enumerate(
            zip(template.shapes, template.pieces, strict=True)
        ):
            for numbers, pieces in pieces_by_numbers.items():
                key = self._make_key(group, side, numbers)
                members = [tensors[piece.key_index][piece.member] for piece in pieces]
                places = tuple([member.place for member in members])
                identity = id(template), side, numbers, places
                tensor = self._made_by_identity.get(identity)
                if tensor is None:  # Tied tensors stay tied.
                    tensor = maker.make(key, shape, pieces, members, identity)
                    self._made_by_identity[identity] = tensor
                made[side].append((key, tensor))
        return made

    def _make_key(self, group: _Members[T], side: int, numbers: tuple[int, ...]) -> str:
        """Return the key of a result: pattern `side` on the right, filled with its numbers."""
        names, pattern = group.rule.unstacked[side], group.rule.right[side]
        key = pattern.fill({**group.values, **dict(zip(names, numbers, strict=True))})
        if len(key) > MAX_KEY:
            raise self._usage_error(f"a key would have {len(key):,} characters: {group.rule.text}")
        return key

    def _check_same(self, group: _Members[T], axes: frozenset[str]) -> None:
        """Refuse members that differ although the equation has no axis for their variables.

        For example, ranks with copies of a norm: only the copy of the first rank is taken.
        """
        # For each key on the left: its stacked variables, and the members by these numbers.
        for variables, members in zip(group.rule.stacked, group.members, strict=True):
            if all(variable in axes for variable in variables):
                continue
            for numbers, member in members.items():
                first_numbers = tuple(
                    number if variable in axes else 0
                    for variable, number in zip(variables, numbers, strict=True)
                )
                first = members[first_numbers]
                if member is not first and not self._maker.is_same(first.tensor, member.tensor):
                    keys = f"{printable(first.key)!r} and {printable(member.key)!r}"
                    text = f"{keys} differ, but the recipe expects the same elements"
                    raise self._usage_error(f"{text}: {group.rule.text}")

    def _list_numbers(
        self, names: Sequence[str], pattern: Pattern, sizes: Mapping[str, int]
    ) -> list[tuple[int, ...]]:
        """Return all combinations of values for `names`, the variables that only the target has.

        Raises:
            Misfit: if nothing defines their number: neither choices in the key, nor an axis or
                parameter of this name.
        """
        counts = []
        for name in names:
            count = pattern.count_choices(name) or sizes.get(name)
            if count is None:
                raise Misfit(f"the number of {{{name}}} is unknown", axes=(name,))
            counts.append(count)
        self._count_pieces(prod(counts))  # refuses too many, before they are listed
        return list(product(*map(range, counts)))

    def _count_pieces(self, count: int) -> None:
        """Count pieces and tensors before they use memory.

        Raises:
            LimitExceeded: if there are too many.
        """
        self._n_pieces += count
        if self._n_pieces > _MAX_PIECES:
            text = f"the recipe creates more than {_MAX_PIECES:,} tensors or parts of tensors"
            raise LimitExceeded(text, file=self._file, hint="give smaller numbers with --param")

    def _make_template(
        self,
        rule: RecipeRule,
        equation: Equation,
        views: Sequence[T],
        counts: Mapping[str, int],
        sizes: dict[str, int],
    ) -> _Template:
        """Return the pieces of an equation for tensors of the shapes of `views`.

        `counts` has the number of values of each stacked variable. `sizes` has the known sizes of
        axes, and gets those that the equation and the shapes define.

        Each part on the left goes to its part on the right, once for each member on the left and
        each tensor on the right: a variable of the key is an axis that is cut into tensors.

        Raises:
            Misfit: if the equation does not fit the shapes.
        """
        shapes, strides = [view.sizes for view in views], [view.stride for view in views]
        equation = equation.expand_ellipsis([len(shape) for shape in shapes])
        equation.solve(shapes, sizes)
        targets = equation.compute_right_shapes(sizes)
        if any(prod(shape) > MAX_ELEMENTS for shape in targets):
            raise Misfit("the result would have too many elements")
        target_strides = [row_major_strides(shape) for shape in targets]
        pieces: list[dict[tuple[int, ...], list[Piece]]] = [
            {numbers: [] for numbers in self._list_numbers(names, pattern, sizes)}
            for names, pattern in zip(rule.unstacked, rule.right, strict=True)
        ]
        for source, source_part, target, target_part in rule.pair_parts(equation, sizes):
            stacked, unstacked = rule.stacked[source], rule.unstacked[target]
            axes = _list_common_axes(
                source_part, strides[source], target_part, target_strides[target]
            )
            part_source_start = _dot(source_part.starts, strides[source])
            part_target_start = _dot(target_part.starts, target_strides[target])
            # A stacked variable of the key is an axis of the target, where each member has its
            # place; one that only the target has is an axis of the source, cut into its tensors.
            member_steps = [_step_of(target_part, name, target_strides[target]) for name in stacked]
            target_steps = [_step_of(source_part, name, strides[source]) for name in unstacked]
            member_ranges = [
                range(counts[name]) if name in target_part.axes else range(1) for name in stacked
            ]
            self._count_pieces(prod(map(len, member_ranges)) * len(pieces[target]))
            for member in product(*member_ranges):
                target_start = part_target_start + _dot(member, member_steps)
                for numbers, piece_list in pieces[target].items():
                    source_start = part_source_start + _dot(numbers, target_steps)
                    piece_list.append(Piece(source, member, source_start, target_start, axes))
        self._check_way_back(rule, equation, targets, counts, sizes)
        return _Template(targets, pieces)

    def _check_way_back(
        self,
        rule: RecipeRule,
        equation: Equation,
        targets: Sequence[Shape],
        counts: Mapping[str, int],
        sizes: Mapping[str, int],
    ) -> None:
        """Note the parameters that the inverse recipe needs, and padding that is cut off.

        These are numbers of members that no axis has, and sizes that the inverse cannot solve.
        """
        parts = (part for tensor in equation.list_left_parts(sizes) for part in tensor)
        if any(part.is_padding and part.numel for part in parts):
            self._plan.has_padding = True
        self._note_needed([name for name in counts if name not in equation.right_axes], counts)
        try:
            counts_of_target = {name: sizes[name] for names in rule.unstacked for name in names}
            equation.invert().solve(targets, {**self._params, **counts_of_target})
        except Misfit as misfit:
            # The name of padding begins with an underscore.
            unsolved = [name for name in misfit.axes if name in counts or name.startswith("_")]
            self._note_needed(unsolved or misfit.axes, sizes)

    def _note_needed(self, names: Iterable[str], sizes: Mapping[str, int]) -> None:
        """Note parameters for the way back; one with two sizes is disputed."""
        for name in names:
            if self._plan.needed.setdefault(name, sizes[name]) != sizes[name]:
                self._plan.disputed.add(name)

    def _misfit_error(
        self,
        group: _Members[T],
        firsts: Sequence[_Member[T]],
        equation: Equation,
        misfit: Misfit,
        sizes: Mapping[str, int],
    ) -> UsageError:
        """Return the error about tensors that do not fit an equation, with all sizes.

        A misfit concerns one tensor, or all of the group if its `tensor` is None. The hint asks for
        the first size that is unknown.
        """
        concerned = firsts if misfit.tensor is None else [firsts[misfit.tensor]]
        which = ", ".join(
            f"{printable(member.key)!r} of shape {list(member.tensor.sizes)}"
            for member in concerned[:4]
        )
        names = sorted(equation.axes.union(*group.rule.unstacked))
        known_sizes = ", ".join(f"{name} {sizes.get(name, '?')}" for name in names)
        text = f"{which} {'do' if len(concerned) > 1 else 'does'} not fit {equation.text!r}"
        hint = f"add --param {misfit.axes[0]}=NUMBER" if misfit.axes else None
        return self._usage_error(f"{text}: {misfit.text}; {known_sizes or 'no axes'}", hint)


def _dot(numbers: Iterable[int], steps: Iterable[int]) -> int:
    """Return the sum of the products of numbers and steps."""
    return sum(number * step for number, step in zip(numbers, steps, strict=True))


def _list_common_axes(
    source_part: Part, source_strides: Shape, target_part: Part, target_strides: Shape
) -> tuple[BoxAxis, ...]:
    """Return the axes that two parts have in common, merged, with their steps in both tensors."""
    return merge_axes(
        [
            BoxAxis(
                axis.size,
                _step_of(source_part, name, source_strides),
                _step_of(target_part, name, target_strides),
            )
            for name, axis in source_part.axes.items()
            if name in target_part.axes
        ]
    )


def _step_of(part: Part, name: str, strides: Shape) -> int:
    """Return the distance in the tensor between neighbors along an axis, or 0 without the axis.

    `strides` are those of the tensor, in elements.
    """
    axis = part.axes.get(name)
    return 0 if axis is None else axis.step * strides[axis.dimension]


def find_left_over(recipe: Recipe, keys: Iterable[str]) -> set[str] | None:
    """Return the keys that no rule of a recipe takes, or None if a rule matches no key.

    Only keys are read: rules are applied without shapes, and optional rules may match nothing. Keys
    of the result that still contain a `/`, although the target has no paths, are added.
    """
    is_path = recipe.uses_paths
    current = [
        key
        for key in keys
        if not any(pattern.covers(key, is_path=is_path) for pattern in recipe.drop.source)
    ]
    for key, tied_key in recipe.tied.source.items():
        if key not in current and tied_key in current:
            current.append(key)  # a conversion takes the tensor of the other key for it
    untouched = set(current)  # keys before the first pass
    for rules in recipe.passes:
        used, created = set[int](), dict[str, None]()
        for key in current:
            match = _find_rule(rules, key)
            if match is None:
                created[key] = None
                continue
            rule, values = match
            used.add(rule.number)
            # A rule that only keeps a key unchanged for the next pass is no match.
            if not recipe.keeps_for_next_pass(rule):
                untouched.discard(key)
            for pattern, names in zip(rule.right, rule.unstacked, strict=True):
                # The number of results is unknown without shapes, so the first stands for all.
                created[pattern.fill({**values, **dict.fromkeys(names, 0)})] = None
        if any(rule.number not in used and not rule.is_optional for rule in rules):
            return None
        current = list(created)
    return untouched | {*recipe.find_unfinished(current)}


def _find_rule(rules: Iterable[RecipeRule], key: str) -> tuple[RecipeRule, Values] | None:
    """Return the first rule that matches a key, with the values of its variables, or None."""
    for rule in rules:
        for pattern in rule.left:
            shifts = (variable.shift.lstrip("-") for variable in pattern.variables)
            if any(shift and not shift.isdigit() for shift in shifts):
                continue  # the shift is a parameter, which is unknown here
            values = pattern.match(key)
            if values is not None:
                return rule, values
    return None
