"""Keys of a state dict: the components added by wrappers, and repeated layers as one.

`DataParallel` and `DistributedDataParallel` add `module`, `torch.compile` adds `_orig_mod`, FSDP
`_fsdp_wrapped_module` (`_fpw_module` before torch 1.12), activation checkpointing
`_checkpoint_wrapped_module`, Lightning with FSDP or DeepSpeed `_forward_module`. They nest in any
order. A wrapper is a whole component of a key, never a part of one.

`module` is also a common name for a real layer, so it counts as a wrapper only if every key starts
with it. The other names are never layers, and count anywhere.

Keys of repeated layers are shown as one: `layers.{0..31}.mlp.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from heapq import nlargest
from itertools import chain, islice, product, repeat
from math import prod
from typing import Any, NamedTuple

from ckptool.errors import NameCollision, UsageError
from ckptool.words import printable

WRAPPERS = (
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_fpw_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
)

STATISTICS = frozenset({"num_batches_tracked", "running_mean", "running_var"})
"""Last components of the buffers of batch norms."""
BUFFER_NAMES = STATISTICS | {"inv_freq", "n_averaged", "position_ids"}
"""Last components of buffers, for files that do not distinguish them from parameters."""
PEFT = "base_model.model."
"""The prefix that PEFT adds to the keys of the base model."""
N_AVERAGED = "n_averaged"
"""The counter of `AveragedModel`, next to its `module`."""

_MAX_COMPARED, _MAX_COMPARED_LENGTH = 2000, 120
"""The most names to compare, and characters of each: a hostile file may have many."""
_CANDIDATES = 20
"""Names compared letter by letter, chosen by their letter counts."""
_MAX_WORDS = 4
"""The most words of a name for which similar components are searched."""

RULES_HINT = "make the rules narrower, or rename one of the two first"
COLLISION_HINT = "remove fewer levels, or only one wrapper prefix"

Renamer = Callable[[str], str]


class StripResult(NamedTuple):
    """The result of stripping wrapper components from keys."""

    renamed: dict[str, str]
    """The keys that change, old to new."""
    levels: int
    """The number of outermost components removed."""
    wrappers: tuple[str, ...]
    """The removed wrappers, outermost first, each once."""
    rename_module: Renamer
    """The same change for the path of a module, for `_metadata`."""


class _Level(NamedTuple):
    """One component to remove: the first of every key, or the first match of `pattern`."""

    pattern: re.Pattern[str]
    """Matches the component with its dot, after group 1."""
    kinds: tuple[str, ...]
    """The wrappers that it removes."""

    def apply(self, name: str) -> str:
        """Return the key without the component; group 1 of the pattern is the text before it."""
        return self.pattern.sub(r"\1", name, count=1)


def is_wrappable(name: Any) -> bool:
    """Return True if wrappers add their prefix to a key: all but `AveragedModel`'s counter."""
    return isinstance(name, str) and name != N_AVERAGED


def strip_names(
    names: Collection[str],
    *,
    only: str | Sequence[str] | None = None,
    levels: int | None = None,
    at: str | None = None,
) -> StripResult:
    """Strip the wrapper components from the keys of a state dict's tensors and `_extra_state`s.

    One level is the outermost component: `module` if every key starts with it, otherwise the
    leftmost other wrapper of each key. Repeats until nothing changes, or `levels` times. With
    `only`, strips only these wrappers, and with `at`, only wrappers on and below this submodule.
    The counter of `AveragedModel` is outside the wrapper and stays.

    Raises:
        NameCollision: if two keys would become the same.
        UsageError: if `only` is not a known wrapper, or `levels` is less than 1.
    """
    kinds = _check_kinds(only)
    if levels is not None and levels < 1:
        raise UsageError(f"levels must be at least 1, not {levels}")
    before = f"{at}." if at else ""
    # Only the keys of the submodule, and of these only the part after its path.
    suffixes = [name.removeprefix(before) for name in names if name.startswith(before)]
    stripped = suffixes
    levels_done: list[_Level] = []
    while levels is None or len(levels_done) < levels:
        level = _find_outermost([suffix for suffix in stripped if is_wrappable(suffix)], kinds)
        if level is None:
            break
        stripped = [level.apply(suffix) if is_wrappable(suffix) else suffix for suffix in stripped]
        levels_done.append(level)
    renamed = {
        before + old: before + new
        for old, new in zip(suffixes, stripped, strict=True)
        if old != new
    }
    check_collisions(names, renamed)
    return StripResult(
        renamed,
        levels=len(levels_done),
        wrappers=tuple(dict.fromkeys(kind for level in levels_done for kind in level.kinds)),
        rename_module=lambda path: _strip_module_path(path, before, levels_done),
    )


def map_to_bare_names(names: Collection[str]) -> dict[str, str]:
    """Return each key with its form without wrappers; none changes if two would become the same."""
    try:
        renamed = strip_names(names).renamed
    except NameCollision:
        renamed = {}
    return {name: renamed.get(name, name) for name in names}


def find_common_wrapper(bare: Mapping[str, str]) -> str:
    """Return the wrapper prefix that every key of a state dict has, else an empty text.

    `bare` has the name without wrapper prefixes by key. A wrapper inside a key is no prefix.
    """
    if not all(map(str.endswith, bare, bare.values())):
        return ""
    prefixes = {name.removesuffix(bare_name) for name, bare_name in bare.items()}
    return prefixes.pop() if len(prefixes) == 1 else ""


_INNER_WRAPPERS = WRAPPERS[1:]
"""The wrappers that may follow other components of a key: all but `module`."""
_WRAPPED = re.compile(
    rf"(?<![^/])(?:(?:{'|'.join(WRAPPERS)})\.)+|(?<=\.)(?:(?:{'|'.join(_INNER_WRAPPERS)})\.)+"
)
"""Any wrappers at the start of a key, or inner ones after a dot."""


def may_be_wrapped(text: str, *, inside: bool = False) -> bool:
    """Return True if a text of one or many keys has the name of a wrapper before a dot.

    With `inside`, only wrappers that may follow other components of a key.
    """
    return any(f"{word}." in text for word in (_INNER_WRAPPERS if inside else WRAPPERS))


def make_wrapper_remover(names: Collection[str]) -> Renamer | None:
    """Return the function that strips wrappers in one container, or None if it has none.

    No key changes if two would become the same, as in `map_to_bare_names`.
    """
    wrappable = [name for name in names if name != N_AVERAGED]
    has_inner_wrappers = may_be_wrapped("\n".join(wrappable), inside=True)
    if not has_inner_wrappers:  # only `module.` at the start of all keys, which is fast to check
        prefix = ""
        while wrappable and all(map(str.startswith, wrappable, repeat(f"{prefix}module."))):
            prefix += "module."
        return (lambda name: name.removeprefix(prefix)) if prefix else None
    try:
        stripped = strip_names(names)
    except NameCollision:
        return None
    return stripped.rename_module if stripped.renamed else None


def strip_wrappers(name: str) -> str:
    """Return a key, or a path with `/`, without all possible wrapper prefixes."""
    return _WRAPPED.sub("", name) if may_be_wrapped(name) else name


def _check_kinds(only: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the wrappers in `only`, by default all; refuse unknown ones."""
    kinds = (only,) if isinstance(only, str) else tuple(only or WRAPPERS)
    unknown = [kind for kind in kinds if kind not in WRAPPERS]
    if unknown:
        raise UsageError(
            f"{unknown[0]!r} is not a known wrapper prefix", hint=f"one of {', '.join(WRAPPERS)}"
        )
    return kinds


def _find_outermost(names: Sequence[str], kinds: tuple[str, ...]) -> _Level | None:
    """Return the next component to remove, one of `kinds`, or None.

    `module` must begin every key, except for wrappers that are not removed; any other wrapper is
    removed where a key has it.
    """
    if not names:
        return None
    kept_wrappers = _match_any_of(
        kind for kind in WRAPPERS if kind not in kinds and kind != "module"
    )
    if "module" in kinds:
        pattern = re.compile(rf"^((?:{kept_wrappers}\.)*)module\.", re.DOTALL)
        if all(map(pattern.match, names)):
            return _Level(pattern, ("module",))
    text = "\n".join(names)  # one fast search finds the wrappers that can occur at all
    inner_kinds = [kind for kind in kinds if kind != "module" and kind in text]
    if not inner_kinds:
        return None
    inner_pattern = re.compile(rf"(^|\.)({_match_any_of(inner_kinds)})\.")
    wrappers = dict.fromkeys(match[2] for name in names if (match := inner_pattern.search(name)))
    return _Level(inner_pattern, tuple(wrappers)) if wrappers else None


def _match_any_of(words: Iterable[str]) -> str:
    """Return a regular expression that matches any of the words, or nothing."""
    return f"(?:{'|'.join(map(re.escape, words)) or '(?!)'})"


def _strip_module_path(path: str, prefix: str, levels: list[_Level]) -> str:
    """Return the path of a module without the components of these levels.

    `prefix` is the path of the submodule in which they are, with its dot. The wrapped module itself
    (`encoder.module`) becomes the submodule (`encoder`).
    """
    if not f"{path}.".startswith(prefix):
        return path
    inner = path[len(prefix) :]
    for level in levels:
        if inner:  # with a dot at its end, a path that is the component itself matches too
            inner = level.apply(f"{inner}.").removesuffix(".")
    return prefix + inner if inner else prefix.removesuffix(".")


def find_wrappers(names: Iterable[str]) -> tuple[str, ...]:
    """Return the wrappers in the keys, outermost first, each once."""
    names = list(filter(is_wrappable, names))
    wrappers: dict[str, None] = {}
    while (level := _find_outermost(names, WRAPPERS)) is not None:
        names = list(filter(is_wrappable, map(level.apply, names)))
        wrappers.update(dict.fromkeys(level.kinds))
    return tuple(wrappers)


def split_partly_wrapped(
    names: Iterable[str], *, only: str | Sequence[str] | None = None
) -> tuple[list[str], list[str]]:
    """Return the keys with `module.` and those without, if most have it; else nothing.

    This `module` may be a layer, and stays: a wrapper would add it to every key. `only` selects
    wrappers, as in `strip_names`.
    """
    names = list(filter(is_wrappable, names))
    wrapped = [name for name in names if name.startswith("module.")]
    others = [name for name in names if not name.startswith("module.")]
    is_partly_wrapped = 0 < len(others) < len(wrapped) and "module" in _check_kinds(only)
    return (wrapped, others) if is_partly_wrapped else ([], [])


def make_prefixer(wrapper: str, at: str | None = None) -> Renamer:
    """Return the rename that adds `wrapper` to the model, or to its submodule `at`.

    Raises:
        UsageError: if `wrapper` is not a known wrapper.
    """
    _check_kinds(wrapper)
    prefix = f"{at}." if at else ""

    def rename(name: str) -> str:
        """Return a key with the wrapper inserted, if it is in the submodule."""
        if not is_wrappable(name) or not name.startswith(prefix):
            return name
        return f"{prefix}{wrapper}.{name[len(prefix) :]}"

    return rename


def make_module_prefixer(wrapper: str, at: str | None = None) -> Renamer:
    """Return the rename of module paths that corresponds to `make_prefixer`."""
    rename = make_prefixer(wrapper, at)
    return lambda path: rename(f"{path}." if path else "").removesuffix(".")


def check_collisions(
    names: Iterable[Any],
    renamed: dict[str, str],
    *,
    file: str | None = None,
    location: str | None = None,
    hint: str = COLLISION_HINT,
) -> None:
    """Refuse a rename that makes two keys the same; the other arguments are for the message.

    Raises:
        NameCollision: if there are two; the message shows both.
    """
    if not renamed:
        return
    origin: dict[Any, Any] = {}
    for name in names:
        new = renamed.get(name, name) if isinstance(name, str) else name
        if new in origin:
            both = " and ".join(repr(printable(str(old))) for old in (origin[new], name))
            where = f" in {location}" if location else ""
            raise NameCollision(
                f"{both} would both become {printable(str(new))!r}{where}", file=file, hint=hint
            )
        origin[new] = name


def find_similar(target: str, names: Iterable[str], max_count: int = 3) -> list[str]:
    """Return the names most similar to `target`, else names with a component like a word of it.

    For example, the word `atention` of `atention.w` finds all names with a component `attention`.
    Only so many names of limited length are compared that it takes milliseconds.
    """
    candidates = list(
        islice((name for name in names if len(name) <= _MAX_COMPARED_LENGTH), _MAX_COMPARED)
    )
    target = target[:_MAX_COMPARED_LENGTH]
    if matches := _find_closest(target, candidates, max_count, cutoff=0.6):
        return matches
    words = [word for word in re.findall(r"\w+", target) if len(word) > 1 and not word.isdecimal()]
    components_of = {name: re.split(r"[./]", name) for name in candidates}
    all_components = dict.fromkeys(chain.from_iterable(components_of.values()))
    components = list(islice(all_components, _MAX_COMPARED))
    similar = [
        component
        for word in words[:_MAX_WORDS]
        for component in _find_closest(word, components, max_count, cutoff=0.75)
    ]
    matches = [
        name for component in similar for name in candidates if component in components_of[name]
    ]
    return list(dict.fromkeys(matches))[:max_count]


def _find_closest(target: str, names: Iterable[str], max_count: int, cutoff: float) -> list[str]:
    """Return the names closest to `target`; letter counts choose the candidates to compare.

    `cutoff` is the least similarity, as for `difflib.get_close_matches`: 1 for an equal name.
    """
    matcher = SequenceMatcher(b=target)

    def bound_similarity(name: str) -> float:
        """Return an upper bound of the similarity of a name, from its letter counts."""
        matcher.set_seq1(name)
        return matcher.quick_ratio()

    return get_close_matches(
        target, nlargest(_CANDIDATES, names, key=bound_similarity), max_count, cutoff
    )


_NUMBER = re.compile(r"(?<![^./])(0|[1-9][0-9]{0,8})(?![^./])")
_MAX_NUMBERS = 4  # of a name; a hostile one has a million, each compared with the others

_Place = tuple[int, ...]
"""The numbers in a key, from left to right."""
_Box = tuple[tuple[int, ...], ...]
"""The values of each number of a pattern; every combination is a key."""


class Family(NamedTuple):
    """Keys that differ only in numbers, in their original order.

    `label` is exact: `layers.{0..1}.experts.{0..3,8}.w` is ten keys. The label of a single key is
    the key.
    """

    label: str
    names: tuple[str, ...]
    numbers: tuple[int, ...]
    """The position of each among all keys, counted from 0."""


def group_families(names: Iterable[tuple[str, Hashable]]) -> list[Family]:
    """Group keys that are equal in signature and differ only in numeric components.

    Components end at a `.` or `/`. If keys have several numbers and some combinations are missing,
    they are grouped along the number that leaves the fewest groups. Each key is in one family, and
    families are in the order of their first keys.
    """
    # By signature and texts around the numbers: by these numbers, the index and name of each key.
    groups: dict[tuple[Hashable, tuple[str, ...]], dict[_Place, list[tuple[int, str]]]] = {}
    for index, (name, signature) in enumerate(names):
        texts, place = split_numbers(name)
        group = groups.setdefault((signature, texts), {})
        group.setdefault(place, []).append((index, name))
    families = []
    for (_, texts), group in groups.items():
        for box in _divide_into_boxes(list(group)):
            members = sorted(member for place in product(*box) for member in group[place])
            indices, folded = zip(*members, strict=True)
            label = _format_label(texts, box)
            families.append(Family(label, names=folded, numbers=indices))
    return sorted(families, key=lambda family: family.numbers[0])


def split_numbers(name: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the texts around the numbers of a key, and the numbers."""
    parts = _NUMBER.split(name, _MAX_NUMBERS)
    return tuple(parts[::2]), tuple(map(int, parts[1::2]))


def format_ranges(numbers: Iterable[int]) -> str:
    """Return `{0..3,8}` for 0, 1, 2, 3 and 8."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return "{" + ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs) + "}"


def _divide_into_boxes(positions: Sequence[_Place]) -> Iterator[_Box]:
    """Divide distinct positions into few full boxes (not always the fewest possible).

    The values on one line along an axis form one side of a box. Lines with the same values are
    divided in the same way, with one number less.
    """
    sides = tuple(tuple(dict.fromkeys(axis)) for axis in zip(*positions, strict=True))
    if prod(map(len, sides)) == len(positions):
        yield sides
        return
    # A line has all positions that differ only along one axis: the axis with the fewest lines.
    axis = min(
        range(len(sides)), key=lambda axis: len({_drop_axis(item, axis) for item in positions})
    )
    values_by_line: dict[_Place, list[int]] = {}
    for position in positions:
        values_by_line.setdefault(_drop_axis(position, axis), []).append(position[axis])
    lines_by_values: dict[_Place, list[_Place]] = {}
    for line, values in values_by_line.items():
        lines_by_values.setdefault(tuple(sorted(values)), []).append(line)
    for side, lines in lines_by_values.items():
        for box in _divide_into_boxes(lines):
            yield (*box[:axis], side, *box[axis:])


def _drop_axis(position: _Place, axis: int) -> _Place:
    """Return a position without the number on one axis."""
    return position[:axis] + position[axis + 1 :]


def _format_label(texts: tuple[str, ...], box: _Box) -> str:
    """Return the label of a box of keys: the texts with the values of each number between."""
    label = texts[0]
    for side, text in zip(box, texts[1:], strict=True):
        label += (str(side[0]) if len(side) == 1 else format_ranges(side)) + text
    return label
