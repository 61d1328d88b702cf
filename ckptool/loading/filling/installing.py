"""A matched state dict put into a model: planned first, then all of it or none."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ckptool.errors import CheckpointError, MatchError, UnreadableFile, UsageError, warn
from ckptool.loading.filling.assigning import Assigned, trainable
from ckptool.loading.filling.reading import Fill, apart, can_fill, check_bytes, fill, stored_bytes
from ckptool.loading.filling.timing import Fills
from ckptool.loading.filling.uncopied import advice_on_copying
from ckptool.loading.fitting.models import Target
from ckptool.loading.fitting.states import State
from ckptool.loading.fitting.versions import metadata_for
from ckptool.loading.live.memory import memory_of
from ckptool.loading.live.ranks import Ranks
from ckptool.loading.live.spreading import spread_like, without_hidden
from ckptool.loading.live.torch_loading import is_exact, torch_load
from ckptool.loading.live.undoing import Snapshot, held_back
from ckptool.loading.live.unread import UnreadDict
from ckptool.loading.live.watching import Watch, runs_code, watched
from ckptool.matching import Allowance, Match
from ckptool.words import listed, printable

if TYPE_CHECKING:
    import torch

__all__ = ["Installation"]

_COPIED = 128 << 20
"""Bytes of tensors that are copied before a file is read over them, so that an error on the way is
undone, though the file could be read a moment ago. A larger model would need its own size again."""
_CHECKED = 1 << 30
"""Bytes up to which a file is checked before it is loaded, where the caller does not say."""

_IN_PART = "the model is filled in part"

Step = Callable[[], None]


class Beside(Protocol):
    """What is loaded beside the model."""

    def remembered(self) -> Step:
        """What puts it back as it is now."""

    def apply(self) -> None:
        """Load it."""


class Installation:
    """What is to be done to one model. It is made without touching anything."""

    def __init__(
        self,
        model: torch.nn.Module,
        target: Target,
        state: State,
        match: Match,
        allowance: Allowance,
        *,
        assign: bool | None = None,
        mapped: bool = False,
        optimizers: Iterable[Any] = (),
    ) -> None:
        """Decide how each tensor gets its elements; the match has been accepted.

        On the meta device, and with `assign`, it is another tensor that takes its place. A plain
        tensor is filled straight from the file where nobody wants it in the state dict. The rest is
        up to torch: it gets tensors that are made of the file. `mapped`: the state maps the file.
        `optimizers` are loaded before the end, and may have code that looks at the model.

        Raises:
            UsageError: tensors on the meta device are not to be assigned.
        """
        self._model, self._target, self._state, self._match = model, target, state, match
        self._allowance = allowance
        self.report = match.report
        """What is loaded; when it is done, with what the model's hooks made of it."""
        self._assign, self._mapped = assign, mapped
        entries, pairs = target.entries, match.pairs
        kept = (name for name, _ in match.report.kept)  # hooks may fill those
        self._assigned = [
            name
            for name in (*pairs, *kept)
            if name in entries and (assign or entries[name].is_meta)
        ]
        if assign is False and self._assigned:
            raise UsageError(
                f"{_called(self._assigned)} on the meta device, where nothing can be copied to",
                hint="assign=None or assign=True",
            )
        self.assigned = frozenset(id(entries[name]) for name in self._assigned)
        """The `id`s of the tensors that others take the place of."""
        self._runs_code = runs_code(model, assigns=bool(self._assigned), optimizers=optimizers)
        self._watch = watched(model, by_all=self._runs_code)
        self._storages: set[int] | None = None
        self._fills = Fills(self._filled(frozenset(self._assigned)), self._watch)
        self._copies_all = self._fills.late_bytes <= _COPIED

    def run(
        self,
        *,
        verify: bool | None,
        together: Ranks,
        beside: Beside | None = None,
    ) -> None:
        """Do it all; what is raised before the last step leaves the model as it was.

        What is `beside` it is put back then too; it is loaded before the last step. In that what is
        still to be filled is read. A signal waits until that is through, and all of the model is
        loaded. What fails in it is undone where no more than 128 MiB are filled there; else the
        error says that they are filled in part. Each step is taken where all processes of
        `together` have come to the end of the one before.

        Raises:
            MatchError: torch itself, or a hook of the model's, refuses what it is given.
            CorruptFile, UnreadableFile: the file is damaged.
            CheckpointError: another process failed.
        """
        with together.reached():
            self._check(verify)
        with together.reached():
            with trainable():
                given = self._given()
            snapshot = Snapshot(self._model, copied=self._copied())
            undo = None if beside is None else beside.remembered()
        filled = False
        try:
            with together.reached():
                self._load(given)
                if beside is not None:
                    beside.apply()
            with held_back():
                with together.reached("" if self._copies_all else _IN_PART):
                    self._fill()
                filled = True
        except BaseException:
            if not filled:
                with held_back():
                    self._put_back(snapshot, undo)
            raise

    def _put_back(self, snapshot: Snapshot, undo: Step | None) -> None:
        """Undo what was done; what hinders it is told beside the error that made it necessary."""
        for step in filter(None, (snapshot.restore, undo)):
            try:
                step()
            except Exception as error:  # of whatever hook or setter there is
                label = printable(self._target.label)
                warn(f"{label} could not be put back as it was: {printable(str(error))}")

    def _filled(self, assigned: frozenset[str]) -> list[Fill]:
        """What is filled without torch's doing, each tensor once."""
        entries = self._target.entries
        found: dict[int, Fill] = {}
        for name, own in self._match.pairs.items():
            tensor = entries.get(name)
            if tensor is None or name in assigned:
                continue
            if self._watch.get(id(tensor), Watch.ALWAYS) is Watch.ALWAYS:
                continue
            ref = self._state.ref(own)
            source = self._state.value(own) if ref is None else ref
            if can_fill(tensor, source) and not self._is_own(source):
                found.setdefault(id(tensor), Fill(own, tensor, source))
        held = (entries[name] for name in self._match.pairs if name in entries)
        alone = apart(one for one in held if memory_of(one) is not None and not one.is_meta)
        return [one for key, one in found.items() if key in alone]

    def _is_own(self, source: Any) -> bool:
        """Whether a tensor in memory looks at one of the model's own storages."""
        import torch

        if self._state.tree.format != "memory" or not isinstance(source, torch.Tensor):
            return False
        if self._storages is None:
            places = map(memory_of, self._target.entries.values())
            self._storages = {place.storage for place in places if place}
        place = memory_of(source)
        return place is not None and place.storage in self._storages

    def _check(self, verify: bool | None) -> None:
        """Read what will be read, so that damage is met before the model is touched."""
        assigned = frozenset(self._assigned) if self._mapped and not verify else frozenset()
        read = (
            (own, self._state.ref(own))
            for name, own in (*self._match.pairs.items(), *self._match.beyond.items())
            if name not in assigned
        )
        refs = {own: ref for own, ref in read if ref is not None}
        if verify or (verify is None and stored_bytes(refs.items()) <= _CHECKED):
            check_bytes(refs.items())
        self._check_unchanged()

    def _check_unchanged(self) -> None:
        """Refuse a file that something writes to meanwhile."""
        for source in self._state.tree.sources:
            source.check_unchanged()

    def _given(self) -> OrderedDict[str, Any]:
        """The state dict for torch. What is not its to fill is there itself: a copy onto itself.

        Where a hook is given the dict, it gets elements of the file if it looks at them.
        """
        entries = self._target.entries
        assigned, made = frozenset(self._assigned), Assigned(cast=self._assign is None)
        given: OrderedDict[str, Any] = UnreadDict()
        for name, own in self._match.pairs.items():
            tensor = entries.get(name)
            if tensor is not None and tensor in self._fills:
                given[name] = self._fills.given(tensor, partial(self._state.value, own))
                continue
            value = self._state.value(own)
            if tensor is not None:
                value = spread_like(tensor, value)
            if tensor is not None and name in assigned:
                value = self._made(made, name, value)
            elif self._is_own(value):  # torch would read it when it has changed already
                value = value.detach().clone()
            given[name] = value
        for name, own in self._match.beyond.items():
            value = self._state.value(own)
            given[name] = value.detach().clone() if self._is_own(value) else value
        return given if self._fills.are_seen else OrderedDict(given)

    def _made(self, made: Assigned, name: str, value: torch.Tensor) -> torch.Tensor:
        """What takes the place of a tensor.

        Raises:
            MatchError: torch makes no such parameter, or no such cast.
        """
        try:
            return made.made(self._target.entries[name], self._target.slots[name].tie, value)
        except RuntimeError as error:
            raise self._refused(f"{printable(name)}: {error}") from error

    def _copied(self) -> Callable[[torch.Tensor], bool]:
        """Which tensors must be copied to be put back: all that is written to before the end.

        Code may write to any, those too that others take the place of.
        """
        if self._runs_code:
            return lambda tensor: True
        if self._copies_all:
            return lambda tensor: id(tensor) not in self.assigned
        given = {id(self._target.entries.get(name)) for name in self._match.pairs} - self.assigned
        alone = {key for key, seen in self._watch.items() if seen is Watch.NONE} - given
        alone.update(id(one.tensor) for one in self._fills.late)
        return lambda tensor: id(tensor) not in alone

    def _load(self, given: OrderedDict[str, Any]) -> None:
        """Have torch load what it is given, with all that hooks do."""
        found = metadata_for(self._state, self._target, self._match)
        metadata = {path: dict(held) for path, held in (found or {}).items()}
        real: list[tuple[torch.nn.Module, str, torch.Tensor | None]] = []
        for path, module in self._model.named_modules(remove_duplicate=False):
            held = (*module._parameters.items(), *module._buffers.items())
            if not self.assigned.isdisjoint(id(tensor) for _, tensor in held):
                metadata.setdefault(path, {})["assign_to_params_buffers"] = True
                real.extend((module, *one) for one in held)
        visitor = self._fills if self._fills.are_seen else None
        try:
            missing, unexpected = torch_load(
                self._model, given, metadata or None, visitor, exact=is_exact(self._match.report)
            )
        except RuntimeError as error:
            told = str(error)
            if not told.startswith("Error(s) in loading state_dict"):
                raise
            raise self._uncopied(told.partition("\n\t")[2].partition("\n")[0]) from error
        if not self._assign:
            self._copy_into_real(real)
        self._check_answer(missing, unexpected)

    def _copy_into_real(self, held: list[tuple[torch.nn.Module, str, torch.Tensor | None]]) -> None:
        """Tensors that torch assigned beside those on the meta device: those keep their place.

        What a hook made for one on the meta device gets its type.
        """
        import torch

        for module, name, tensor in held:
            home: dict[str, Any] = module._parameters
            home = home if name in home else module._buffers
            given = home.get(name)
            if tensor is None or given is None or given is tensor:
                continue
            if tensor.is_meta or id(tensor) in self.assigned:
                if given.dtype != tensor.dtype and not given.is_meta:
                    home[name] = Assigned(cast=True).made(tensor, None, given.detach())
            else:
                with torch.no_grad():
                    tensor.copy_(given)
                home[name] = tensor

    def _check_answer(self, missing: list[str], unexpected: list[str]) -> None:
        """Refuse what torch, or a hook, could not place, unless that is allowed."""
        report = self._match.report
        known = {*report.missing_keys, *(name for name, _ in report.kept)}
        known.update(one.name for one in report.mismatched)
        lost = [name for name in missing if without_hidden(name) not in known]
        if not (lost or unexpected):
            return
        self.report = report.with_changes(
            missing_keys=[*report.missing_keys, *lost],
            unexpected_keys=[*report.unexpected_keys, *unexpected],
        )
        judgement = self._allowance.judged(self.report)
        kinds = {problem.kind for problem in judgement.problems}
        if kinds:
            what = "missing" if "missing" in kinds or not unexpected else "unexpected"
            names = lost if what == "missing" else unexpected
            error = self._refused(f"{_called(names)} {what} once its hooks have run")
            error.advise(judgement.remedy or None)
            raise error

    def _uncopied(self, reason: str) -> MatchError:
        """Torch's own refusal, which names the parameter, and what helps."""
        error, entries = self._refused(reason), self._target.entries
        for name, own in self._match.pairs.items():
            if f'named "{name}", ' in reason and name in entries:
                error.advise(advice_on_copying(own, entries[name], self._state.value(own)))
        return error

    def _refused(self, reason: str) -> MatchError:
        report = self.report
        return MatchError(
            f"{report.file or 'the state dict'} cannot be loaded into {report.model}: {reason}",
            file=report.file or None,
            report=report,
        )

    def _fill(self) -> None:
        """Fill the tensors that are left; from here on nobody interrupts."""
        try:
            fill(self._fills.late)
            self._check_unchanged()
        except Exception as error:  # also of a device, or of memory
            if self._copies_all:
                raise
            hint = "load a file that is whole before the model is used"
            file = self._state.file or None
            if isinstance(error, (UnreadableFile, OSError)):
                text = f"could not be read to its end, and {_IN_PART}: {error}"
                raise UnreadableFile(text, file=file, hint=hint) from error
            text = f"{_IN_PART}, as that failed: {type(error).__name__}: {error}"
            raise CheckpointError(text, file=file, hint=hint) from error


def _called(names: list[str]) -> str:
    """Names as the subject of a sentence, a long list cut."""
    shown = listed(printable(name) for name in names)
    return f"{shown} {'is' if len(names) == 1 else 'are'}"
