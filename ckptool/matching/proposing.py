"""Propose rules that would match more keys, for the user to decide: renamed subtrees of modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ckptool.core.model import Shape
from ckptool.matching.align import (
    NUMBER,
    KeyAlignment,
    Proposal,
    escape_regex,
    escape_replacement,
    find_common_wrappers,
    find_component_starts,
    group_by_template,
    iterate_parents,
    make_path_pattern,
    make_path_replacement,
)
from ckptool.matching.known_renames import BATCHES
from ckptool.matching.report import fits
from ckptool.transforms.name_rules import regex_rule

_COMMON_SHAPES: tuple[Shape | None, ...] = (None, (), (1,))
"""Shapes that so many tensors have that they identify none."""


def propose_rules(alignment: KeyAlignment) -> list[Proposal]:
    """Return rules that would match more keys, for the user to decide; the questions' first.

    A subtree of the file is proposed for one of the model if both contain the same keys, numbers
    and shapes, except for counters, and no third one does. `layers.0` and `layers.1` are one
    subtree, `layers.*`. A path that the file already has is no new path, nor is one with another
    number of `*`.
    """
    if alignment.questions:
        return [question for question in alignment.questions if question.rule]
    file_side = _SubtreeIndex(alignment, side=0)
    model_side = _SubtreeIndex(alignment, side=1)
    new_path_by_path: dict[str, str] = {}
    # The largest subtrees first: the subtrees inside one need no rule of their own.
    for subtree, path in sorted(
        file_side.path_by_subtree.items(), key=lambda item: (-item[0].size, len(item[1]))
    ):
        new_path = model_side.path_by_subtree.get(subtree, path)
        is_new = new_path not in file_side.paths and path.count("*") == new_path.count("*")
        parents = iterate_parents(path)
        if is_new and not any(parent in new_path_by_path for parent in parents):
            new_path_by_path[path] = new_path
    return list(_make_rules(new_path_by_path, alignment, file_side, model_side))


class _Subtree(NamedTuple):
    """The content below a path, for all of its numbers together."""

    size: int
    """The number of keys."""
    content: int
    """The sum of the hashes of its keys: equal for equal names, numbers and shapes."""
    kind: int
    """The same without the numbers."""


class _SubtreeIndex:
    """The keys of one side, and its unpaired subtrees that are unlike any other.

    A subtree has a path in which `*` is any number, so all `layers.0`, `layers.1` are one.
    """

    def __init__(self, alignment: KeyAlignment, side: int) -> None:
        """Find the subtrees without a pair and with content that is unique on this side.

        `side` is 0 for the file, 1 for the model. Only a subtree with an uncommon shape or a named
        module inside is distinctive enough: two unrelated lists of scalars look alike. Counters of
        BatchNorm are ignored.
        """
        pairs = {**alignment.pairs, **alignment.mismatched}
        paired_keys = pairs.keys() if side else {*pairs.values()}
        slots = alignment.model_slots if side else alignment.file_slots
        self.names = {
            key: full_key for key, full_key in alignment.current[side].items() if "*" not in key
        }
        """The bare keys in the current spelling, each with the full key."""
        self.groups = group_by_template(self.names)
        """The bare keys by template."""
        self.paths: set[str] = set()
        """All paths of modules, with `*` for numbers."""
        sizes: Counter[str] = Counter()
        contents: Counter[str] = Counter()
        kinds: Counter[str] = Counter()
        paired_paths: set[str] = set()
        distinctive: set[str] = set()
        for template, keys in self.groups.items():
            full_keys = [self.names[name] for name in keys]
            shapes = [slots[key].shape for key in full_keys]
            numbers = map(tuple, map(NUMBER.findall, keys))
            # Sums of hashes do not depend on the order of the keys.
            content = sum(map(hash, zip(numbers, shapes, strict=True)))
            kind = sum(map(hash, shapes))
            is_paired = not paired_keys.isdisjoint(full_keys)
            is_distinctive = any(shape not in _COMMON_SHAPES for shape in shapes)
            for start in find_component_starts(template):
                path, rest = template[: start - 1], template[start:]
                self.paths.add(path)
                if template.endswith(BATCHES):
                    continue
                sizes[path] += len(keys)
                contents[path] += hash((rest, content))
                kinds[path] += hash((rest, kind))
                if is_paired:
                    paired_paths.add(path)
                # A letter before the last component: a module inside has a name, not a number.
                if is_distinctive or any(map(str.isalpha, rest.rpartition(".")[0])):
                    distinctive.add(path)
        subtrees = {
            path: _Subtree(size, contents[path], kinds[path]) for path, size in sizes.items()
        }
        occurrences = Counter((tree.size, tree.kind) for tree in subtrees.values())
        self.path_by_subtree = {
            tree: path
            for path, tree in subtrees.items()
            if path in distinctive
            and path not in paired_paths
            and occurrences[tree.size, tree.kind] == 1
        }
        """The path of each unpaired, distinctive subtree that is unlike any other."""


def _make_rules(
    new_path_by_path: Mapping[str, str],
    alignment: KeyAlignment,
    file_side: _SubtreeIndex,
    model_side: _SubtreeIndex,
) -> Iterator[Proposal]:
    """Yield a rule for each renamed subtree, the deepest first.

    `new_path_by_path` maps paths of the file to paths of the model, with `*` for numbers. A subtree
    has no rule if the wrapper prefixes of its keys differ, or if an earlier rule makes its path.

    The paths have no wrapper prefixes, so a rule is first tried on bare keys. The rule of the
    result is for the keys of the file, and so begins with their prefix.
    """
    file_bare, _model_bare = alignment.bare
    bare = {file_key: name for name, file_key in file_bare.items()}
    keys_below: dict[str, list[str]] = {path: [] for path in new_path_by_path}
    for template, keys in file_side.groups.items():
        path = next(filter(new_path_by_path.__contains__, iterate_parents(template)), None)
        if path is not None:  # the highest renamed subtree with these keys
            keys_below[path] += keys
    changed: set[str] = set()  # the new paths, and all paths above them
    for path, model_path in sorted(new_path_by_path.items(), key=lambda item: -item[0].count(".")):
        if path in changed:  # the rule would change what an earlier rule has made
            continue
        before, after = make_path_pattern(path), make_path_replacement(model_path)
        apply = regex_rule(rf"^{before}\.=>{after}.").apply
        renamed = {apply(name): file_side.names[name] for name in keys_below[path]}
        pairs = {
            model_side.names[key]: file_key
            for key, file_key in renamed.items()
            if key in model_side.names
            and fits(alignment.file_slots[file_key], alignment.model_slots[model_side.names[key]])
        }
        wrappers = find_common_wrappers(renamed.values(), bare)
        if wrappers is not None:
            changed.add(model_path)
            changed.update(iterate_parents(model_path))
            old, new = escape_regex(wrappers) + before, escape_replacement(wrappers) + after
            yield Proposal(rf"^{old}\.=>{new}.", pairs)
