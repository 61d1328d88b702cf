"""Which name of a file is which of a model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptool.matching.again import Again
from ckptool.matching.change_rules import Others, below, escaped, moved_head, regex_of
from ckptool.matching.closed import Closed
from ckptool.matching.counters import BATCHES, beside, uncounted
from ckptool.matching.counting import casts_of, counted
from ckptool.matching.forms import reformed
from ckptool.matching.numbering import Move, moved_lists, respelled_lists
from ckptool.matching.renamings import renamings, rewritten
from ckptool.matching.report import Ambiguity, MatchReport, Mismatch
from ckptool.matching.ruling import ruled_names
from ckptool.matching.shifts import moved_parts
from ckptool.matching.slots import Slot, fits
from ckptool.matching.spelling import Respelled, spelled, today
from ckptool.matching.stations import Stations
from ckptool.matching.unwrapping import is_average_counter
from ckptool.matching.ways import Side, Way, chosen_way
from ckptool.transforms.name_rules import Rule, regex_rule

if TYPE_CHECKING:
    from ckptool.matching.inference import Inferred, InferredRule

__all__ = ["Match", "matched"]

_MOST_ROUNDS = 8
"""How often rules are looked for: each may leave names that fit together only now."""
_NOT_COUNTED = "files from before torch 0.4.1 have no such counter"
_NO_LAYER = "torch asks for no counter of a layer that is not in the file"
_NO_AVERAGE = "the file is of no average"
_MEAN = "running_mean"
_CUT_SHORT = "the names left over may be called in too many ways: not all were looked into"


class Match(NamedTuple):
    """Which name of the file goes where, and the report of it."""

    pairs: dict[str, str]
    """Name in the model to name in the file, of what is to be loaded, in the model's order.

    Tied names that only one of is in the file all have that one. What is mismatched is not here.
    """
    renamed: dict[str, str]
    """Every name of the file to what the rules make of it, matched or not: for files written."""
    report: MatchReport
    placed: Mapping[str, str] = MappingProxyType({})
    """Names of the file that fit nothing, in modules that are closed: each as the model would
    call it."""
    beyond: Mapping[str, str] = MappingProxyType({})
    """Of those, what the modules' own loading takes: as they call it, to the name in the file."""
    filled: frozenset[str] = frozenset()
    """Names of the model that nothing of the file has, and the modules' own loading fills."""
    untried: str = ""
    """The class whose own loading may take more, which could not be tried; empty: none."""
    again: Again | None = None
    """What the report would be with more rules."""


def matched(
    have: Mapping[str, Slot],
    want: Mapping[str, Slot],
    *,
    rules: Iterable[Rule] = (),
    metadata: Mapping[str, Any] | None = None,
    closed: Collection[str] = (),
    file: str = "",
    model: str = "",
) -> Match:
    """Match the names `have` of a file with those that a model wants.

    `rules` are the user's, applied to the file's names before anything else. `metadata` is the
    `_metadata` of the file's state dict: the versions say which counters old files lack. `closed`
    are paths of the model's modules in which the file's names are meant as they are.

    Raises:
        NameCollision: the user's rules make two names one.
        UsageError: the user's rules leave nothing of a name.
    """
    rules = list(rules)

    def again(texts: Sequence[str]) -> MatchReport:
        if not texts:
            return report
        every = [*rules, *map(regex_rule, texts)]
        return matched(have, want, rules=every, metadata=metadata, closed=closed, file=file).report

    ruled, idle = ruled_names(have, rules, file)
    named = {ruled[own]: have[own] for own in have} if ruled else have
    way = chosen_way(named, want, is_ruled=bool(ruled))
    own = {new: own for own, new in ruled.items()}
    matching = _Matching(have, want, way, own, Closed(closed, way.want))
    matching.meet()
    matching.infer()
    tied = matching.tie()
    kept, left_out = matching.excused(metadata)
    direct = {**matching.wrong, **matching.direct}
    still = [name for name, own in matching.direct.items() if name == own]
    found = renamings(matching.stations(ruled), still, rules, matching.rules, have)
    missing = matching.missing
    pairs = {name: matching.pairs[name] for name in want if name in matching.pairs}
    report = MatchReport(
        file=file,
        model=model,
        missing_keys=[name for name in missing if name not in kept],
        unexpected_keys=[own for own in matching.unused if own not in left_out],
        mismatched=matching.mismatches(),
        renamed=found,
        cast=casts_of(pairs, have, want),
        tied=tied,
        ambiguous=matching.ambiguities(),
        moved=tuple(map(str, matching.moved())),
        respelled=matching.respelled(),
        reformed=matching.reformed(),
        left_out=tuple(left_out.items()),
        kept=tuple(kept.items()),
        notes=(*idle, *matching.notes),
        **counted(want, pairs, kept),
    )
    placed = matching.placed()
    names = {**placed, **{own: name for name, own in direct.items()}}
    renamed = rewritten(have, names, found, rules)
    more = Again(again, have, want, matching.renumbering)
    return Match(pairs, renamed, report, placed, again=more)


class _Matching:
    """What of a model is met by what of a file, as it grows."""

    def __init__(
        self,
        have: Mapping[str, Slot],
        want: Mapping[str, Slot],
        way: Way,
        own: Mapping[str, str],
        closed: Closed,
    ) -> None:
        """Bring both sides to one spelling.

        `own`: names that the user's rules gave, each with the name in the file; empty without.
        """
        self.have, self.want, self.way, self.closed = have, want, way, closed
        self.old_mine = closed.outside(_old(way.have, way.want))
        self.old_wanted = closed.outside(_old(way.want, way.have))
        self.mine = today(way.have.names, self.old_mine)
        self.wanted = today(way.want.names, self.old_wanted)
        self.files = self.mine
        """Bare names of the file, each with the whole one, before the rules."""
        if own:
            self.files = {name: own[full] for name, full in self.mine.items()}
        self._respelled = {self.files[how.of(name)] for name, how in self.old_mine.items()}
        """What the file has in an old spelling: of a `form` none is."""
        self.pairs: dict[str, str] = {}
        """Name of the model to name in the file."""
        self.direct: dict[str, str] = {}
        """The same without those that only a tie made."""
        self.wrong: dict[str, str] = {}
        """The same of what does not fit by its shape."""
        self.met: dict[str, str] = {}
        """All names of which it is known what they are, bare ones: the model's to the file's. Also
        of those that are no tensor, and wanted as one, or of another parametrization."""
        self.rules: list[InferredRule] = []
        self._found: list[Ambiguity] = []
        self.notes: tuple[str, ...] = ()
        self._others: Others | None = None

    def meet(self) -> None:
        """Pair names that are equal."""
        unsure, files, wanted = self.way.unsure, self.files, self.wanted
        self.met = {name: name for name in wanted if name in files and name not in unsure}
        self._pair({wanted[name]: files[name] for name in self.met})

    def _pair(self, names: Mapping[str, str]) -> None:
        """Pair whole names of the model with those of the file, as far as shape and form fit."""
        for name, own in names.items():
            wanted, found = self.want[name], self.have[own]
            if wanted.form and own in self._respelled:
                continue
            if fits(found, wanted):
                self.pairs[name] = own
            elif found.shape is not None:
                self.wrong[name] = own

    def infer(self) -> None:
        """Pair names by the rules that those left over suggest."""
        if not self._may_go_on():
            return
        # Imported here: of most files wrappers and a front are all that differs.
        from ckptool.matching.inference import applied, inferred
        from ckptool.matching.repeated import inferred_by_few

        mine = _told(self.way.have, self.old_mine)
        wanted = _told(self.way.want, self.old_wanted)
        self.met = {name: own for name, own in self.met.items() if name in wanted}
        for _ in range(_MOST_ROUNDS):
            args = mine, wanted, self.met
            found = inferred_by_few(*args) or inferred(*args)
            below = self.closed.below
            self._found = [one for one in found.ambiguous if not any(map(below, one.names))]
            self.notes = (_CUT_SHORT,) * found.is_cut_short
            if not self._accept(found):
                renamed, met = applied(mine, self.met)  # names are equal now that were not
                if renamed is mine or not self._accept(inferred(renamed, wanted, met)):
                    return
            if not self._may_go_on():
                return

    def _may_go_on(self) -> bool:
        """Whether anything that is left of the one has a shape for anything left of the other."""
        have, want, used = self.have, self.want, set(self.met.values())
        left = {want[full].shape for name, full in self.wanted.items() if name not in self.met}
        found = {have[own].shape for name, own in self.files.items() if name not in used}
        if None in left or None in found or not left.isdisjoint(found):
            return bool(left and found)
        return () in left and (1,) in found

    def _accept(self, found: Inferred) -> bool:
        """Take over new pairs; whether there were any."""
        before, taken = len(self.met), set(self.met.values())
        for rule in found.rules:
            new = self._take(rule.pairs, taken)
            if new:
                self.rules.append(rule._replace(pairs=new))
        self._take(found.near, taken)
        return len(self.met) > before

    def _take(self, pairs: Mapping[str, str], taken: set[str]) -> dict[str, str]:
        """Pair bare names of which neither is met yet; those that were, as whole names."""
        if self.closed.forbids(pairs):
            return {}
        found = {
            name: mine for name, mine in pairs.items() if name not in self.met and mine not in taken
        }
        new = {self.wanted[name]: self.files[mine] for name, mine in found.items()}
        self._pair(new)
        self.met.update(found)
        taken.update(found.values())
        return new

    def tie(self) -> tuple[tuple[str, ...], ...]:
        """Give all names of one tensor what one of them has; those tensors that are loaded."""
        self.direct = dict(self.pairs)
        groups: dict[Any, list[str]] = {}
        for name, slot in self.want.items():
            if slot.tie is not None:
                groups.setdefault(slot.tie, []).append(name)
        tied = []
        for names in groups.values():
            source = next((self.pairs[name] for name in names if name in self.pairs), None)
            if source is None or len(names) == 1:
                continue
            for name in names:
                if name not in self.wrong:
                    self.pairs.setdefault(name, source)
            tied.append(tuple(names))
        return tuple(tied)

    def excused(self, metadata: Mapping[str, Any] | None) -> tuple[dict[str, str], dict[str, str]]:
        """Counters that only one side has, each with why that is no fault: the model's, the file's.

        Torch's normalisations ask for none in an old state, and frozen ones take none.
        """
        missing = self.missing
        free = uncounted(missing, self.pairs, metadata)
        kept = {
            name: self._why_uncounted(name) if name in free else _NO_AVERAGE
            for name in missing
            if (name in free and beside(name) in self.want) or is_average_counter(name)
        }
        unused = self.unused
        near = {own for name, own in self.pairs.items() if unused and name.endswith(_MEAN)}
        left_out = {}
        for own in unused:
            if is_average_counter(own):
                left_out[own] = "an AveragedModel counted its models there, and this is none"
            elif own.rpartition(".")[2] == BATCHES and beside(own) in near:
                left_out[own] = "the model's normalisation counts no batches"
        return kept, left_out

    def _why_uncounted(self, counter: str) -> str:
        near = beside(counter)
        return _NOT_COUNTED if near in self.pairs or near in self.wrong else _NO_LAYER

    @cached_property
    def missing(self) -> list[str]:
        """Names of the model that nothing is known of, nor of what they are tied to: at the end."""
        return [n for n in self.want if n not in self.pairs and n not in self.wrong]

    @cached_property
    def unused(self) -> list[str]:
        """Names of the file that nothing takes, at the end."""
        taken = {*self.pairs.values(), *self.wrong.values()}
        return [own for own in self.have if own not in taken]

    def placed(self) -> dict[str, str]:
        """Names of the file that nothing takes, in closed modules, each as the model's."""
        if not self.closed:
            return {}
        unused = set(self.unused)
        mine = {name: own for name, own in self.files.items() if own in unused}
        return {mine[name]: full for name, full in self.closed.placed(mine).items()}

    def moved(self) -> tuple[Move, ...]:
        """Lists whose numbers may mean other layers."""
        names = self.files, self.wanted, *self._left
        return moved_lists(*names) or moved_parts(*names) if all(self._left) else ()

    def renumbering(self) -> list[str]:
        """Rules that give such lists of the file the model's numbers, in their order."""
        front = self.way.have.outer_front
        return [below(front, rule) for move in self.moved() for rule in move.rules(self.files)]

    def respelled(self) -> tuple[str, ...]:
        """Lists that are called otherwise below their numbers, in words."""
        return respelled_lists(*self._left) if all(self._left) else ()

    def reformed(self) -> tuple[tuple[str, str], ...]:
        """What the file has in another form, and what helps, in words."""
        names, whole = (self.wanted, self.met), not self._found
        return reformed(*self._left, *names, as_a_whole=whole) if all(self._left) else ()

    @cached_property
    def _left(self) -> tuple[dict[str, Slot], dict[str, Slot]]:
        """What of either side nothing meets, by its bare names."""
        unused, missing = set(self.unused), set(self.missing)
        return (
            {name: self.have[full] for name, full in self.files.items() if full in unused},
            {name: self.want[full] for name, full in self.wanted.items() if full in missing},
        )

    def mismatches(self) -> tuple[Mismatch, ...]:
        """What is of another shape, in the order of the model."""
        return tuple(
            Mismatch(name, own, self.have[own].shape or (), self.want[name].shape or ())
            for name in self.want
            if (own := self.wrong.get(name)) is not None
        )

    def ambiguities(self) -> tuple[Ambiguity, ...]:
        """What is still open, under the names of the file and of the model."""
        taken = {*self.pairs, *self.pairs.values(), *self.wrong, *self.wrong.values()}
        every = self._found or ([self._contested()] if self.way.unsure else [])
        open_ones = []
        for one in every:
            names = tuple(self._full(name) for name in one.names)
            candidates = tuple(self._full(name, of_model=True) for name in one.candidates)
            if not taken.issuperset((*names, *candidates)):
                open_ones.append(Ambiguity(names, candidates, tuple(self._for_file(one))))
        return tuple(open_ones)

    def _for_file(self, one: Ambiguity) -> Iterator[str]:
        """Its rules as they are for the names of the file, whose wrappers are still there."""
        own = {name: self.mine[name] for name in one.names if name in self.mine}
        front = self.way.have.outer_front
        for rule in one.rules:
            apply = regex_rule(rule).apply
            changes = [
                (full, front + moved_head(full.removeprefix(front), name, new))
                for name, full in own.items()
                if (new := apply(name)) is not None and new in self.wanted
            ]
            if self._others is None:
                self._others = Others(self.way.have.slots)
            yield regex_of(changes, self._others, proposed=[below(front, rule)]) or rule

    def _full(self, name: str, *, of_model: bool = False) -> str:
        sides = (self.wanted, self.files) if of_model else (self.files, self.wanted)
        return next((side[name] for side in sides if name in side), name)

    def _contested(self) -> Ambiguity:
        names = tuple(sorted(self.way.unsure))
        rules = tuple(f"^{escaped(front)}=>" for front in self.way.rivals)
        fronts = [f"{front}{name}" for front in self.way.rivals for name in names]
        return Ambiguity(tuple(n for n in fronts if n in self.mine), names, rules)

    def stations(self, ruled: Mapping[str, str]) -> Stations:
        """How each name of the file becomes the model's, of those that change."""
        both = ((name, self.direct.get(name) or self.wrong.get(name)) for name in self.want)
        pairs = {name: own for name, own in both if own is not None and own != name}
        return Stations.of(pairs, ruled, self.way, self.old_mine, self.old_wanted)


def _told(side: Side, old: Mapping[str, Respelled]) -> dict[str, Slot]:
    """What stands under the names, but for the counters of averages, which tell nothing."""
    found = today(side.bare, old)
    for counter in [name for name in found if name.endswith("n_averaged")]:
        if is_average_counter(counter):
            del found[counter]
    return found


def _old(side: Side, other: Side) -> dict[str, Respelled]:
    return spelled(side.respelled, other.names, other.respelled) if side.has_old else {}
