"""`convert`: the changing verbs in one pass, from a format that is read to one that is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptool import transforms
from ckptool.checkpoint import Checkpoint
from ckptool.errors import UsageError
from ckptool.formats import open_checkpoint
from ckptool.matching import Allowance, Allowed
from ckptool.writing import FLAT, Receipt, save, target_format

__all__ = ["Conversion", "convert", "without_objects"]

SAFETENSORS = "safetensors"
"""How the names of its formats begin, in one file and in shards."""
_LISTS = frozenset({"include", "exclude", "rename", "keep", "visible_devices"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What to change on the way, in this order, whatever the order of the options.

    Selection, wrappers, names, plain data, ties, dtypes, storages, devices. With `like` the names
    are the reference's, wrappers and all.
    """

    key: str | None = None
    """The state dict to carry, alone, by its address."""
    model_only: bool = False
    """Carry the one model state dict alone; a pickled module becomes one. No values inside it."""
    include: tuple[str, ...] = ()
    """Globs of the tensors to carry; none: all."""
    exclude: tuple[str, ...] = ()
    """Globs of tensors to leave out."""
    wrappers: str | None = None
    """`strip` (the default towards safetensors) or `keep`."""
    rename: tuple[str, ...] = ()
    """`REGEX=>REPL`, in order; before `like`."""
    like: Any = None
    """What the names are to fit: a reference file or an open one, a model, a state dict."""
    like_key: str | None = None
    """The state dict of `like`, where it has several."""
    allow_missing: Allowed = None
    """What of `like` may be missing: all, or globs."""
    allow_unexpected: Allowed = None
    """What may be there that `like` has not: it is left out."""
    allow_mismatched: Allowed = False
    """What may be of another shape than in `like`: it is left out."""
    min_coverage: float | None = None
    """The least share of the parameters of `like` that is to be there."""
    plain: bool = False
    """Turn objects into plain data; what cannot be is an error."""
    drop_objects: bool = False
    """Drop the objects (with `plain`: that remain)."""
    ties: str = "keep"
    """`keep` writes tied tensors once where the format can, `copy` each on its own."""
    cast: str | None = None
    """The element type that floating tensors become."""
    keep: tuple[tuple[str, str | None], ...] = ()
    """Exceptions from `cast`: globs, each with its type, or None for the one that there is."""
    cast_optimizer: bool = False
    """Cast the optimizer's state too."""
    allow_overflow: bool = False
    """Cast what is too large for the type all the same."""
    dequantize: str | None = None
    """The type that 8-bit weights become, multiplied by the scales beside them."""
    raw: bool = False
    """Cast quantised numbers as plain ones."""
    compact: bool = False
    """Trim storages to what tensors see of them."""
    to: str | None = None
    """A device that every tag becomes; or"""
    device_map: Mapping[str, str] | None = None
    """tags by tag (`{"cuda:1": "cuda:0"}`); or"""
    visible_devices: tuple[int, ...] | None = None
    """renumber as `CUDA_VISIBLE_DEVICES` does."""

    def __post_init__(self) -> None:
        """Refuse words that are none, and options that do not go together.

        Raises:
            UsageError: naming them.
        """
        if self.wrappers not in (None, "strip", "keep"):
            raise UsageError(f"wrappers takes 'strip' or 'keep', not {self.wrappers!r}")
        if self.ties not in ("keep", "copy"):
            raise UsageError(f"ties takes 'keep' or 'copy', not {self.ties!r}")
        if self.visible_devices is not None and (self.to is not None or self.device_map):
            raise UsageError("choose device rules or visible devices, not both")
        device_rules(self.to, self.device_map)
        self._check_like()
        needless = self.keep or self.cast_optimizer or self.allow_overflow or self.raw
        if self.cast is None and self.dequantize is None and needless:
            raise UsageError(
                "keep, cast_optimizer, allow_overflow and raw are about a cast, and there is none",
                hint="--cast bfloat16",
            )

    def _check_like(self) -> None:
        if self.like is not None and self.wrappers is not None:
            raise UsageError("with like the wrappers are the reference's: leave out wrappers")
        allowing = (self.allow_missing, self.allow_unexpected, self.allow_mismatched)
        needless = any(allowing) or self.like_key is not None or self.min_coverage is not None
        if self.like is None and needless:
            raise UsageError(
                "like_key, min_coverage and what is allowed are about a reference, and there is "
                "none",
                hint="--like reference.pth",
            )

    def applied(self, checkpoint: Checkpoint, target: str) -> Checkpoint:
        """The checkpoint changed, as a file of the format `target` wants it.

        Safetensors and shards hold one flat state dict, safetensors by tradition without wrappers;
        other formats all there is, with the names that it has.
        """
        return self._placed(
            self._retyped(self._renamed(self._selected(checkpoint, target), target))
        )

    def _selected(self, checkpoint: Checkpoint, target: str) -> Checkpoint:
        asked, before = self.model_only or self.key is not None, checkpoint
        if asked or target in FLAT:
            alone = transforms.single_state_dict(checkpoint, self.key, values=not self.model_only)
            checkpoint = _wanted(checkpoint, alone) if asked else alone
        if self.include or self.exclude:
            part = transforms.extract(
                checkpoint, include=self.include, exclude=self.exclude, trim=False
            )
            checkpoint = _wanted(checkpoint, part)
        if target.startswith(SAFETENSORS):  # which writes tensors, and no storages
            return checkpoint
        return transforms.without_unseen(before, checkpoint)

    def _renamed(self, checkpoint: Checkpoint, target: str) -> Checkpoint:
        bare = self.like is None and self.wrappers is None and target.startswith(SAFETENSORS)
        if self.wrappers == "strip" or bare:
            checkpoint = transforms.strip_module(checkpoint)
        if self.rename:
            rules = [transforms.regex_rule(rule) for rule in self.rename]
            checkpoint = transforms.rename(checkpoint, rules)
        return checkpoint if self.like is None else self._fitted(checkpoint)

    def _fitted(self, checkpoint: Checkpoint) -> Checkpoint:
        from ckptool.conversion_like import fitted
        from ckptool.loading.plan import target_like

        wanted = target_like(self.like, key=self.like_key)
        allowance = Allowance(
            missing=self.allow_missing,
            unexpected=self.allow_unexpected,
            mismatched=self.allow_mismatched,
            min_coverage=self.min_coverage,
        )
        return fitted(checkpoint, wanted, allowance=allowance)

    def _retyped(self, checkpoint: Checkpoint) -> Checkpoint:
        checkpoint = without_objects(checkpoint, plain=self.plain, drop=self.drop_objects)
        if self.ties == "copy":  # before the cast: tied names may get types of their own
            checkpoint = transforms.untie(checkpoint)
        if self.cast is not None or self.dequantize is not None:
            checkpoint = transforms.cast(
                checkpoint,
                self.cast,
                keep=self.keep,
                everything=self.cast_optimizer,
                allow_overflow=self.allow_overflow,
                dequantize=self.dequantize,
                raw=self.raw,
            )
        return checkpoint

    def _placed(self, checkpoint: Checkpoint) -> Checkpoint:
        if self.compact:
            checkpoint = transforms.compact(checkpoint)
        if self.visible_devices is not None:
            return transforms.visible_devices(checkpoint, self.visible_devices)
        rules = device_rules(self.to, self.device_map)
        return transforms.remap(checkpoint, rules) if rules else checkpoint


def without_objects(checkpoint: Checkpoint, *, plain: bool, drop: bool) -> Checkpoint:
    """Objects turned into `plain` data, and what remains (or all of them) left out with `drop`.

    Raises:
        NotRepresentable: one remains that is not to be dropped; the message names all of them.
    """
    if plain:
        checkpoint = _wanted(checkpoint, transforms.to_plain(checkpoint, drop=drop))
    elif drop:
        checkpoint = _wanted(checkpoint, transforms.drop_objects(checkpoint))
    if not drop:
        return checkpoint
    asked = (
        replace(change, wanted=change.wanted or change.needed) for change in checkpoint.changes
    )
    return replace(checkpoint, changes=tuple(asked))


def _wanted(before: Checkpoint, after: Checkpoint) -> Checkpoint:
    """What went from `before` to `after` went because the user asked for that.

    Not so what the model needs.
    """
    made = after.changes[len(before.changes) :]
    marked = (replace(change, wanted=change.wanted or not change.needed) for change in made)
    return replace(after, changes=(*before.changes, *marked))


def convert(
    source: str | os.PathLike[str] | Checkpoint,
    target: str | os.PathLike[str],
    *,
    format: str | None = None,
    max_shard_size: int | str | None = None,
    strict: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    verify: bool | None = None,
    progress: Callable[[int, int], None] | None = None,
    **changes: Any,
) -> Receipt:
    """Write `source` to `target`, changed as asked; tensor bytes that do not change are copied.

    Args:
        source: A path (a file, an index of shards or their folder), or an open checkpoint.
        target: Its extension decides the format, unless `format` does.
        format: `torch-zip`, `torch-legacy`, `safetensors`, ...
        max_shard_size: Split into files of at most so much: `"5GB"`, or bytes.
        strict: Refuse to leave anything out.
        overwrite: Replace an existing target.
        dry_run: Plan only.
        verify: Read the result back and compare it; None: where tensors are computed.
        progress: Told bytes done and in all.
        changes: The fields of `Conversion`: `wrappers="strip"`, `to="cpu"`, `cast="bfloat16"`, ...

    Raises:
        UnreadableFile: the source cannot be read.
        UsageError: options that are none, or do not go together.
        AmbiguousName: several state dicts, and none chosen by `key`.
        MatchError: `like`, and a state dict does not fit it.
        NameCollision: two tensors would get one name.
        NotRepresentable: the target's format cannot hold a tensor (or, `strict`, anything else);
            a cast overflows; objects remain that are not plain.
        WriteError: nothing was written.
    """
    conversion = _conversion(changes)
    opened = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    try:
        name = target_format(opened, target, format, sharded=max_shard_size is not None)
        return save(
            conversion.applied(opened, name),
            target,
            format=name,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            strict=strict,
            dry_run=dry_run,
            verify=verify,
            progress=progress,
        )
    finally:
        if opened is not source:
            opened.close()


def _conversion(changes: Mapping[str, Any]) -> Conversion:
    """The changes by name; lists are taken for tuples.

    Raises:
        UsageError: a name that is none; the message lists those that there are.
    """
    known = Conversion.__dataclass_fields__
    unknown = [name for name in changes if name not in known]
    if unknown:
        raise UsageError(f"convert has no option {unknown[0]!r}; there are {', '.join(known)}")
    fields = dict(changes)
    if fields.get("keep") is not None:
        fields["keep"] = transforms.kept(fields["keep"])
    for name in _LISTS & fields.keys():
        if isinstance(fields[name], str):
            raise UsageError(f"{name} takes a list, not a string")
        fields[name] = None if fields[name] is None else tuple(fields[name])
    return Conversion(**fields)


def device_rules(to: str | None, device_map: Mapping[str, str] | None) -> dict[str, str]:
    """The remap rules of `to` or of `device_map`, which exclude each other.

    Raises:
        UsageError: both are given.
    """
    if to is not None and device_map:
        raise UsageError(
            "choose one device for all (to) or rules for some (device_map), not both",
            hint="--device-map '*=cpu' is the rule for all others",
        )
    return {"*": to} if to is not None else dict(device_map or {})
