"""The way from the names of a file to those of a model: what comes off either side as a whole.

Both sides are brought to bare names, and of the ways to do that the one is taken under which most
names of the model are met by tensors of their shape. Nothing is matched before: a name that is
equal on both sides may be another tensor's (`model.w` of a model whose root has a `w` too, saved
with `model.` before all names).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property

from ckptool.matching.slots import Slot, fits
from ckptool.matching.spelling import Respelled, has_old, respellings
from ckptool.matching.subtrees import Fits, Moved, has_twin, moved, whole_part
from ckptool.matching.unwrapping import Bare, bare_forms, common_front, is_average_counter

__all__ = ["Side", "Way", "chosen_way", "without_front"]

_DEEPEST = 16
"""Components of a common front that are looked at."""
_Finder = Callable[[Mapping[str, Slot], Mapping[str, Slot], Fits], Moved | None]
BESIDE = "."
"""Before the bare names of other parts: no module has a name without letters."""


class Side:
    """Names, and what comes off them: a form without wrappers, then a front of components."""

    def __init__(
        self, slots: Mapping[str, Slot], form: Bare, front: str = "", *, is_part: bool = False
    ) -> None:
        """`front`: with its dot; off the names that begin with it.

        `is_part`: all others are of another part, whatever they are called.
        """
        self.slots, self.form, self.front = slots, form, front
        self._others = BESIDE if is_part else ""

    @cached_property
    def names(self) -> dict[str, str]:
        """The names without wrappers and front, each with the whole name."""
        form, front, cut = self.form, self.front, len(self.front)
        if not form:
            bare = dict(zip(self.slots, self.slots, strict=True))
        elif len(form) == len(self.slots):
            bare = dict(zip(form.values(), form, strict=True))
        else:
            bare = {form.get(name, name): name for name in self.slots}
        if front:
            bare = {
                (short[cut:] if short.startswith(front) else self._others + short): name
                for short, name in bare.items()
            }
        return bare

    @property
    def is_sound(self) -> bool:
        """Whether no two names became one."""
        return len(self.names) == len(self.slots)

    @cached_property
    def bare(self) -> dict[str, Slot]:
        """What stands under the bare names."""
        if not (self.form or self.front):
            return dict(self.slots)
        return {short: self.slots[name] for short, name in self.names.items()}

    @cached_property
    def has_old(self) -> bool:
        """Whether names may be in an old spelling."""
        return has_old(self.slots)

    @cached_property
    def respelled(self) -> dict[str, Respelled]:
        """Bare names in an old spelling, each with the one of today."""
        return respellings(self.names, self.bare) if self.has_old else {}

    @cached_property
    def today(self) -> dict[str, str]:
        """The same, each with its name as it is spelled today."""
        return {name: how.of(name) for name, how in self.respelled.items()}

    @cached_property
    def loose(self) -> dict[str, str]:
        """The same as `names`, also as they are spelled today."""
        if not self.today:
            return self.names
        both = dict(self.names)
        for name, new in self.today.items():
            both.setdefault(new, self.names[name])
        return both

    def common_front(self) -> list[str]:
        """The components with which all names begin, an average's counter aside."""
        names: Collection[str] = self.names
        if any("n_averaged" in name for name in names):
            names = [name for name in names if not is_average_counter(name)]
        return common_front(names).split(".", _DEEPEST)[:-1]

    @cached_property
    def outer_front(self) -> str:
        """What was taken off in front of every name, whatever went inside."""
        if not (self.form or self.front):
            return ""
        fronts = {
            name.removesuffix(without_front(name, short))
            for short, name in self.names.items()
            if not is_average_counter(short)
        }
        return fronts.pop() if len(fronts) == 1 else ""

    def without(self, front: Iterable[str], *, is_part: bool = False) -> Side:
        """The same with other components off in front."""
        path = "".join(f"{part}." for part in front)
        shorter = Side(self.slots, self.form, path, is_part=is_part)
        vars(shorter)["has_old"] = self.has_old
        return shorter


class Way:
    """How the bare names of both sides are made."""

    def __init__(
        self,
        have: Side,
        want: Side,
        unsure: frozenset[str] = frozenset(),
        rivals: tuple[str, ...] = (),
    ) -> None:
        """`unsure`: bare names on both sides that may not be the same tensor.

        That is where two fronts are as likely: `rivals`.
        """
        self.have, self.want, self.unsure, self.rivals = have, want, unsure, rivals

    @cached_property
    def score(self) -> int:
        """How many names of the model are met."""
        mine, own, wanted = self.have.loose, self.have.slots, self.want.slots
        names = self.want.names
        met = 0
        if not mine.keys().isdisjoint(names):
            for name, full in names.items():
                if (at := mine.get(name)) is not None:
                    slot, found = wanted[full], own[at]
                    met += slot.shape == found.shape or fits(found, slot)
        return met + sum(
            fits(own[mine[new]], wanted[names[name]])
            for name, new in self.want.today.items()
            if name not in mine and new in mine
        )

    @property
    def is_complete(self) -> bool:
        """Whether every name of the model is met."""
        return self.score == len(self.want.slots)

    @property
    def is_likely(self) -> bool:
        """Whether the greater part of a side is met, or two modules that are not of a list.

        A lone one may be of a part that is made alike, and a layer of another list.
        """
        if 2 * self.score >= min(len(self.have.slots), len(self.want.slots)):
            return True
        mine, names = self.have.loose, self.want.names
        met = (
            name
            for name, full in names.items()
            if name in mine and fits(self.have.slots[mine[name]], self.want.slots[full])
        )
        return len({name.rpartition(".")[0] for name in met if not name[0].isdigit()}) > 1

    @property
    def in_doubt(self) -> Way:
        """The same, but what has one name on both sides may be another tensor."""
        have, want = self.have, self.want
        return Way(have, want, frozenset(want.names.keys() & have.names.keys()))

    @property
    def has_twin(self) -> bool:
        """Whether all that is met is as well below some path of the other side, and not met."""
        other = self.want if self.have.front else self.have
        if self.score >= len(other.slots):
            return False
        mine, wanted = self.have.bare, self.want.bare
        met = [n for n, slot in wanted.items() if n in mine and fits(mine[n], slot)]
        if self.have.front:
            return has_twin(met, mine, wanted, fits)
        return has_twin(met, wanted, mine, lambda slot, found: fits(found, slot))


def without_front(name: str, bare: str) -> str:
    """The name without those of its lost components that are before all else."""
    if name.endswith(bare):
        return bare
    if bare.startswith(BESIDE):
        return name
    first, at = bare.partition(".")[0], 0
    while name[at:].partition(".")[0] != first:
        at = name.index(".", at) + 1
    return name[at:]


def chosen_way(
    have: Mapping[str, Slot], want: Mapping[str, Slot], *, is_ruled: bool = False
) -> Way:
    """The way under which most of `want` is met; of equal ones the one that changes less.

    Where none meets anything and wrappers differ they come off: other names hide behind them.
    A front stays where what is below it may as well be a part of the other side. `is_ruled`: the
    user's rules have given names, which mean what they say.
    """
    sides = [list(_forms(slots)) for slots in (have, want)]
    ways = [Way(mine, wanted) for mine in sides[0] for wanted in sides[1]]
    best = max(ways, key=lambda way: way.score)
    if best.is_complete:
        return best
    if not best.score and _wraps(ways[-1].have) != _wraps(ways[-1].want):
        best = ways[-1]
    fronts = (way for way in _fronts(ways[-1]) if way.is_likely)
    found = max([best, *fronts], key=lambda way: way.score)
    if found is not best:
        if found.has_twin:
            return best.in_doubt
        best = found
    if not best.score or best.is_complete:
        return best
    part = None if is_ruled else _by_front(best, whole_part, is_part=True)
    return part or _by_front(best, moved) or best


def _forms(slots: Mapping[str, Slot]) -> Iterator[Side]:
    old = has_old(slots)
    for form in bare_forms(slots):
        side = Side(slots, form)
        vars(side)["has_old"] = old
        yield side


def _wraps(side: Side) -> str:
    """What the wrappers in front of the names are, where there are no others."""
    fronts = {name[: -len(short)] for name, short in side.form.items() if name.endswith(short)}
    return fronts.pop() if len(fronts) == 1 else "".join(side.form)


def _fronts(bare: Way) -> Iterator[Way]:
    """What all names of one side begin with taken off, all of it or its first components."""
    have, want = bare.have, bare.want
    for side, other, is_mine in ((have, want, True), (want, have, False)):
        front = side.common_front()
        for end in range(len(front), 0, -1):
            off, rest = (
                "".join(f"{part}." for part in some) for some in (front[:end], front[end:])
            )
            near = [name for name in other.loose if name.startswith(rest)] if rest else other.loose
            if not side.loose.keys().isdisjoint(map(off.__add__, near)):
                shorter = side.without(front[:end])
                if shorter.is_sound:
                    yield Way(shorter, want) if is_mine else Way(have, shorter)


def _by_front(best: Way, find: _Finder, *, is_part: bool = False) -> Way | None:
    """The way by which more is met with a front off one side, `is_part`: and all else beside.

    Then some names that are equal on both sides are different tensors.
    """
    have, want = best.have, best.want
    if (have.front or want.front) and not is_part:
        return None
    off = find(have.bare, want.bare, fits)
    on = find(want.bare, have.bare, lambda wanted, mine: fits(mine, wanted))
    found = max(filter(None, (off, on)), key=lambda moved: moved.score, default=None)
    if found is None or found.score <= best.score:
        return None
    if found.rivals:
        return Way(have, want, frozenset(found.contested), (found.front, *found.rivals))
    side = have if found is off else want
    path = (side.front + found.front).removesuffix(".")
    bare = side.without([path], is_part=is_part)
    way = Way(bare, want) if side is have else Way(have, bare)
    return way if bare.is_sound else None
