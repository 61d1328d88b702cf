"""A step: one change of a checkpoint, with its options as fields."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar, overload

from ckptool.core.checkpoint import Checkpoint
from ckptool.errors import UsageError
from ckptool.files.source import Source as Bytes
from ckptool.formats import Source, open_checkpoint
from ckptool.words import a_class

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Step:
    """One change of a checkpoint.

    Its fields are its options, checked on construction. Call it with a path, an open checkpoint or
    a dict in memory, or pass several to `Checkpoint.then` or `convert`.
    """

    selects: ClassVar[bool] = False
    """True if anything it leaves out was asked for by the user."""
    opens_damaged: ClassVar[bool] = False
    """True if it works on a file that is opened although bytes are missing."""
    on_files: ClassVar[str] = ""
    """The reason why it needs a file. Empty: it also works on a dict in memory."""
    flag: ClassVar[str] = ""
    """The option of the command `convert` for the step without further options."""
    options: ClassVar[Mapping[str, str]] = {}
    """Names of the command's options that differ from the fields; an empty name: no option."""

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the changed checkpoint, over the same open file.

        Raises:
            CheckpointError: if the step fails; the checkpoint is unchanged.
        """
        raise NotImplementedError

    def open(self, path: str | os.PathLike[str], *, salvage: bool = False) -> Checkpoint:
        """Open a file for this step.

        Raises:
            UnreadableFile: if the file cannot be read.
        """
        return open_checkpoint(path, salvage=salvage)

    def applied_to_dict(self, mapping: Mapping[Any, Any]) -> dict[Any, Any]:
        """Apply the step to a state dict, or a dict that contains state dicts; return a new dict.

        Raises:
            UsageError: if the step needs a file.
        """
        if self.on_files:
            name = type(self).__name__
            raise UsageError(f"{name} needs a file, not a dict in memory: {self.on_files}")
        from ckptool.transforms.memory import change_dict  # only dicts need it

        return change_dict(mapping, self.applied)

    def words(self) -> Iterator[str]:
        """Yield the command-line words of this step for `convert`."""
        if self.flag:
            yield from f"--{self.flag}".split("=")  # such as `ties=copy`
        for step_field in fields(self):
            value = getattr(self, step_field.name)
            option = self.options.get(step_field.name, step_field.name)
            is_given = value not in (step_field.default, (), None)
            if option and is_given:  # "" for a field without an option
                yield from format_option(option, value)

    @overload
    def __call__(self, state: Source) -> Checkpoint: ...
    @overload
    def __call__(self, state: Mapping[Any, Any]) -> dict[Any, Any]: ...
    def __call__(self, state: Source | Mapping[Any, Any]) -> Checkpoint | dict[Any, Any]:
        """Apply the step; return the changed checkpoint, or a new dict for a dict in memory.

        Raises:
            UnreadableFile: if the file cannot be read.
            UsageError: if the argument is of another type, or the step needs a file.
        """
        if isinstance(state, Checkpoint):
            return run_steps(state, [self])
        if isinstance(state, (str, os.PathLike)):
            opened = self.open(state, salvage=self.opens_damaged)
            return change_or_close(opened, lambda checkpoint: run_steps(checkpoint, [self]))
        if not isinstance(state, Mapping):
            raise UsageError(
                f"expected a path, a state dict or an open checkpoint, not {a_class(state)}",
                hint="for a model, give model.state_dict()",
            )
        return self.applied_to_dict(state)


def run_steps(checkpoint: Checkpoint, steps: Iterable[Step]) -> Checkpoint:
    """Return the checkpoint after all steps, in order.

    The losses of a step that selects are marked with `Change.wanted`: the user asked for them.

    Raises:
        CheckpointError: if a step fails; files that the steps opened are closed.
        UsageError: if an item of `steps` is not a step.
    """
    with ExitStack() as close_on_error:
        for step in steps:
            if not isinstance(step, Step):
                raise UsageError(
                    f"expected a step, not {a_class(step)}", hint="for example ckptool.Strip()"
                )
            result = step.applied(checkpoint)
            for source in list_opened_sources([step], checkpoint, result):
                close_on_error.callback(source.close)
            earlier_count = len(checkpoint.changes)
            checkpoint = _mark_wanted(result, earlier_count) if step.selects else result
        close_on_error.pop_all()
    return checkpoint


def _mark_wanted(result: Checkpoint, n_before: int) -> Checkpoint:
    """Return the checkpoint, its changes after the first `n_before` marked as wanted by the user.

    A change that leaves out something needed stays as it is: the result is incomplete without it.
    """
    earlier, new = result.changes[:n_before], result.changes[n_before:]
    marked = [change if change.needed else replace(change, wanted=True) for change in new]
    changes = (*earlier, *marked)
    return result if changes == result.changes else replace(result, changes=changes)


def list_opened_sources(
    steps: Iterable[Step], before: Checkpoint, after: Checkpoint
) -> list[Bytes]:
    """Return the sources of the result `after` that the steps opened, not the caller.

    The caller opened those of `before` and of the checkpoints among the options of the steps.
    """
    values = (getattr(step, option.name) for step in steps for option in fields(step))
    given = [before, *(value for value in values if isinstance(value, Checkpoint))]
    given_sources = {id(source) for checkpoint in given for source in checkpoint.sources}
    return [source for source in after.sources if id(source) not in given_sources]


def open_and_change(
    path: str | os.PathLike[str], change: Callable[[Checkpoint], Checkpoint], **options: Any
) -> Checkpoint:
    """Open a file and change the checkpoint; close it again if that fails."""
    return change_or_close(open_checkpoint(path, **options), change)


def change_or_close(opened: Checkpoint, change: Callable[[Checkpoint], Checkpoint]) -> Checkpoint:
    """Change an open checkpoint; close it if that fails."""
    with ExitStack() as close_on_error:
        result = change(close_on_error.enter_context(opened))
        close_on_error.pop_all()
    return result


def format_option(option: str, value: Any) -> Iterator[str]:
    """Yield the words `--option` and `VALUE` for each value; True has no `VALUE`.

    An item of a mapping becomes `A=B`.
    """
    if isinstance(value, Mapping):
        value = tuple(f"{old}={new}" for old, new in value.items())
    items = value if isinstance(value, tuple) else (value,)
    for item in items:
        yield f"--{option.replace('_', '-')}"
        if item is not True:
            yield str(item)


def check_list_option(name: str, values: Iterable[_Item]) -> tuple[_Item, ...]:
    """Return the items of an option that takes a list, as a tuple.

    Raises:
        UsageError: if it is a single string.
    """
    if isinstance(values, (str, bytes)):
        raise UsageError(f"{name} takes a list, not a string", hint=f"{name}=[{values!r}]")
    return tuple(values)
