"""What a model's own loading makes of the tensors that an optimizer keeps state of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ckptool.loading.fitting.models import Target
from ckptool.loading.fitting.states import State
from ckptool.matching import Match
from ckptool.words import counted, printable

__all__ = ["Conversions", "conversions"]


class Conversions(NamedTuple):
    """Which tensor of the file a parameter really is, once the model's own loading has run."""

    match: Match
    """With the pairs as they are then."""
    made: Mapping[str, str]
    """Names of the model whose elements are no tensor of the file's as it is, each with the class
    that makes them."""
    untried: str = ""
    """The class whose own loading could not be tried; empty: none."""

    def problem(self, names: Iterable[str]) -> str | None:
        """That state would be loaded for elements that are others than it is of."""
        made = [name for name in names if name in self.made]
        if not made:
            return None
        more = f"; so it is with {counted(len(made) - 1, 'more parameter')}" if made[1:] else ""
        return (
            f"{printable(made[0])} is made of what the file has by {self.made[made[0]]}'s own "
            f"loading, and what its optimizer keeps of that is not{more}"
        )

    @property
    def note(self) -> str:
        """What cannot be known."""
        if not self.untried:
            return ""
        return (
            f"{self.untried} loads in its own way, which could not be tried beforehand: state goes "
            "by the names as they are, whatever that makes of the tensors"
        )


def conversions(target: Target, state: State, match: Match) -> Conversions:
    """Try the model's own loading, where it has one, and see what becomes of each name."""
    loading = target.loading
    if loading is None or target.model is None or not loading.paths:
        return Conversions(match, {})
    inside = {name: holder for name in match.pairs if (holder := loading.holder(name))}
    if not inside and not match.beyond:
        return Conversions(match, {})
    # Imported here: few models load in a way of their own.
    from ckptool.loading.fitting.trial import tried
    from ckptool.loading.fitting.versions import metadata_for

    given = {**match.pairs, **match.beyond}
    trial = tried(target.model, state, given, metadata_for(state, target, match))
    if trial is None:
        return Conversions(match, {}, match.untried or next(iter(inside.values()), ""))
    origins = {
        name: given[origin] for name, origin in trial.origins.items() if loading.holder(name)
    }
    made = {
        name: holder
        for name in {**inside, **dict.fromkeys(trial.filled)}
        if name not in origins and name in target.slots and (holder := loading.holder(name))
    }
    rest = {name: file for name, file in match.pairs.items() if name not in origins}
    return Conversions(match._replace(pairs={**origins, **rest}), made)
