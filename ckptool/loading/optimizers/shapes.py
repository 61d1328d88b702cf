"""Which parameter a shape tells, where a file keeps no names of its optimizer's parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ckptool.loading.optimizers.names import Sides, could_train, leads_of
from ckptool.model import Shape

__all__ = ["Owners", "owners_by_shape"]

Lead = int | str
"""The number of a parameter of the optimizer; below 0 one that it has not; a name of the file
that nothing of the model's is matched with."""


@dataclass(frozen=True)
class Owners:
    """Of which parameters a state can be, by the shape that it tells."""

    leads: dict[Shape, dict[Lead, str]]
    """By shape what the parameters of the file's model are here, each with a name of it."""
    outside: dict[Shape | None, dict[Lead, str]]
    """Parameters of the optimizer that are none of the model's; None: of any shape."""

    def of(self, shape: Shape | None) -> dict[Lead, str]:
        """Those that have the shape; None: all there are."""
        if shape is None:
            return {lead: name for held in self._all() for lead, name in held.items()}
        lazy = self.outside.get(None, {})
        return {**self.leads.get(shape, {}), **self.outside.get(shape, {}), **lazy}

    def without(self, taken: Collection[Lead]) -> Owners:
        """The same but for parameters whose state is known."""

        def rest(held: Mapping[Any, dict[Lead, str]]) -> dict[Any, dict[Lead, str]]:
            return {
                shape: {lead: name for lead, name in named.items() if lead not in taken}
                for shape, named in held.items()
            }

        return Owners(rest(self.leads), rest(self.outside))

    def _all(self) -> list[dict[Lead, str]]:
        return [*self.leads.values(), *self.outside.values()]


def owners_by_shape(sides: Sides) -> Owners:
    """Look at all parameters of the file's model, also those that no optimizer is over.

    An optimizer may be over a part of its model, so that a shape that is one parameter's alone
    there can be that of several all the same.
    """
    have, want, places, match, *_ = sides
    found = leads_of(places, match, have)
    no_parameters = {
        own for name, own in match.pairs.items() if name in want and want[name].kind == "buffer"
    }
    leads: dict[Shape, dict[Lead, str]] = {}
    for name, slot in have.items():
        if slot.shape is None or name in no_parameters or not could_train(slot):
            continue
        lead: Lead | None = found.get(name)
        leads.setdefault(slot.shape, {}).setdefault(name if lead is None else lead, name)
    outside: dict[Shape | None, dict[Lead, str]] = {}
    for number, place in enumerate(places):
        if not place.in_model:
            outside.setdefault(place.shape, {})[number] = place.name
    return Owners(leads, outside)
