"""Align the names of a file with those of a model.

What is applied: wrapper components come off either side, old spellings become today's
(`known_renames`), equal names are pairs, and one prefix is taken off or put before the names, by
votes. A prefix that is not certain is a question. `proposals` finds what is likely beyond that,
for the user to decide; nothing is ever paired by it.

All steps take time in proportion to the names times their depth.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from ckptool.matching.known_renames import Respelling, respellings
from ckptool.matching.slots import Slot, fits
from ckptool.model import Shape
from ckptool.wrappers import N_AVERAGED, WRAPPERS

__all__ = [
    "WORDS",
    "Alignment",
    "Prefix",
    "Proposal",
    "align",
    "common_module",
    "escaped",
    "is_average_counter",
    "literal",
    "outer_front",
    "proposals",
    "wrapped_submodules",
]

_MOST_QUESTIONS = 3
"""More alternatives nobody reads."""
_LONGEST = 1000
"""Characters. A longer name is only compared as a whole: each of its parts would be copied."""
_NUMBER = re.compile(r"\d+")
_MODULES = re.compile(r"(?:module\.)*")
_COUNTER = re.compile(r"(?:module\.)*n_averaged")
"""The counter of an average around the whole model."""
WORDS = re.compile(rf"(?<![^.])(?:{'|'.join(word for word in WRAPPERS if word != 'module')})\.")
"""Wrapper components that no layer is called."""
_SAYS_NOTHING: tuple[Shape | None, ...] = (None, (), (1,))
"""Shapes that so many tensors have that they identify none."""

Names = dict[str, str]
"""Names as they are compared, each with the whole name."""


class Prefix(NamedTuple):
    """Components in front of names that one side has and the other has not."""

    text: str
    """With its dot."""
    is_off: bool
    """Whether it comes off the file's names; else it is put before them."""
    names: Mapping[str, str]
    """Whole names of the model, each with the name in the file that the prefix gives it."""
    collides: bool = False
    """Whether names without the prefix would collide with those that lose it."""


class Proposal(NamedTuple):
    """A rule that a user may give."""

    rules: tuple[str, ...]
    """`REGEX=>REPL`, for the names of the file; to be given together, in this order."""
    names: Mapping[str, str]
    """Whole names of the model, each with the name in the file that becomes it."""


@dataclass
class Alignment:
    """Which name of the file is which of the model."""

    have: Mapping[str, Slot]
    want: Mapping[str, Slot]
    unwrapped: tuple[Names, Names]
    """The names of the file and of the model without wrapper components."""
    bare: tuple[Names, Names]
    """The same without the prefix."""
    respelled: tuple[dict[str, Respelling], dict[str, Respelling]]
    """Those of the bare names that are in an old spelling."""
    prefix: Prefix | None = None
    """The prefix that one side had in front."""
    pairs: dict[str, str] = field(default_factory=dict)
    """Name of the model to name in the file."""
    mismatched: dict[str, str] = field(default_factory=dict)
    """The same for names of another shape."""
    questions: tuple[Prefix, ...] = ()
    """Prefixes of which one may be meant; the first has the most votes."""

    def today(self, side: int) -> Names:
        """Return the bare names of the file (0) or the model (1) in today's spelling."""
        return _spelled(self.bare[side], self.respelled[side])


def is_average_counter(name: str) -> bool:
    """Whether it is called as the counter of `AveragedModel`, which stands beside its wrapper."""
    return name == N_AVERAGED or name.endswith(f".{N_AVERAGED}")


def align(
    have: Mapping[str, Slot],
    want: Mapping[str, Slot],
    *,
    closed: Collection[str] = (),
    is_ruled: bool = False,
) -> Alignment:
    """Pair the names of a file with those of a model, as far as that is certain.

    Args:
        have: What stands under the names of the file.
        want: What the model has.
        closed: Paths of the model's modules below which no name is respelled.
        is_ruled: Whether rules of the user have given names: no prefix contradicts equal ones then.
    """
    forms = [list(_forms(slots)) for slots in (have, want)]
    ways = [_Way(have, want, mine, theirs, closed) for mine in forms[0] for theirs in forms[1]]
    best = max(ways, key=lambda way: way.score)
    if not best.score:
        best = ways[-1]
    both = best.mine, best.theirs
    found = _paired(Alignment(have, want, both, both, best.respelled))
    if best.score == len(want) or (is_ruled and best.score):
        return found
    return _with_prefix(found, ways[-1])


class _Way:
    """The names of both sides in one form each."""

    def __init__(
        self,
        have: Mapping[str, Slot],
        want: Mapping[str, Slot],
        mine: Names,
        theirs: Names,
        closed: Collection[str],
    ) -> None:
        self.have, self.want, self.mine, self.theirs = have, want, mine, theirs
        self.closed = closed
        self.respelled = _respelled(mine, theirs, closed)
        self.own = _spelled(mine, self.respelled[0])
        self.wanted = _spelled(theirs, self.respelled[1])
        self.equal = [
            name
            for name, full in self.wanted.items()
            if (own := self.own.get(name)) is not None and fits(have[own], want[full])
        ]
        self.score = len(self.equal)


def _respelled(
    mine: Names, theirs: Names, closed: Collection[str]
) -> tuple[dict[str, Respelling], dict[str, Respelling]]:
    """Return the names of either side to compare in today's spelling.

    A name that both sides have is left, unless it means something else on the other one.
    """
    both = respellings(mine), respellings(theirs)
    if not any(both):
        return both
    inside = tuple(f"{path}." for path in _bare_paths(closed, theirs))
    left, right = (
        {
            name: part
            for name, part in found.items()
            if (name not in others or other.get(name, part) != part)
            and not name.startswith(inside)
            and "." not in inside
        }
        for found, others, other in ((both[0], theirs, both[1]), (both[1], mine, both[0]))
    )
    return left, right


def _bare_paths(closed: Collection[str], theirs: Names) -> Iterator[str]:
    """Yield the paths of the model's modules as they are among bare names."""
    for path in closed:
        bare = next(
            (
                short[: len(short) - len(full) + len(path)]
                for short, full in theirs.items()
                if full.startswith(f"{path}.") and short.endswith(full[len(path) :])
            ),
            path,
        )
        yield "" if not path else bare


def _spelled(names: Names, respelled: Mapping[str, Respelling]) -> Names:
    if not respelled:
        return names
    return {
        (respelled[name].of(name) if name in respelled else name): full
        for name, full in names.items()
    }


def _forms(slots: Mapping[str, Slot]) -> Iterator[Names]:
    """Yield the names as they are, without wrappers, and without `module` in submodules too.

    A form that changes nothing more, or that makes two names one, is left out.
    """
    last = {name: name for name in slots}
    yield last
    short = {WORDS.sub("", name): name for name in slots}
    counted = [name for name in short if not _COUNTER.fullmatch(name)]
    front = _MODULES.match(common_module(counted))[0] if counted else ""  # type: ignore[index]
    if front:
        part = re.compile(rf"^(?:module\.){{1,{front.count('.')}}}")
        short = {part.sub("", name): full for name, full in short.items()}
    if len(short) == len(last) and short.keys() != last.keys():
        last = short
        yield last
    paths = set(wrapped_submodules(name for name in last if not is_average_counter(name)))
    if paths:
        inner = {_without_submodules(name, paths): full for name, full in last.items()}
        if len(inner) == len(last):
            yield inner


def wrapped_submodules(names: Iterable[str]) -> list[str]:
    """Return the paths below which every name continues with `module`, outermost first.

    Such are the names of models of which only a part was inside `DataParallel`.
    """
    below: dict[str, set[str]] = {}
    some = [name for name in names if len(name) <= _LONGEST]
    heads = {name.partition(".")[0] for name in some if ".module." in name}
    for name in some if heads else ():
        path, _, rest = name.partition(".")
        for part in rest.split(".") if path in heads else ():
            below.setdefault(path, set()).add(part)
            path = f"{path}.{part}"
    return [
        path for path, parts in below.items() if parts == {"module"} and f"{path}.module" in below
    ]


def _without_submodules(name: str, paths: set[str]) -> str:
    if ".module." not in name or len(name) > _LONGEST:
        return name
    kept, path = [], ""
    for part in name.split("."):
        if part != "module" or path not in paths:
            kept.append(part)
        path = f"{path}.{part}" if path else part
    return ".".join(kept)


def _ends(name: str) -> Iterator[int]:
    """Yield where the components of a name after the first one begin."""
    at = name.find(".") + 1 if len(name) <= _LONGEST else 0
    while at:
        yield at
        at = name.find(".", at) + 1


def _grouped(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names by what they are with `*` for numbers: there are few of those."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_NUMBER.sub("*", name), []).append(name)
    return groups


def _shortened(longer: Names, shorter: Names) -> Iterator[tuple[str, str]]:
    """Yield the names of one side with the part of each that is a name of the other side."""
    others = _grouped(shorter)
    for text, names in _grouped(longer).items():
        for depth, at in enumerate(_ends(text), 1):
            if text[at:] in others:
                for name in names:
                    rest = name.split(".", depth)[depth]
                    if rest in shorter:
                        yield name, rest


def _votes(way: _Way) -> Counter[tuple[str, bool]]:
    """Count the votes for each prefix, and whether it comes off the file's names.

    A name votes for each prefix without which the other side has it, with its shape.
    """
    votes: Counter[tuple[str, bool]] = Counter()
    for name, rest in _shortened(way.own, way.wanted):
        if fits(way.have[way.own[name]], way.want[way.wanted[rest]]):
            votes[name[: len(name) - len(rest)], True] += 1
    for name, rest in _shortened(way.wanted, way.own):
        if fits(way.have[way.own[rest]], way.want[way.wanted[name]]):
            votes[name[: len(name) - len(rest)], False] += 1
    return votes


def _prefix(way: _Way, text: str, is_off: bool) -> Prefix:
    """Return the prefix with the names that it gives."""
    longer, shorter = (way.own, way.wanted) if is_off else (way.wanted, way.own)
    below = {name[len(text) :]: full for name, full in longer.items() if name.startswith(text)}
    both = ((full, shorter[rest]) for rest, full in below.items() if rest in shorter)
    pairs = ((other, full) if is_off else (full, other) for full, other in both)
    names = {full: own for full, own in pairs if fits(way.have[own], way.want[full])}
    collides = any(name in below and not name.startswith(text) for name in longer)
    return Prefix(text, is_off, names, collides)


def _with_prefix(found: Alignment, way: _Way) -> Alignment:
    """Take the prefix with most votes off its side, or ask.

    It is a question where a second one has more than half of the votes, where the other side has
    most of the same names below a path too, and where equal names contradict it.
    """
    votes = _votes(way)
    if not votes:
        return found
    (text, is_off), count = max(votes.items(), key=lambda vote: (vote[1], -len(vote[0][0])))
    if count <= len(found.pairs):
        return found
    best = _prefix(way, text, is_off)
    rivals = [
        one
        for one, votes_of_one in votes.most_common()
        if 2 * votes_of_one > count
        and one != (text, is_off)
        and not (one[1] == is_off and (one[0].startswith(text) or text.startswith(one[0])))
    ]
    longer = way.own if is_off else way.wanted
    is_whole = all(n.startswith(text) for n in longer if not is_average_counter(n))
    if rivals or _is_elsewhere(best, way) or (found.pairs and not is_whole):
        others = (_prefix(way, *rival) for rival in rivals[: _MOST_QUESTIONS - 1])
        found.questions = (best, *others)
        equal = found.pairs
        if best.collides or any(
            not one.names.keys().isdisjoint(equal)
            or not equal.keys().isdisjoint(one.names)
            or not set(one.names.values()).isdisjoint(equal.values())
            for one in found.questions
        ):
            found.pairs, found.mismatched = {}, {}
        return found
    if best.collides or not _is_likely(best, text, way):
        return found
    sides = [way.mine, way.theirs]
    side = 0 if is_off else 1
    sides[side] = {name.removeprefix(text): full for name, full in sides[side].items()}
    if len(sides[side]) < len(longer):
        return found
    return _paired(
        Alignment(
            way.have,
            way.want,
            (way.mine, way.theirs),
            (sides[0], sides[1]),
            _respelled(sides[0], sides[1], way.closed),
            prefix=best,
        )
    )


def _is_elsewhere(prefix: Prefix, way: _Way) -> bool:
    """Say whether the side without the prefix has most of the same names below a path as well."""
    text, is_off = prefix.text, prefix.is_off
    longer, shorter = (way.own, way.wanted) if is_off else (way.wanted, way.own)
    below = {name[len(text) :]: full for name, full in longer.items() if name.startswith(text)}
    paths: Counter[str] = Counter()
    for name, rest in _shortened(shorter, below):
        own, wanted = (below[rest], shorter[name]) if is_off else (shorter[name], below[rest])
        paths[name[: len(name) - len(rest)]] += fits(way.have[own], way.want[wanted])
    return 2 * max(paths.values(), default=0) > len(prefix.names)


def _is_likely(prefix: Prefix, text: str, way: _Way) -> bool:
    """Say whether enough names speak for a prefix: half of a side, or two modules of no list."""
    if 2 * len(prefix.names) >= min(len(way.own), len(way.wanted)):
        return True
    longer = way.own if prefix.is_off else way.wanted
    fulls = set(prefix.names.values() if prefix.is_off else prefix.names)
    bare = (name[len(text) :] for name, full in longer.items() if full in fulls)
    return len({name.rpartition(".")[0] for name in bare if not name[:1].isdigit()}) > 1


def _paired(found: Alignment) -> Alignment:
    """Pair the names that are equal now."""
    mine, have, want = found.today(0), found.have, found.want
    spelled = {full for name, full in found.bare[0].items() if name in found.respelled[0]}
    for name, full in found.today(1).items():
        own = mine.get(name)
        if own is None or (want[full].form and own in spelled):
            continue
        if fits(have[own], want[full]):
            found.pairs[full] = own
        elif have[own].shape is not None:
            found.mismatched[full] = own
    return found


def outer_front(names: Names) -> str | None:
    """Return what was removed in front of every name; None where it was not always the same."""
    fronts = {
        full[: len(full) - len(name)] if full.endswith(name) else None
        for name, full in names.items()
        if not is_average_counter(name)
    }
    return fronts.pop() if len(fronts) == 1 else None


def proposals(found: Alignment) -> list[Proposal]:
    """Return rules that would pair more names, for the user to decide; the questions' first.

    A subtree is proposed for another one where both have the same names, numbers and shapes below
    them, and no third one has. `layers.0` and `layers.1` are one subtree, `layers.*`. A module
    without submodules is proposed only where a shape of it is found nowhere else on either side.
    """
    front = outer_front(found.bare[0])
    if front is None:
        return []
    if found.questions:
        asked = [Proposal(_prefix_rules(one, front), one.names) for one in found.questions]
        return [one for one in asked if all(one.rules)]
    left = _left(found)
    if not all(left):
        return []
    return list(_as_rules(_renamed_subtrees(found, left), left, found, front))


def _left(found: Alignment) -> tuple[Names, Names]:
    """Return the bare names of either side that are in no pair, in today's spelling."""
    used = {*found.pairs.values(), *found.mismatched.values()}
    done = {*found.pairs, *found.mismatched}
    return (
        {name: full for name, full in found.today(0).items() if full not in used},
        {name: full for name, full in found.today(1).items() if full not in done},
    )


def _prefix_rules(prefix: Prefix, front: str) -> tuple[str, ...]:
    old, new = (prefix.text, "") if prefix.is_off else ("", prefix.text)
    rule = f"^{escaped(front + old)}=>{literal(front + new)}"
    if not prefix.collides:
        return (rule,)
    others = f"^{escaped(front)}(?!{escaped(old)})=>{literal(front)}other_than_{literal(old)}"
    return others, rule


def common_module(names: Collection[str]) -> str:
    """Return the path, with its dot, of the innermost module that all names are in."""
    # What the first and the last in order begin with, all between them begin with.
    first, last = min(names), max(names)
    ends = (at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return first[: first.rfind(".", 0, next(ends, len(first))) + 1]


def _template(name: str) -> str:
    return _NUMBER.sub("*", name)


class _Subtree(NamedTuple):
    """What is below a path, all of its numbers together."""

    size: int
    content: int
    """The sum of the hashes of what is below: equal for equal content."""


def _subtrees(
    groups: Mapping[str, list[str]], names: Names, slots: Mapping[str, Slot]
) -> dict[str, _Subtree]:
    sizes: Counter[str] = Counter()
    contents: Counter[str] = Counter()
    for text, some in groups.items():
        held = [(tuple(_NUMBER.findall(name)), slots[names[name]].shape) for name in some]
        content = sum(map(hash, held))
        for at in _ends(text):
            path = text[: at - 1]
            sizes[path] += len(some)
            contents[path] += hash((text[at:], content))
    return {path: _Subtree(size, contents[path]) for path, size in sizes.items()}


def _renamed_subtrees(found: Alignment, left: tuple[Names, Names]) -> dict[str, str]:
    """Return the paths of the file whose subtrees the model has under one other path."""
    sides = []
    for side, slots in ((0, found.have), (1, found.want)):
        names = found.today(side)
        groups = _grouped(names)
        every = _subtrees(groups, names, slots)
        rest = {text: sum(n in left[side] for n in some) for text, some in groups.items()}
        free: Counter[str] = Counter()
        for text, size in rest.items():
            for at in _ends(text):
                free[text[: at - 1]] += size
        often = Counter(every.values())
        sides.append(
            {
                tree: path
                for path, tree in every.items()
                if free[path] == tree.size and often[tree] == 1
            }
        )
    mine, theirs = sides
    both = [
        (tree.size, path, theirs[tree])
        for tree, path in mine.items()
        if tree in theirs and path != theirs[tree]
    ]
    chosen: dict[str, str] = {}
    for _, path, other in sorted(both, reverse=True):
        above = (path[: at - 1] for at in _ends(path))
        if path.count("*") == other.count("*") and not any(one in chosen for one in above):
            chosen[path] = other
    return _telling(chosen, left[0], found)


def _telling(chosen: dict[str, str], left: Names, found: Alignment) -> dict[str, str]:
    """Return the renamed paths that have submodules, or a shape that nothing else has."""
    owners = _owners(found.today(0), found.have), _owners(found.today(1), found.want)
    telling: set[str] = set()
    for name, full in left.items():
        text, shape = _template(name), found.have[full].shape
        path = next((text[: at - 1] for at in _ends(text) if text[: at - 1] in chosen), None)
        if path is None or path in telling or shape in ((), (1,)):
            continue
        modules = text[len(path) + 1 :].rpartition(".")[0]
        own = shape not in _SAYS_NOTHING and (path, chosen[path])
        if any(map(str.isalpha, modules)) or own == (owners[0][shape], owners[1].get(shape)):
            telling.add(path)
    return {path: other for path, other in chosen.items() if path in telling}


def _owners(names: Names, slots: Mapping[str, Slot]) -> dict[Shape | None, str | None]:
    """Return the module that has all tensors of a shape; None where several have some."""
    found: dict[Shape | None, str | None] = {}
    for name, full in names.items():
        module, shape = _template(name).rpartition(".")[0], slots[full].shape
        found[shape] = module if found.get(shape, module) == module else None
    return found


def _as_rules(
    chosen: dict[str, str], left: tuple[Names, Names], found: Alignment, front: str
) -> Iterator[Proposal]:
    """Yield a rule for each renamed path, the deepest first, or for the module that all are in."""
    names: dict[str, dict[str, str]] = {path: {} for path in chosen}
    below = Counter(text[: at - 1] for text in map(_template, found.today(0)) for at in _ends(text))
    for name, full in left[0].items():
        text = _template(name)
        depth = next((n for n, at in enumerate(_ends(text), 1) if text[: at - 1] in chosen), None)
        if depth is None:
            continue
        parts = name.split(".")
        path, head = ".".join(text.split(".")[:depth]), ".".join(parts[:depth])
        texts = chosen[path].split("*")
        numbers = [*_NUMBER.findall(head), ""]
        new = "".join(chain.from_iterable(zip(texts, numbers, strict=True)))
        new = ".".join([*([new] if new else []), *parts[depth:]])
        other = left[1].get(new)
        if (
            other is not None
            and full.startswith(f"{front}{head}.")
            and fits(found.have[full], found.want[other])
        ):
            names[path][other] = full
    merged: dict[tuple[str, str], dict[str, str]] = {}
    for ends, paths in _merged(chosen, below).items():
        together = {other: own for path in paths for other, own in names[path].items()}
        if together:
            merged[ends] = together
    changed: set[str] = set()
    for (old, new), pairs in sorted(merged.items(), key=lambda one: -one[0][0].count(".")):
        if old not in changed:  # else it would change what an earlier rule has made
            changed.update((new, *(new[: at - 1] for at in _ends(new))))
            after = literal(new)
            for group in range(1, new.count("*") + 1):
                after = after.replace("*", rf"\{group}", 1)
            before = escaped(front + old).replace(r"\*", r"(\d+)")
            text = rf"^{before}\.=>{literal(front)}{after}{'.' if new else ''}"
            yield Proposal((text,), pairs)


def _merged(
    chosen: Mapping[str, str], below: Mapping[str, int]
) -> dict[tuple[str, str], list[str]]:
    """Return the renamed paths by what changes in front of them.

    `backbone.conv` for `encoder.conv` and all else in it is `backbone` for `encoder`.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for path, other in chosen.items():
        old, new = path.split("."), other.split(".")
        while len(old) > 1 and new and old[-1] == new[-1]:
            del old[-1], new[-1]
        groups.setdefault((".".join(old), ".".join(new)), []).append(path)
    merged: dict[tuple[str, str], list[str]] = {}
    for ends, paths in groups.items():
        if below[ends[0]] == sum(below[path] for path in paths):
            merged[ends] = paths
        else:
            merged.update(((path, chosen[path]), [path]) for path in paths)
    return merged


def escaped(text: str) -> str:
    """Return a regular expression for the text, in which no arrow ends it."""
    return re.escape(text).replace("=>", "=[>]")


def literal(text: str) -> str:
    """Return what a rule has to say for the text to be put in."""
    return text.replace("\\", r"\\")
