"""Match the names of a file with those of a model: the steps in their order, and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckptool.core.names import RULES_HINT, check_collisions
from ckptool.errors import without_query
from ckptool.matching.align import KeyAlignment, align, is_average_counter
from ckptool.matching.known_renames import (
    BATCHES,
    FOREIGN_KEY_RULES,
    find_optional_counters,
    running_mean_key,
)
from ckptool.matching.proposing import propose_rules
from ckptool.matching.report import (
    Ambiguity,
    MatchReport,
    Mismatch,
    Renaming,
    Slot,
    count_loaded,
    list_casts,
    max_allowed_keys,
)
from ckptool.transforms.name_rules import AppliedRules, Rule, convert_prefix_to_regex, regex_rule

_REASON_OLD_FILE = "files of torch before 0.4.1 and of other libraries do not have this counter"
_REASON_NO_LAYER = "torch does not need this counter if its layer is missing"
_REASON_NO_AVERAGE = "the file is not from an AveragedModel"
_REASON_AVERAGE_COUNTER = "the counter of an AveragedModel, which this model is not"
_REASON_UNCOUNTED = "the model's normalization does not count batches"
_MAX_LEFTOVER_KEYS = 200
"""The most unmatched keys of a side for which an ambiguity is reported."""


class Match(NamedTuple):
    """The matching keys of a file and a model, and the report."""

    pairs: dict[str, str]
    """Key of the model to key of the file, for the tensors to load, in the model's order.

    If the file has one of several tied keys, all of them have it. Mismatched keys are left out.
    """
    renamed: dict[str, str]
    """Every key of the file to its new key, matched or not, for a file to write."""
    report: MatchReport


def match_keys(
    file_slots: Mapping[str, Slot],
    model_slots: Mapping[str, Slot],
    *,
    rules: Iterable[Rule] = (),
    metadata: Mapping[str, Any] | None = None,
    unrespelled_paths: Collection[str] = (),
    foreign: bool = False,
    file: str = "",
    model: str = "",
) -> Match:
    """Match the keys of a file with those of a model.

    Args:
        file_slots: The slots of the file by key.
        model_slots: The slots of the model by key.
        rules: The user's rules, applied to the file's keys first.
        metadata: `_metadata` of the file's state dict. Its versions show which counters old files
            do not have.
        unrespelled_paths: Paths of the model's modules with a loading method of their own. No key
            below them is respelled.
        foreign: True if the keys are in the style of TensorFlow, Keras or Flax.
        file: The name of the file in the report.
        model: The name of the model in the report.

    Raises:
        NameCollision: if the user's rules give two keys one name.
        UsageError: if the user's rules leave an empty key.
    """
    # The user's rules come first, then those for other libraries, then the alignment.
    renaming = _rename_file_keys(file_slots, model_slots, list(rules), foreign=foreign, file=file)
    new_by_file_key = renaming.new_by_file_key
    file_key_by_new = {new_key: file_key for file_key, new_key in new_by_file_key.items()}
    slot_by_new_key = {new_by_file_key[file_key]: slot for file_key, slot in file_slots.items()}
    alignment = align(
        slot_by_new_key,
        model_slots,
        unrespelled_paths=unrespelled_paths,
        has_rules=slot_by_new_key.keys() != file_slots.keys(),
    )
    # Pairs of keys of the model with keys of the file, as they were before any rule.
    all_pairs = {
        key: file_key_by_new[new_key]
        for key, new_key in {**alignment.mismatched, **alignment.pairs}.items()
    }
    mismatched = {key: all_pairs[key] for key in alignment.mismatched}
    matched = {key: all_pairs[key] for key in alignment.pairs}
    tied_groups = _share_tied_pairs(model_slots, matched, mismatched)
    pairs = {key: matched[key] for key in model_slots if key in matched}
    # The keys without a pair, except for counters that torch does not need.
    missing = [key for key in model_slots if key not in pairs and key not in mismatched]
    used_file_keys = {*pairs.values(), *mismatched.values()}
    unused = [file_key for file_key in file_slots if file_key not in used_file_keys]
    kept = _find_kept_counters(missing, model_slots, pairs, mismatched, metadata)
    left_out = _find_unused_counters(unused, pairs)
    missing = [key for key in missing if key not in kept]
    unused = [file_key for file_key in unused if file_key not in left_out]
    key_by_file_key = {file_key: key for key, file_key in all_pairs.items()}
    renamed = (
        *renaming.report_rules(key_by_file_key),
        *_report_steps(alignment, new_by_file_key, all_pairs),
    )
    ambiguous, proposed = _propose(alignment, file_key_by_new, missing, unused)
    report = MatchReport(
        file=without_query(file),
        model=model,
        missing_keys=missing,
        unexpected_keys=unused,
        mismatched=tuple(
            Mismatch(key, file_key, file_slots[file_key].shape or (), model_slots[key].shape or ())
            for key in model_slots
            if (file_key := mismatched.get(key)) is not None
        ),
        renamed=renamed,
        cast=list_casts(pairs, file_slots, model_slots),
        tied=tied_groups,
        ambiguous=ambiguous,
        proposed=proposed,
        recipe=_find_recipe(file_slots, model_slots) if missing and unused else "",
        left_out=tuple(left_out.items()),
        kept=tuple(kept.items()),
        notes=tuple(renaming.applied_rules.describe_unused()),
        **count_loaded(model_slots, pairs, kept),
    )
    return Match(pairs, _rename_all_keys(new_by_file_key, key_by_file_key, renamed), report)


class _KeyRenaming(NamedTuple):
    """The rules that rename the keys of a file before these are aligned, and the results."""

    rules: Sequence[Rule]
    """The user's rules."""
    applied_rules: AppliedRules
    """The same, with those that changed a key."""
    foreign_rules: Sequence[Rule]
    """The rules for the style of other libraries, applied after the user's."""
    renamed_by_user: Mapping[str, str]
    """Each key of the file with its new key after the user's rules."""
    new_by_file_key: Mapping[str, str]
    """The same after all of these rules."""

    def report_rules(self, key_by_file_key: Mapping[str, str]) -> Iterator[Renaming]:
        """Yield the rules that changed a matched key; `key_by_file_key` has the model's keys."""
        unchanged = {key: key for key in self.new_by_file_key}
        yield from _report_rules("rule", self.rules, unchanged, key_by_file_key)
        yield from _report_rules("known", self.foreign_rules, self.renamed_by_user, key_by_file_key)


def _rename_file_keys(
    file_keys: Iterable[str],
    model_keys: Collection[str],
    rules: Sequence[Rule],
    *,
    foreign: bool,
    file: str,
) -> _KeyRenaming:
    """Rename the keys of a file by the user's rules and, if `foreign`, those for other libraries.

    Raises:
        NameCollision: if the user's rules give two keys one name.
    """
    applied_rules = AppliedRules(rules, file)
    renamed_by_user = applied_rules.rename_keys(file_keys)
    if rules:
        check_collisions(renamed_by_user, renamed_by_user, file=file or None, hint=RULES_HINT)
    if not foreign:
        return _KeyRenaming(rules, applied_rules, [], renamed_by_user, renamed_by_user)
    foreign_rules = [
        regex_rule(rule)._replace(text=text) for text, rule in FOREIGN_KEY_RULES.items()
    ]
    new_by_file_key = _apply_spelling_rules(renamed_by_user, foreign_rules, model_keys)
    return _KeyRenaming(rules, applied_rules, foreign_rules, renamed_by_user, new_by_file_key)


def _find_recipe(file_keys: Collection[str], model_keys: Collection[str]) -> str:
    """Return the recipe, with its options, that turns the file's keys into the model's, or ""."""
    from ckptool.recipes import find_recipe  # Imported here: most files fit.

    return find_recipe(file_keys, model_keys) or ""


def _apply_spelling_rules(
    names: Mapping[str, str], rules: Sequence[Rule], model_keys: Collection[str]
) -> dict[str, str]:
    """Return the keys after all rules; a key that the model has is not changed further.

    Keys that would collide stay unchanged.
    """
    current = dict(names)
    for rule in rules:
        for file_key, key in current.items():
            if key not in model_keys:
                current[file_key] = rule.apply(key) or key  # a rule may leave an empty key
    counts = Counter(current.values())
    return {
        file_key: key if counts[key] == 1 else names[file_key] for file_key, key in current.items()
    }


def _share_tied_pairs(
    model_slots: Mapping[str, Slot], matched: dict[str, str], mismatched: Collection[str]
) -> tuple[tuple[str, ...], ...]:
    """Give all keys of a tied tensor the pair of one of them; return the groups that are loaded.

    `matched` maps model keys to file keys and is extended.
    """
    groups: dict[Any, list[str]] = {}
    for key, slot in model_slots.items():
        if slot.tie is not None:
            groups.setdefault(slot.tie, []).append(key)
    loaded = []
    for keys in groups.values():
        source = next((matched[key] for key in keys if key in matched), None)
        if source is not None and len(keys) > 1:
            for key in keys:
                if key not in mismatched:
                    matched.setdefault(key, source)
            loaded.append(tuple(keys))
    return tuple(loaded)


def _find_kept_counters(
    missing: Sequence[str],
    model_slots: Mapping[str, Slot],
    pairs: Mapping[str, str],
    mismatched: Collection[str],
    metadata: Mapping[str, Any] | None,
) -> dict[str, str]:
    """Return the missing counters that torch does not require, each with the reason."""
    optional = find_optional_counters(missing, pairs, metadata)
    reasons = {}
    for counter in missing:
        if counter in optional and running_mean_key(counter) in model_slots:
            mean_key = running_mean_key(counter)
            reasons[counter] = (
                _REASON_OLD_FILE
                if mean_key in pairs or mean_key in mismatched
                else _REASON_NO_LAYER
            )
        elif is_average_counter(counter):
            reasons[counter] = _REASON_NO_AVERAGE
    return reasons


def _find_unused_counters(unused: Sequence[str], pairs: Mapping[str, str]) -> dict[str, str]:
    """Return the file's counters that the model does not use, each with the reason."""
    if not unused:
        return {}
    mean_keys = {file_key for key, file_key in pairs.items() if key.endswith("running_mean")}
    reasons = {}
    for counter in unused:
        if is_average_counter(counter):
            reasons[counter] = _REASON_AVERAGE_COUNTER
        elif counter.rpartition(".")[2] == BATCHES and running_mean_key(counter) in mean_keys:
            reasons[counter] = _REASON_UNCOUNTED
    return reasons


def _propose(
    alignment: KeyAlignment,
    file_key_by_new: Mapping[str, str],
    missing: Sequence[str],
    unused: Sequence[str],
) -> tuple[tuple[Ambiguity, ...], tuple[Renaming, ...]]:
    """Return the ambiguities, some with rules that resolve them, and rules that match more keys.

    Both are empty if one side has no unmatched keys. `file_key_by_new` maps keys after the user's
    rules to keys of the file.
    """
    if not missing or not unused:
        return (), ()
    proposed = tuple(
        Renaming(
            kind="proposed",
            text=rule.rule.replace("=>", " -> ", 1),
            names=tuple((file_key_by_new[file_key], key) for key, file_key in rule.names.items()),
            rule=rule.rule,
        )
        for rule in propose_rules(alignment)
    )
    ambiguities: list[Ambiguity] = []
    if alignment.questions:
        ambiguous_file_keys = dict.fromkeys(
            file_key_by_new[file_key]
            for question in alignment.questions
            for file_key in question.names.values()
        )
        model_keys = dict.fromkeys(
            key for question in alignment.questions for key in question.names
        )
        rules = tuple(renaming.rule for renaming in proposed)
        ambiguities.append(Ambiguity(tuple(ambiguous_file_keys), tuple(model_keys), rules))
    # The rules that answer a question are alternatives; without one, all are applied together.
    rule_groups = [(renaming,) for renaming in proposed] if alignment.questions else [proposed]
    for rule_group in rule_groups:
        resolved = {key for renaming in rule_group for pair in renaming.names for key in pair}
        ambiguities += _find_ambiguous_leftovers(
            alignment,
            file_key_by_new,
            [key for key in missing if key not in resolved],
            [key for key in unused if key not in resolved],
        )
    return tuple(ambiguities), proposed


def _find_ambiguous_leftovers(
    alignment: KeyAlignment,
    file_key_by_new: Mapping[str, str],
    missing: Sequence[str],
    unused: Sequence[str],
) -> tuple[Ambiguity, ...]:
    """Return the few unmatched keys of both sides that may be the same tensors, as one ambiguity.

    Their last components and shapes are equal, one begins with the other (`fc.weight_orig`), or one
    ends with the other. If more than a tenth of the model's keys are unmatched, there are none.
    """
    max_keys = min(max_allowed_keys(len(alignment.model_slots)), _MAX_LEFTOVER_KEYS)
    if not (0 < len(missing) <= max_keys and 0 < len(unused) <= max_keys):
        return ()
    unused_keys, missing_keys = {*unused}, {*missing}
    # Without "parametrizations.", `weight.original` of one side begins with `weight` of the other.
    file_keys, model_keys = (
        sorted(
            (bare_key.replace("parametrizations.", ""), full_key)
            for bare_key, full_key in names.items()
        )
        for names in alignment.bare
    )
    file_keys = [
        (bare_key, full_key)
        for bare_key, full_key in file_keys
        if file_key_by_new[full_key] in unused_keys
    ]
    candidates = [
        (file_key_by_new[file_key], model_key)
        for bare_model_key, model_key in model_keys
        if model_key in missing_keys
        for bare_file_key, file_key in file_keys
        if _is_affix(bare_file_key, bare_model_key)
        or (
            bare_file_key.rpartition(".")[2] == bare_model_key.rpartition(".")[2]
            and alignment.file_slots[file_key].shape
            in (alignment.model_slots[model_key].shape, None)
        )
    ]
    if not candidates:
        return ()
    ambiguous_file_keys, ambiguous_model_keys = (
        tuple(dict.fromkeys(keys)) for keys in zip(*candidates, strict=True)
    )
    return (Ambiguity(ambiguous_file_keys, ambiguous_model_keys),)


def _is_affix(file_key: str, model_key: str) -> bool:
    """Return True if one of two keys begins or ends with the other.

    The shared end is whole components. The start of the model's key ends before a `.` or `_`.
    """
    return (
        f".{file_key}".endswith(f".{model_key}")
        or f".{model_key}".endswith(f".{file_key}")
        or file_key.startswith(model_key)
        or model_key.startswith((f"{file_key}.", f"{file_key}_"))
    )


def _report_steps(
    alignment: KeyAlignment, new_by_file_key: Mapping[str, str], file_key_by_key: Mapping[str, str]
) -> Iterator[Renaming]:
    """Yield the alignment steps that changed a pair.

    `new_by_file_key` maps file keys to those after the user's rules, `file_key_by_key` the matched
    model keys to file keys.
    """
    for step in alignment.steps:
        # `changed` has keys of the step's side: 0 for the file, 1 for the model.
        changed_pairs = tuple(
            (file_key, key)
            for key, file_key in file_key_by_key.items()
            if (key if step.side else new_by_file_key[file_key]) in step.changed
        )
        if changed_pairs:
            yield Renaming(step.kind, step.text, changed_pairs, step.rule)


def _report_rules(
    kind: str,
    rules: Sequence[Rule],
    key_before: Mapping[str, str],
    key_by_file_key: Mapping[str, str],
) -> Iterator[Renaming]:
    """Yield the rules that changed a matched key, each with the keys that it changed.

    `key_before` has each file key before the rules, `key_by_file_key` the matched model keys.
    """
    current = dict(key_before)
    for rule in rules:
        changed = {
            file_key: new
            for file_key, key in current.items()
            if (new := rule.apply(key) or key) != key  # `apply` returns None for no match
        }
        pairs = tuple(
            (file_key, key_by_file_key[file_key])
            for file_key in changed
            if file_key in key_by_file_key
        )
        if pairs:
            # A rule `OLD=NEW`; one from a table is exact, and has no regular expression.
            is_prefix = not rule.regex and not rule.exact and "=" in rule.text
            regex = convert_prefix_to_regex(rule.text) if is_prefix else rule.regex or ""
            yield Renaming(kind, rule.text, pairs, regex)
        current.update(changed)


def _rename_all_keys(
    new_by_file_key: Mapping[str, str],
    key_by_file_key: Mapping[str, str],
    renamed: Iterable[Renaming],
) -> dict[str, str]:
    """Return every key of the file with its new key.

    Matched keys become the model's. The applied rules (`renamed`; the user's are already in
    `new_by_file_key`) rename the others too, unless the new key is in use.
    """
    used_keys = set(key_by_file_key.values())
    rules = [
        regex_rule(renaming.rule)
        for renaming in renamed
        if renaming.kind != "rule" and renaming.rule
    ]
    final_by_file_key = dict(new_by_file_key)
    for file_key, key in new_by_file_key.items():
        if file_key in key_by_file_key:
            final_by_file_key[file_key] = key_by_file_key[file_key]
            continue
        new = key
        for rule in rules:
            new = rule.apply(new) or new
        final_by_file_key[file_key] = new = key if new in used_keys else new
        used_keys.add(new)
    return final_by_file_key
