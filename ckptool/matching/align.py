"""Align the keys of a file with those of a model.

Applied are, in this order: wrapper prefixes are removed on both sides, old keys get their current
spelling (`known_renames`), equal keys are paired, and one prefix is removed or added if that pairs
more than half of the keys. Each step is reported as a rule. `proposing` finds likely further rules
for the user to decide; no key is ever paired by a proposal.

The time of all steps is proportional to the number of keys times their depth.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptool.core.names import N_AVERAGED, WRAPPERS
from ckptool.matching.known_renames import Respelling, find_respellings
from ckptool.matching.report import Slot, fits

_MAX_QUESTIONS = 3
"""The number of alternative prefixes in a question."""
_MAX_KEY_LENGTH = 1000
"""Characters. A longer name is only compared as a whole: each of its parts would be copied."""
NUMBER = re.compile(r"\d+")
_LEADING_MODULES = re.compile(r"(?:module\.)*")
"""The wrapper prefixes `module.` at the start of a key."""
_WRAPPER_COUNTER = re.compile(r"(?:module\.)*n_averaged")
"""The counter of an average around the whole model."""
_WRAPPER_COMPONENT = re.compile(
    rf"(?<![^.])(?:{'|'.join(word for word in WRAPPERS if word != 'module')})\."
)
"""Wrapper components that no layer is called."""
_MAX_RULES_PER_STEP = 64
"""Rules of one step; where there would be more, none is made for it."""

Names = dict[str, str]
"""Keys as they are compared, each with the full key: `{"conv.weight": "module.conv.weight"}`."""


class AlignmentStep(NamedTuple):
    """A change on the way from the keys of the file to those of the model."""

    kind: str
    """`wrapper`, `prefix` or `known`."""
    text: str
    """For people: `module. removed`, `gamma -> weight`."""
    rule: str
    """`REGEX=>REPL` for the keys after the earlier steps; empty if no rule does exactly this."""
    side: int
    """0 if `changed` are full keys of the file, 1 if they are of the model."""
    changed: Collection[str]
    """The keys that the step changes."""


class Prefix(NamedTuple):
    """Components before the keys of one side that the other side does not have."""

    text: str
    """With its dot."""
    is_removed: bool
    """True if it is removed from the file's keys, False if it is put before them."""
    names: Mapping[str, str]
    """By full key of the model, the key of the file that then matches."""
    collides: bool
    """True if keys without the prefix would collide with those that lose it."""


class Proposal(NamedTuple):
    """A rule that a user may give."""

    rule: str
    """`REGEX=>REPL`, for the keys of the file."""
    names: Mapping[str, str]
    """By full key of the model, the key of the file that becomes it."""


class _Form(NamedTuple):
    """The keys of one side with some of the wrapper components removed."""

    names: Names
    """Each key without these components, with the full key."""
    steps: tuple[AlignmentStep, ...] = ()
    """The steps that remove the components."""


@dataclass
class KeyAlignment:
    """The matching keys of a file and a model, and the steps that made them equal."""

    file_slots: Mapping[str, Slot]
    model_slots: Mapping[str, Slot]
    bare: tuple[Names, Names]
    """The keys of the file and of the model without wrapper components and the prefix."""
    current: tuple[Names, Names]
    """The bare keys in the current spelling (see `known_renames`)."""
    steps: tuple[AlignmentStep, ...] = ()
    """From the file's names to the model's."""
    pairs: dict[str, str] = field(default_factory=dict)
    """Key of the model to key of the file."""
    mismatched: dict[str, str] = field(default_factory=dict)
    """The same for keys with another shape."""
    questions: tuple[Proposal, ...] = ()
    """Alternative prefixes to remove or add, the one with the most votes first. A rule is empty if
    no single rule does it."""


def is_average_counter(key: str) -> bool:
    """Return True for the key of `AveragedModel`'s counter, which is outside the wrapper."""
    return key == N_AVERAGED or key.endswith(f".{N_AVERAGED}")


def align(
    file_slots: Mapping[str, Slot],
    model_slots: Mapping[str, Slot],
    *,
    unrespelled_paths: Collection[str] = (),
    has_rules: bool = False,
) -> KeyAlignment:
    """Pair the keys of a file with those of a model, if that is certain.

    The keys are compared with more and more wrapper components removed, and the form with the most
    equal keys wins. Then one prefix is tried, if keys of the model are still unmatched.

    Args:
        file_slots: The slots of the file by key.
        model_slots: The slots of the model by key.
        unrespelled_paths: Paths of the model's modules in which no key is respelled.
        has_rules: True if the user's rules renamed keys. Equal keys are then
            kept; no prefix is tried.
    """
    model_forms = list(_iterate_forms(model_slots, side=1))
    candidates: list[_KeyForms] = []
    for file_form in _iterate_forms(file_slots, side=0):
        for model_form in model_forms:
            candidates.append(
                _KeyForms(file_slots, model_slots, file_form, model_form, unrespelled_paths)
            )
            if candidates[-1].score == len(model_slots):
                break
    barest = candidates[-1]  # with the fewest wrapper components
    best = max(candidates, key=lambda forms: forms.score)
    if not best.score:
        best = barest  # rules are proposed for keys without wrappers
    alignment = _pair_equal_keys(best)
    if best.score < len(model_slots) and not (has_rules and best.score):
        alignment = _apply_prefix(alignment, barest)
    return alignment


class _KeyForms:
    """The keys of the file and of the model without some wrapper components, to be compared."""

    def __init__(
        self,
        file_slots: Mapping[str, Slot],
        model_slots: Mapping[str, Slot],
        file_form: _Form,
        model_form: _Form,
        unrespelled_paths: Collection[str],
    ) -> None:
        """Compute the keys to compare, and the score: the number of model keys with a match.

        Keys in an older spelling of torch, such as `weight_g` of weight norm, are respelled, except
        in the modules at `unrespelled_paths`: their own code expects the keys as they are.
        """
        self.file_slots, self.model_slots = file_slots, model_slots
        self.file_form, self.model_form = file_form, model_form
        self.unrespelled_paths = unrespelled_paths
        self.respelled = _find_respellings(file_form.names, model_form.names, unrespelled_paths)
        """For each side, the respellings of its keys."""
        self.file_keys = _respell_keys(file_form.names, self.respelled[0])
        """The keys to compare, each with the full key in the file."""
        self.model_keys = _respell_keys(model_form.names, self.respelled[1])
        """The keys to compare, each with the full key in the model."""
        self.score = sum(
            [
                (file_key := self.file_keys.get(key)) is not None
                and fits(file_slots[file_key], model_slots[model_key])
                for key, model_key in self.model_keys.items()
            ]
        )

    def order_by_prefix(self, is_removed: bool) -> tuple[Names, Names]:
        """Return the keys of the side that has a prefix, then those of the side without it.

        A prefix that is to be removed is on the file's keys, one to be added on the model's.
        """
        if is_removed:
            return self.file_keys, self.model_keys
        return self.model_keys, self.file_keys


def _find_respellings(
    file_keys: Names, model_keys: Names, unrespelled_paths: Collection[str]
) -> tuple[dict[str, Respelling], dict[str, Respelling]]:
    """Return the respelling of each key in an old spelling, for the file and for the model.

    A key that both sides have is not respelled, unless its respelling differs on the other side.
    Keys in the modules at `unrespelled_paths` are not respelled either: their code expects them.
    """
    file_respellings, model_respellings = find_respellings(file_keys), find_respellings(model_keys)
    if not (file_respellings or model_respellings):
        return file_respellings, model_respellings
    prefixes = tuple(f"{path}." if path else "" for path in unrespelled_paths)
    unrespelled_modules = {
        key.rpartition(".")[0] for key, full in model_keys.items() if full.startswith(prefixes)
    }

    def select_applicable(
        respellings: dict[str, Respelling],
        other_keys: Names,
        other_respellings: dict[str, Respelling],
    ) -> dict[str, Respelling]:
        """Return the respellings of one side by key, except of keys that both sides spell alike.

        Keys in exempt modules keep their spelling.
        """
        return {
            key: respelling
            for key, respelling in respellings.items()
            if (key not in other_keys or other_respellings.get(key, respelling) != respelling)
            and key.rpartition(".")[0] not in unrespelled_modules
            and respelling.respell(key).rpartition(".")[0] not in unrespelled_modules
        }

    return (
        select_applicable(file_respellings, model_keys, model_respellings),
        select_applicable(model_respellings, file_keys, file_respellings),
    )


def _respell_keys(names: Names, respelled: Mapping[str, Respelling]) -> Names:
    """Return the keys in the current spelling, each with its full key."""
    if not respelled:
        return names
    return {
        (respelled[key].respell(key) if key in respelled else key): full
        for key, full in names.items()
    }


def _iterate_forms(slots: Mapping[str, Slot], *, side: int) -> Iterator[_Form]:
    """Yield the keys of one side (0: file, 1: model) in up to three forms, the plainest last.

    They are the keys unchanged, without wrapper prefixes, and without `module` in submodules too. A
    form that changes no further key, or in which two keys would collide, is left out.
    """
    form = _Form({name: name for name in slots})
    yield form
    names, component_steps = _remove_wrapper_components(form.names, side)
    names, module_steps = _remove_leading_modules(names, side)
    if len(names) == len(form.names) and names.keys() != form.names.keys():
        form = _Form(names, (*component_steps, *module_steps))
        yield form
    # A submodule can legitimately be named `module`: this component is removed last, and only if
    # the other forms did not fit.
    module_paths = set(
        find_wrapped_submodules(name for name in form.names if not is_average_counter(name))
    )
    if module_paths:
        names = {
            _remove_wrapped_modules(name, module_paths): full for name, full in form.names.items()
        }
        if len(names) == len(form.names):
            yield _Form(names, (*form.steps, *_find_inserted_wrappers(names, form.names, side)))


def _remove_wrapper_components(keys: Names, side: int) -> tuple[Names, list[AlignmentStep]]:
    """Return the keys of a file or model without wrapper components other than `module`.

    Also the steps for this: one that removes them from the file, or several that add the model's.
    """
    joined = "\n".join(keys)
    if not any(word in joined for word in WRAPPERS if word != "module"):
        return keys, []
    short = {_WRAPPER_COMPONENT.sub("", name): name for name in keys}
    if side == 1:
        return short, _find_inserted_wrappers(short, keys, side)
    changed = {full for name, full in short.items() if name != full}
    if not changed:
        return short, []
    components = dict.fromkeys(
        word for name in changed for word in _WRAPPER_COMPONENT.findall(name)
    )
    rule = f"{_WRAPPER_COMPONENT.pattern}=>"
    return short, [AlignmentStep("wrapper", f"{', '.join(components)} removed", rule, 0, changed)]


def _remove_leading_modules(keys: Names, side: int) -> tuple[Names, list[AlignmentStep]]:
    """Return the keys without the `module.` that all begin with, and the step for this.

    The step removes it from the file or adds it for the model. The counter of an `AveragedModel` is
    next to its `module`, so it may begin with fewer.
    """
    wrapped = [name for name in keys if not _WRAPPER_COUNTER.fullmatch(name)]
    front = _LEADING_MODULES.match(find_common_module(wrapped))[0] if wrapped else ""  # type: ignore[index]
    if not front:
        return keys, []
    depth = front.count(".")
    pattern = re.compile(rf"^(?:module\.){{1,{depth}}}" if depth > 1 else r"^module\.")
    changed = {full for name, full in keys.items() if name.startswith("module.")}
    short = {
        name[len(front) :] if name.startswith(front) else pattern.sub("", name): full
        for name, full in keys.items()
    }
    if side == 1:
        return short, [AlignmentStep("wrapper", f"{front} added", f"^=>{front}", 1, changed)]
    rule = f"{pattern.pattern}=>"
    return short, [AlignmentStep("wrapper", f"{front} removed", rule, 0, changed)]


def _find_inserted_wrappers(short_keys: Names, long_keys: Names, side: int) -> list[AlignmentStep]:
    """Return a step for each path below which only the long keys have wrappers, outermost first.

    For the file (`side` 0), a step removes the wrappers. For the model, it adds them, and the
    caller reverses the order of the steps. A step has no rule if a rule would change other keys.
    """
    long_by_full = {full: name for name, full in long_keys.items()}
    full_keys_by_insertion: dict[tuple[str, str], set[str]] = {}  # by path and wrappers
    for name, full in short_keys.items():
        if name != long_by_full[full] and len(long_by_full[full]) <= _MAX_KEY_LENGTH:
            for insertion in _find_insertions(name.split("."), long_by_full[full].split(".")):
                full_keys_by_insertion.setdefault(insertion, set()).add(full)
    joined_keys = "\n".join(name for name in short_keys if not is_average_counter(name))
    steps = []
    for (path, wrappers), changed in sorted(
        full_keys_by_insertion.items(), key=lambda item: item[0][0].count(".")
    ):
        before = rf"{make_path_pattern(path)}\." if path else ""
        after = f"{make_path_replacement(path)}." if path else ""
        rule = (
            rf"^{before}{escape_regex(wrappers)}=>{after}"
            if side == 0
            else f"^{before}=>{after}{wrappers}"
        )
        # A rule would also change the other keys below the path, so all of them must change.
        is_exact = len(full_keys_by_insertion) <= _MAX_RULES_PER_STEP and len(changed) == len(
            re.findall(f"^{before}", joined_keys, re.MULTILINE)
        )
        verb = "removed" if side == 0 else "added"
        steps.append(
            AlignmentStep("wrapper", f"{wrappers} {verb}", rule if is_exact else "", side, changed)
        )
    return steps


def _find_insertions(short_parts: list[str], long_parts: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each run of components that only the longer key has, with the path before it.

    For `encoder.fc.weight` and `encoder.module.fc.weight`, it yields `("encoder", "module.")`.
    Numbers in the path become `*`, so that a rule for `layers.*` holds for all layers. The short
    key is the long one without wrappers, so both end with the same component.
    """
    index, inserted = 0, ""
    for part in long_parts:
        if index < len(short_parts) and part == short_parts[index]:
            if inserted:
                yield _fold_numbers(".".join(short_parts[:index])), inserted
            index, inserted = index + 1, ""
        else:
            inserted += f"{part}."


def find_wrapped_submodules(names: Iterable[str]) -> list[str]:
    """Return the paths below which every key continues with `module`, outermost first.

    A model has these keys if only a part of it was wrapped in `DataParallel`.
    """
    children: dict[str, set[str]] = {}  # by path
    short_names = [name for name in names if len(name) <= _MAX_KEY_LENGTH]
    roots_with_wrapper = {name.partition(".")[0] for name in short_names if ".module." in name}
    for name in short_names if roots_with_wrapper else ():
        path, _, rest = name.partition(".")
        for part in rest.split(".") if path in roots_with_wrapper else ():
            children.setdefault(path, set()).add(part)
            path = f"{path}.{part}"
    return [
        path
        for path, parts in children.items()
        if parts == {"module"} and f"{path}.module" in children
    ]


def _remove_wrapped_modules(key: str, paths: set[str]) -> str:
    """Return the key without the component `module` directly below each of the paths."""
    if ".module." not in key or len(key) > _MAX_KEY_LENGTH:
        return key  # a long one would take too long: `path` is copied for each part
    kept, path = [], ""
    for part in key.split("."):
        if part != "module" or path not in paths:
            kept.append(part)
        path = f"{path}.{part}" if path else part
    return ".".join(kept)


def find_component_starts(key: str) -> Iterator[int]:
    """Yield the start of each component of a key but the first; none if the key is too long."""
    start = key.find(".") + 1 if len(key) <= _MAX_KEY_LENGTH else 0
    while start:
        yield start
        start = key.find(".", start) + 1


def iterate_parents(key: str) -> Iterator[str]:
    """Yield the paths above a key, the shortest first: `a` and `a.b` for `a.b.weight`."""
    return (key[: start - 1] for start in find_component_starts(key))


def group_by_template(keys: Iterable[str]) -> dict[str, list[str]]:
    """Return the keys by template, with `*` for each number, so that there are few templates."""
    keys = list(keys)
    templates = NUMBER.sub("*", "\n".join(keys)).split("\n")  # one call for all is faster
    if len(templates) != len(keys):  # a name has a line break
        templates = [_fold_numbers(key) for key in keys]
    groups: dict[str, list[str]] = {}
    for template, key in zip(templates, keys, strict=True):
        groups.setdefault(template, []).append(key)
    return groups


def _find_known_suffixes(
    longer: Mapping[str, list[str]], shorter: Mapping[str, list[str]], shorter_keys: Names
) -> Iterator[tuple[str, str]]:
    """Yield each key of one side that ends with a key of the other side, and this shorter key.

    `longer` and `shorter` are the keys of the two sides by template; `shorter_keys` are all keys
    of the second one. Templates are compared first, because they are few.
    """
    for template, keys in longer.items():
        for depth, start in enumerate(find_component_starts(template), 1):
            if template[start:] in shorter:
                for key in keys:
                    suffix = key.split(".", depth)[depth]  # without `depth` components, as above
                    if suffix in shorter_keys:
                        yield key, suffix


def _count_prefix_votes(forms: _KeyForms) -> Counter[tuple[str, bool]]:
    """Count the votes for each prefix; True means that the file's keys have it, False the model's.

    A key votes for a prefix if the other side has the key without it, with a fitting shape.
    """
    votes: Counter[tuple[str, bool]] = Counter()
    file_groups = group_by_template(forms.file_keys)  # few templates: keys with `*` for numbers
    model_groups = group_by_template(forms.model_keys)  # compared first; then each key in a group

    def fits_model(file_key: str, model_key: str) -> bool:
        """Return True if the tensor of a key of the file fits that of a key of the model."""
        file_slot = forms.file_slots[forms.file_keys[file_key]]
        return fits(file_slot, forms.model_slots[forms.model_keys[model_key]])

    for key, suffix in _find_known_suffixes(file_groups, model_groups, forms.model_keys):
        if fits_model(key, suffix):
            votes[key.removesuffix(suffix), True] += 1
    for key, suffix in _find_known_suffixes(model_groups, file_groups, forms.file_keys):
        if fits_model(suffix, key):
            votes[key.removesuffix(suffix), False] += 1
    return votes


def _match_with_prefix(forms: _KeyForms, prefix: str, is_removed: bool) -> Prefix:
    """Return a prefix with the keys that match once it is removed from the file's, or added."""
    longer, shorter = forms.order_by_prefix(is_removed)  # full key by bare key, of either side
    full_by_suffix = {
        key.removeprefix(prefix): full for key, full in longer.items() if key.startswith(prefix)
    }
    pairs = {}
    for suffix, full in full_by_suffix.items():
        if suffix in shorter:
            file_key, model_key = (full, shorter[suffix]) if is_removed else (shorter[suffix], full)
            if fits(forms.file_slots[file_key], forms.model_slots[model_key]):
                pairs[model_key] = file_key
    collides = len(full_by_suffix) < len(longer) and any(
        key in full_by_suffix and not key.startswith(prefix) for key in longer
    )
    return Prefix(prefix, is_removed, pairs, collides)


def _apply_prefix(alignment: KeyAlignment, forms: _KeyForms) -> KeyAlignment:
    """Pair the keys by the prefix with the most votes, if over half of the larger side then match.

    Half of the smaller side suffices if no keys are equal, no other prefix has half as many votes,
    and the keys are not below another path too. If only that fails, the prefixes become questions.
    If the equal keys are more than half as many as the votes, they are kept.
    """
    votes = _count_prefix_votes(forms)
    if not votes:
        return alignment
    count = max(votes.values())
    most_voted = [prefix for prefix, prefix_votes in votes.items() if prefix_votes == count]
    text, is_removed = min(most_voted, key=lambda prefix: len(prefix[0]))  # the shortest
    if count < 2 * len(alignment.pairs):
        return alignment
    best = _match_with_prefix(forms, text, is_removed)
    smaller, larger = sorted((len(forms.file_keys), len(forms.model_keys)))
    if 2 * len(best.names) < smaller:
        return alignment
    rivals = []
    for (rival_text, is_rival_removed), rival_votes in votes.most_common():
        is_same_prefix = is_rival_removed == is_removed and (  # a longer or shorter version of it
            rival_text.startswith(text) or text.startswith(rival_text)
        )
        if 2 * rival_votes > count and not is_same_prefix:  # then two prefixes are plausible
            rivals.append((rival_text, is_rival_removed))
    is_doubtful = rivals or alignment.pairs or _is_below_other_path(best, forms)
    if not is_doubtful or 2 * len(best.names) > larger:
        return _pair_equal_keys(forms, best)
    rival_prefixes = (_match_with_prefix(forms, *rival) for rival in rivals[: _MAX_QUESTIONS - 1])
    prefixes = (best, *rival_prefixes)
    alignment.questions = tuple(
        Proposal(_make_prefix_rule(prefix, forms), prefix.names) for prefix in prefixes
    )
    paired_file_keys = {*alignment.pairs.values()}
    if any(
        not alignment.pairs.keys().isdisjoint(prefix.names)
        or not paired_file_keys.isdisjoint(prefix.names.values())
        for prefix in prefixes
    ):  # The equal keys are a part of the question too, so they are not paired.
        alignment.pairs, alignment.mismatched = {}, {}
    return alignment


def _is_below_other_path(prefix: Prefix, forms: _KeyForms) -> bool:
    """Return True if the side without the prefix has most of these keys below some path as well.

    Then the keys at its root and those below the path could both be meant.
    """
    longer, shorter = forms.order_by_prefix(prefix.is_removed)
    suffixes = {
        key.removeprefix(prefix.text): full
        for key, full in longer.items()
        if key.startswith(prefix.text)
    }
    # By path, how many keys of the side without the prefix are the path and one of the suffixes.
    paths = Counter(
        key.removesuffix(suffix)
        for key, suffix in _find_known_suffixes(
            group_by_template(shorter), group_by_template(suffixes), suffixes
        )
    )
    return 2 * max(paths.values(), default=0) > len(prefix.names)


def _pair_equal_keys(forms: _KeyForms, prefix: Prefix | None = None) -> KeyAlignment:
    """Pair the keys that are equal without wrapper prefixes, old spellings and the given prefix.

    Keys without the prefix stay, unless they collide with a shortened one. Equal keys with other
    shapes are mismatched. The steps of the result are in the order from the file to the model.
    """
    file_slots, model_slots = forms.file_slots, forms.model_slots
    sides = [forms.file_form.names, forms.model_form.names]
    respelled = forms.respelled
    if prefix is not None:
        side = 0 if prefix.is_removed else 1  # the side that has the prefix
        names = sides[side]
        sides[side] = {
            key.removeprefix(prefix.text): full
            for key, full in names.items()
            if key.startswith(prefix.text)
        }
        for key, full in names.items():
            if not key.startswith(prefix.text):
                sides[side].setdefault(key, full)
        respelled = _find_respellings(sides[0], sides[1], forms.unrespelled_paths)
    file_keys, model_keys = map(_respell_keys, sides, respelled)
    alignment = KeyAlignment(file_slots, model_slots, (sides[0], sides[1]), (file_keys, model_keys))
    for key, model_key in model_keys.items():
        file_key = file_keys.get(key)
        if file_key is None:
            continue
        if fits(file_slots[file_key], model_slots[model_key]):
            alignment.pairs[model_key] = file_key
        elif file_slots[file_key].shape is not None:
            alignment.mismatched[model_key] = file_key
    steps = [*forms.file_form.steps]
    for number, respellings in enumerate(respelled):
        steps += _make_respelling_steps(alignment, number, respellings)
    if prefix is not None:  # a prefix of the file is removed before keys are respelled
        steps.insert(
            len(steps) if side else len(forms.file_form.steps),
            _make_prefix_step(prefix, names, alignment),
        )
    alignment.steps = (*steps, *reversed(forms.model_form.steps))
    return alignment


def _make_prefix_step(prefix: Prefix, names: Names, alignment: KeyAlignment) -> AlignmentStep:
    """Return the step that removes the prefix from the file's keys or adds it.

    `names` are the keys of the side with the prefix: compared key -> full key. The step has no rule
    if a rule would also change keys that match without it.
    """
    text = prefix.text
    changed = {full for name, full in names.items() if name.startswith(text)}
    if prefix.is_removed:
        rule = "" if prefix.collides else f"^{escape_regex(text)}=>"
        return AlignmentStep("prefix", f"{text} removed", rule, side=0, changed=changed)
    rule = f"^=>{escape_replacement(text)}" if changed.issuperset(alignment.pairs) else ""
    return AlignmentStep("prefix", f"{text} added", rule, side=1, changed=changed)


def _make_respelling_steps(
    alignment: KeyAlignment, side: int, respellings: Mapping[str, Respelling]
) -> Iterator[AlignmentStep]:
    """Yield a step for each old ending of the keys of one side, with the rule that respells it.

    A step of the model turns the current spelling into the old one of the model. A step has no rule
    if the rule would change other keys, or if there would be too many rules.
    """
    is_file = side == 0
    full_keys_by_endings: dict[tuple[str, str], set[str]] = {}
    for key, respelling in respellings.items():
        before, after = respelling if is_file else (respelling.new, respelling.old)
        common_length = len(find_common_module([before, after]))
        endings = before[common_length:], after[common_length:]
        full_keys_by_endings.setdefault(endings, set()).add(alignment.bare[side][key])
    # The keys to which the rule applies: those of the file before, those of the model after
    # respelling, because the steps lead from the file to the model.
    keys_before = alignment.bare[0] if is_file else alignment.current[1]
    for (before, after), changed in full_keys_by_endings.items():
        rule = rf"(^|\.){escape_regex(before)}$=>\1{escape_replacement(after)}"
        n_affected = sum(f".{key}".endswith(f".{before}") for key in keys_before)
        if n_affected > len(changed) or len(full_keys_by_endings) > _MAX_RULES_PER_STEP:
            rule = ""
        yield AlignmentStep("known", f"{before} -> {after}", rule, side, changed)


def _make_prefix_rule(prefix: Prefix, forms: _KeyForms) -> str:
    """Return the rule that removes or adds a prefix behind the wrapper prefixes, or "".

    It is "" if the keys of the file have different wrapper prefixes, or would collide.
    """
    bare_keys = {full: bare for bare, full in forms.file_form.names.items()}
    # A prefix is removed from the keys that have it, but added to all keys of the file.
    full_keys = prefix.names.values() if prefix.is_removed else bare_keys
    wrapped_keys = (key for key in full_keys if not is_average_counter(key))  # it is unwrapped
    wrappers = find_common_wrappers(wrapped_keys, bare_keys)
    if wrappers is None or (prefix.is_removed and prefix.collides):
        return ""
    old, new = (prefix.text, "") if prefix.is_removed else ("", prefix.text)
    return f"^{escape_regex(wrappers + old)}=>{escape_replacement(wrappers + new)}"


def find_common_wrappers(full_keys: Iterable[str], bare_keys: Mapping[str, str]) -> str | None:
    """Return the wrapper prefix that all keys have before their bare keys, or None if it differs.

    It also differs if a key has wrapper components in its middle.
    """
    prefixes = {
        key.removesuffix(bare_keys[key]) if key.endswith(bare_keys[key]) else None
        for key in full_keys
    }
    return prefixes.pop() if len(prefixes) == 1 else None


def find_common_module(keys: Collection[str]) -> str:
    """Return the path of the innermost module that contains all keys, with its dot, or ""."""
    # All keys between the first and the last in order share the prefix of these two.
    first, last = min(keys), max(keys)
    characters = enumerate(zip(first, last, strict=False))
    prefix_length = next((index for index, (a, b) in characters if a != b), len(first))
    return first[: first.rfind(".", 0, prefix_length) + 1]


def _fold_numbers(key: str) -> str:
    """Return the key with `*` for each number."""
    return NUMBER.sub("*", key)


def make_path_pattern(path: str) -> str:
    """Return a regular expression for a path, with a group for each `*`."""
    return escape_regex(path).replace(r"\*", r"(\d+)")


def make_path_replacement(path: str) -> str:
    """Return the replacement that writes a path with the numbers found by `make_path_pattern`."""
    first, *others = escape_replacement(path).split("*")
    return first + "".join(rf"\{n}{text}" for n, text in enumerate(others, 1))


def escape_regex(text: str) -> str:
    """Return a regular expression for the text, without the separator "=>" of a rule."""
    return re.escape(text).replace("=>", "=[>]")


def escape_replacement(text: str) -> str:
    """Return a regular expression's replacement that inserts the text."""
    return text.replace("\\", r"\\")
