"""What is left of a match, put to the modules that load in a way of their own."""

from __future__ import annotations

from collections.abc import Mapping

from ckptool.loading.fitting.models import Target
from ckptool.loading.fitting.states import State
from ckptool.loading.fitting.trial import Trial, tried
from ckptool.loading.fitting.versions import metadata_for
from ckptool.loading.live.own_loading import OwnLoading
from ckptool.loading.live.torch_loading import is_exact
from ckptool.matching import Match
from ckptool.matching.report import casts_of

__all__ = ["settled"]


def settled(match: Match, loading: OwnLoading, state: State, target: Target) -> Match:
    """A match without those of its questions that the model's own loading answers.

    Names that it fills are `kept`, names that it takes are `left_out`, and a tensor that it makes
    fit is a pair like others; each with the class that does so as the reason. What the model's own
    `state_dict` leaves out, and its loading misses, is missing. Where that cannot be tried, nothing
    changes but `untried`. What is loaded is not counted anew.
    """
    report = match.report
    where = {name: one for name in report.unexpected_keys if (one := _place(match, name, loading))}
    wrong = {one.name: one.own for one in report.mismatched if loading.holder(one.name)}
    missing = [name for name in report.missing_keys if loading.holder(name)]
    asked = bool(where or wrong or missing)
    if target.model is None or not (asked or target.unsure):
        return match
    placed = {name: file for file, name in where.items()}
    names = {**match.pairs, **wrong, **placed}
    metadata = metadata_for(state, target, match)
    trial = tried(target.model, state, names, metadata, exact=is_exact(report))
    if trial is None:
        first = next(iter((*missing, *wrong, *placed)), "")
        return match._replace(untried=loading.holder(first) or "") if asked else match
    return _answered(match, loading, state, target, trial, placed)


def _place(match: Match, file: str, loading: OwnLoading) -> str | None:
    """What the model would call a name of the file; None where torch alone would load it."""
    name = match.renamed.get(file, file)
    return name if loading.holder(name) and name not in match.pairs else None


def _answered(
    match: Match,
    loading: OwnLoading,
    state: State,
    target: Target,
    trial: Trial,
    placed: Mapping[str, str],
) -> Match:
    report = match.report
    fitting = {
        one.name: one.own
        for one in report.mismatched
        if loading.holder(one.name) and not trial.mismatched.union(trial.missing) & {one.name}
    }
    found = [n for n in report.missing_keys if loading.holder(n) and n not in trial.missing]
    beyond = {n: f for n, f in placed.items() if n not in trial.unexpected | trial.mismatched}
    pairs = {**match.pairs, **fitting}
    pairs = {name: pairs[name] for name in target.slots if name in pairs}
    kept = [
        (
            name,
            f"{'filled by' if name in trial.filled else 'not asked for by'} "
            f"{loading.holder(name)}'s own loading",
        )
        for name in found
    ]
    taken = [
        (file, f"taken by {loading.holder(name)}'s own loading") for name, file in beyond.items()
    ]
    over = {*found, *fitting, *(file for _, file in beyond.items())}
    unlisted = [name for name in target.unsure if name in trial.missing]
    report = report.with_changes(
        missing_keys=[*(n for n in report.missing_keys if n not in over), *unlisted],
        unexpected_keys=[file for file in report.unexpected_keys if file not in beyond.values()],
        mismatched=tuple(one for one in report.mismatched if one.name not in fitting),
        ambiguous=tuple(
            one for one in report.ambiguous if not over.issuperset((*one.names, *one.candidates))
        ),
        cast=(*report.cast, *casts_of(fitting, state.slots, target.slots)),
        kept=(*report.kept, *kept),
        left_out=(*report.left_out, *taken),
    )
    filled = trial.filled.intersection(found)
    return match._replace(pairs=pairs, report=report, beyond=beyond, filled=filled)
