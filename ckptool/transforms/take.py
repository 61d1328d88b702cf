"""The step that takes a part: a section, some tensors, the weights, or their averages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.placeholders import refuse_placeholders
from ckptool.errors import UsageError
from ckptool.transforms.compacting import drop_unused_bytes
from ckptool.transforms.extraction import select_part, select_tensors
from ckptool.transforms.step import Step


@dataclass(frozen=True)
class Take(Step):
    """Take a part of a checkpoint. Changes of kind `left-out` list everything else.

    Plain values stay unless `model_only`. A container that needs a removed tensor is removed
    completely. A single tensor at `key` becomes a dict with one entry. Names and globs are compared
    with the original paths and keys, ignoring wrapper prefixes. Bytes that only removed tensors use
    are dropped.
    """

    selects: ClassVar[bool] = True
    options: ClassVar[Mapping[str, str]] = {"lazy": ""}

    key: Any = None
    """The path of the section, container or tensor that becomes the root."""
    model_only: bool = False
    """Take only the state dict of the model, without the plain values in it."""
    include: Iterable[str] = ()
    """Paths, keys or globs of the tensors to take. Default: all."""
    exclude: Iterable[str] = ()
    """Paths, keys or globs of the tensors to leave out."""
    ema: bool = False
    """Take the averaged (EMA) weights under the model's own keys."""
    lazy: bool = False
    """Keep lazy parameters, which have no values, for a later `Fit` that may leave them out."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            UsageError: if globs are a single text, the key is empty, or `ema` is combined with
                `key` or `model_only`.
        """
        for name in ("include", "exclude"):
            given = getattr(self, name)
            if isinstance(given, str):
                raise UsageError(f"expected a list of globs, not {given!r}", hint=f"[{given!r}]")
            object.__setattr__(self, name, tuple(given))
        if self.ema and (self.model_only or self.key is not None):
            raise UsageError("ema excludes key and model_only")

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the part; the same checkpoint if nothing is removed.

        Raises:
            AmbiguousName: if `key` or a name matches several entries, or there are several state
                dicts.
            NotFound: if there is no entry at `key`, a name or glob matches nothing, or nothing
                would be left.
            NotRepresentable: if the weights are placeholders.
            UsageError: if `key` is a plain value, or a list or object would lose some tensors.
        """
        whole = checkpoint
        if self.ema:
            # Imported here: info does not need its tables.
            from ckptool.transforms.ema import take_averages

            whole = take_averages(checkpoint)
        part, part_path = select_part(whole, self.key, self.model_only)
        if self.include or self.exclude:
            part = select_tensors(whole, part, part_path, tuple(self.include), tuple(self.exclude))
        # A chosen part is taken to be loaded, so it needs values; other copies may lack them.
        if self.model_only or self.key is not None:
            refuse_placeholders(part, kinds=("meta", "part", *(() if self.lazy else ("lazy",))))
        new_changes = part.changes[len(whole.changes) :]
        if all(change.kind == "warning" for change in new_changes):
            return part  # Nothing was removed, which would be a change of kind `left-out`.
        return drop_unused_bytes(whole, part)
