"""Names of two state dicts made comparable: wrapper components off, then the user's rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ckptool.errors import NameCollision
from ckptool.names import check_collisions, strip_names
from ckptool.statedict import Section, optimizer_names, wrapped_names
from ckptool.transforms.name_rules import AppliedRules
from ckptool.transforms.names import followed
from ckptool.words import printable

__all__ = ["Names", "Renamed", "SideNames"]

Renamed = dict[str, str]
"""Old name to new, of the names that change."""


@dataclass(frozen=True, slots=True)
class Names:
    """How the names of a section change."""

    shown: Renamed
    """For the screen: wrapper components off."""
    compared: Renamed
    """For the comparison: the rules applied to that as well."""


STRICT_HINT = "--strict-names compares the names as they are"
RULES_HINT = "make the rules narrower"


@dataclass
class SideNames:
    """How the names of one checkpoint change for the comparison."""

    file: str
    strict: bool = False
    rules: AppliedRules = field(default_factory=lambda: AppliedRules(()))
    _namings: list[tuple[frozenset[str], Names]] = field(default_factory=list)

    def stripped(self, part: Section) -> Renamed:
        """The wrapper components taken off the names of a model's section.

        Raises:
            NameCollision: two names would become one.
        """
        return {} if self.strict else self._strip(wrapped_names(part.node))

    def settle(self, part: Section, stripped: Renamed) -> Names:
        """The names of a model's section as they are compared, remembered for the optimizers.

        Raises:
            NameCollision: two entries would get one name.
        """
        names = [name for name in part.node if isinstance(name, str)]
        renamed = self._ruled(names, stripped)
        hint = RULES_HINT if self.rules.rules else STRICT_HINT
        where = printable(part.name) or "the root"
        check_collisions(part.node, renamed, file=self.file or None, place=where, hint=hint)
        settled = Names(stripped, renamed)
        self._namings.append((frozenset(names), settled))
        return settled

    def optimizer(self, part: Section) -> Names:
        """The same of the names that an optimizer holds: as those of the model they belong to."""
        own = optimizer_names(part.node)
        shown = followed(own, [(names, settled.shown) for names, settled in self._namings])
        if shown:
            namings = [(names, settled.compared) for names, settled in self._namings]
            return Names(shown, followed(own, namings))
        stripped = {} if self.strict else self._strip(own)
        return Names(stripped, self._ruled(own, stripped))

    def _strip(self, names: list[str]) -> Renamed:
        try:
            return strip_names(names).renamed
        except NameCollision as error:
            raise NameCollision(error.message, file=self.file or None, hint=STRICT_HINT) from error

    def _ruled(self, names: Sequence[str], stripped: Renamed) -> Renamed:
        ruled = self.rules.of(stripped.get(name, name) for name in names)
        new = {name: ruled[stripped.get(name, name)] for name in names}
        return {name: to for name, to in new.items() if to != name}
