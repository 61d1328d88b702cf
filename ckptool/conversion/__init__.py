"""`convert`: the changing verbs in one pass, from a format that is read to one that is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ckptool import transforms
from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import TensorRef
from ckptool.core.placeholders import refuse_placeholders
from ckptool.errors import UsageError
from ckptool.formats import Source, format_of
from ckptool.matching import Allowance, Allowed
from ckptool.matching.layouts import TransposeRules
from ckptool.writing import Receipt, in_folder, is_folder, save, target_format

if TYPE_CHECKING:
    import torch

    from ckptool.transforms.casting import Keep

_Item = TypeVar("_Item")
Like: TypeAlias = (
    "torch.nn.Module | Mapping[str, Any] | Iterable[str] | os.PathLike[str] | Checkpoint"
)
"""A path, an open checkpoint, a model, a state dict, shapes by name, or names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What `convert` is to change on the way, in this order, whatever the order of the options.

    What is whole, one flat dict, selection, wrappers, names, shapes, plain data, ties, dtypes,
    storages, devices, a key around all. With `like` the names are the reference's, wrappers and
    all. The fields are arguments of `ckptool.convert`, which tells what each does:
    `salvage`, `flatten`, `nest`, `master`, `concat`, `key`, `model_only`, `include`, `exclude`,
    `wrappers`, `rename`, `resize`, `interpolate_pos`, `split`, `fuse`, `like`, `like_key`,
    `transpose`, `no_transpose`, `allow_missing`, `allow_unexpected`, `allow_mismatched`,
    `min_coverage`, `plain`, `drop_objects`, `ties`, `cast`, `keep`, `cast_optimizer`,
    `allow_overflow`, `dequantize`, `raw`, `compact`, `to`, `device_map`, `visible_devices`.
    """

    salvage: bool = False
    flatten: str | None = None
    nest: str | None = None
    master: bool = False
    concat: tuple[str, ...] = ()
    key: str | None = None
    model_only: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    wrappers: str | None = None
    rename: tuple[str, ...] = ()
    resize: tuple[str, ...] = ()
    interpolate_pos: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    fuse: tuple[str, ...] = ()
    like: Like | None = None
    like_key: str | None = None
    transpose: tuple[str, ...] = ()
    no_transpose: tuple[str, ...] = ()
    allow_missing: Allowed = None
    allow_unexpected: Allowed = None
    allow_mismatched: Allowed = False
    min_coverage: float | None = None
    plain: bool = False
    drop_objects: bool = False
    ties: str = "keep"
    cast: str | torch.dtype | None = None
    keep: tuple[tuple[str, str | None], ...] = ()
    cast_optimizer: bool = False
    allow_overflow: bool = False
    dequantize: str | torch.dtype | None = None
    raw: bool = False
    compact: bool = False
    to: str | None = None
    device_map: Mapping[str, str] | None = None
    visible_devices: tuple[int, ...] | None = None

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
        TransposeRules.of(self.transpose, self.no_transpose)
        needless = any((*allowing, self.transpose, self.no_transpose))
        if self.like is None and (needless or (self.like_key, self.min_coverage) != (None, None)):
            raise UsageError(
                "like_key, min_coverage, what is allowed and what is transposed are about a "
                "reference, and there is none",
                hint="--like reference.pth",
            )

    def applied(self, checkpoint: Checkpoint, target: str) -> Checkpoint:
        """Return the checkpoint changed, as a file of the format `target` wants it.

        Safetensors and shards hold one flat state dict, safetensors by tradition without wrappers;
        other formats all there is, with the names that it has.
        """
        if self.master:
            checkpoint = transforms.with_masters(checkpoint)
        if self.concat:
            checkpoint = transforms.concatenated(checkpoint, self.concat)
        nest = self.nest
        if nest is not None and isinstance(checkpoint.root, TensorRef):  # which has no name
            checkpoint, nest = transforms.nested(checkpoint, nest), None
        if nest is not None and format_of(target).flat:
            raise UsageError(
                f"{target} holds one flat state dict, which cannot be nested",
                hint="write a .pth; or --rename '^=>KEY.' changes the names",
            )
        if self.flatten is not None:
            checkpoint = transforms.flattened(checkpoint, self.flatten)
        selected = self._selected(checkpoint, target)
        if self.salvage:
            selected = transforms.salvaged(selected)
        if self.model_only or self.like is not None:
            # A lazy parameter is missing in the model of `like`, which may be allowed.
            lazy = () if self.like is not None else ("lazy",)
            refuse_placeholders(selected, kinds=("meta", "part", *lazy))
        made = self._placed(self._retyped(self._renamed(selected, target)))
        return made if nest is None else transforms.nested(made, nest)

    def _selected(self, checkpoint: Checkpoint, target: str) -> Checkpoint:
        asked, before = self.model_only or self.key is not None, checkpoint
        if asked or format_of(target).flat:
            alone = transforms.single_state_dict(checkpoint, self.key, values=not self.model_only)
            checkpoint = _wanted(checkpoint, alone) if asked else alone
        if self.include or self.exclude:
            part = transforms.extract(
                checkpoint, include=self.include, exclude=self.exclude, trim=False
            )
            checkpoint = _wanted(checkpoint, part)
        if format_of(target).tensors_only:  # which writes tensors, and no storages
            return checkpoint
        return transforms.without_unseen(before, checkpoint)

    def _renamed(self, checkpoint: Checkpoint, target: str) -> Checkpoint:
        bare = self.like is None and self.wrappers is None and format_of(target).tensors_only
        if self.wrappers == "strip" or bare:
            checkpoint = transforms.strip_module(checkpoint)
        if self.rename:
            rules = [transforms.regex_rule(rule) for rule in self.rename]
            checkpoint = transforms.rename(checkpoint, rules)
        if self.resize or self.interpolate_pos or self.split or self.fuse:
            checkpoint = transforms.resized(
                checkpoint,
                resize=self.resize,
                interpolate_pos=self.interpolate_pos,
                split=self.split,
                fuse=self.fuse,
            )
        return checkpoint if self.like is None else self._fitted(checkpoint)

    def _fitted(self, checkpoint: Checkpoint) -> Checkpoint:
        from ckptool.conversion.fit import fitted
        from ckptool.loading.plan import target_like

        wanted = target_like(self.like, key=self.like_key)
        allowance = Allowance(
            missing=self.allow_missing,
            unexpected=self.allow_unexpected,
            mismatched=self.allow_mismatched,
            min_coverage=self.min_coverage,
        )
        choices = TransposeRules.of(self.transpose, self.no_transpose)
        return fitted(checkpoint, wanted, allowance=allowance, choices=choices)

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
    """Return what went from `before` to `after` went because the user asked for that.

    Not so what the model needs.
    """
    made = after.changes[len(before.changes) :]
    marked = (replace(change, wanted=change.wanted or not change.needed) for change in made)
    return replace(after, changes=(*before.changes, *marked))


def convert(
    source: Source | Sequence[str | os.PathLike[str]],
    target: str | os.PathLike[str],
    *,
    format: str | None = None,
    max_shard_size: int | str | None = None,
    files_from: str | os.PathLike[str] | None = None,
    strict: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    verify: bool | None = None,
    progress: Callable[[int, int], None] | None = None,
    salvage: bool = False,
    flatten: str | None = None,
    nest: str | None = None,
    master: bool = False,
    concat: Iterable[str] = (),
    key: str | None = None,
    model_only: bool = False,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    wrappers: str | None = None,
    rename: Iterable[str] = (),
    resize: Iterable[str] = (),
    interpolate_pos: Iterable[str] = (),
    split: Iterable[str] = (),
    fuse: Iterable[str] = (),
    like: Like | None = None,
    like_key: str | None = None,
    transpose: Iterable[str] = (),
    no_transpose: Iterable[str] = (),
    allow_missing: Allowed = None,
    allow_unexpected: Allowed = None,
    allow_mismatched: Allowed = False,
    min_coverage: float | None = None,
    plain: bool = False,
    drop_objects: bool = False,
    ties: str = "keep",
    cast: str | torch.dtype | None = None,
    keep: Keep = (),
    cast_optimizer: bool = False,
    allow_overflow: bool = False,
    dequantize: str | torch.dtype | None = None,
    raw: bool = False,
    compact: bool = False,
    to: str | None = None,
    device_map: Mapping[str, str] | None = None,
    visible_devices: Iterable[int] | None = None,
) -> Receipt:
    """Write `source` to `target` in another format or with changes; copy all other bytes.

    Args:
        source: A path (a file, an index of shards or their folder), or an open checkpoint; or the
            paths of several files that hold parts of one state dict.
        target: The file to write, or a folder for `model.safetensors` in it.
        format: `torch-zip`, `torch-legacy`, `safetensors`, ...; default: by the extension.
        max_shard_size: Split into files of at most this size: `"5GB"`, or bytes.
        files_from: A folder whose configuration and tokenizer files are copied beside the weights.
            The copy of `config.json` follows `dequantize`, `resize` and `cast`.
            None: `source`, if it is a folder of many processes and `target` a folder.
        strict: Refuse to leave anything out.
        overwrite: Replace an existing target.
        dry_run: Plan only.
        verify: Read the result back and compare it. None: only if tensors are computed.
        progress: Called with the bytes done and the bytes in all.
        salvage: Take what is whole of a file that is damaged or cut short, and leave out the rest.
            `source` is then a path.
        flatten: Make nested dicts and lists one flat dict, keys joined by this: `"."`.
        nest: Put all that is written under this key; a tensor that stands alone gets it as name.
        master: Take the fp32 masters that the optimizer of DeepSpeed keeps for the weights.
        concat: `GLOB=DIM` each: the dimension along which the ranks of Megatron split tensors.
        key: The address of the only state dict to write.
        model_only: Write only the state dict of the model, without the plain values in it.
        include: Globs of the tensors to write; default: all.
        exclude: Globs of the tensors to leave out.
        wrappers: `"strip"` (default for safetensors) or `"keep"` wrapper prefixes.
        rename: `REGEX=>REPL` each, applied in order.
        resize: `GLOB=ROWS` each: rows are cut, or added as the mean of the others, or, with
            `GLOB=ROWS:zero`, zero.
        interpolate_pos: `GLOB=HxW` each: position embeddings of a ViT for another grid of patches,
            as timm makes them.
        split: `*.qkv=>*.q,*.k,*.v@DIM` each: equal parts along a dimension.
        fuse: `*.q,*.k,*.v=>*.qkv@DIM` each: the parts joined.
        like: A reference whose keys the result gets: a file, a model, or a state dict.
        like_key: The address of the state dict of `like`, if it has several.
        transpose: Globs of keys of `like`; see `ckptool.match`.
        no_transpose: Globs of keys of `like`; see `ckptool.match`.
        allow_missing: True, or globs of the keys of `like` that may be missing.
        allow_unexpected: True, or globs of the keys to leave out because `like` lacks them.
        allow_mismatched: True, or globs of the keys to leave out because the shape differs.
        min_coverage: The least share of the parameters of `like` that must be there, 0 to 1.
        plain: Turn objects into plain data.
        drop_objects: Leave out objects (with `plain`: objects without a plain form).
        ties: `"keep"` tied tensors tied, or `"copy"` each of them.
        cast: The type that floating tensors are cast to.
        keep: Exceptions from `cast`: globs, or globs with types (`{"*.norm.*": "float32"}`).
        cast_optimizer: Cast the state of optimizers too.
        allow_overflow: Write elements that the type cannot hold as torch casts them.
        dequantize: The type of quantized weights, which become plain numbers.
        raw: Cast quantized numbers as plain numbers.
        compact: Drop the bytes of storages that no tensor uses.
        to: The device of all tensors.
        device_map: The new device of each device: `{"cuda:1": "cuda:0"}`.
        visible_devices: Renumber devices as `CUDA_VISIBLE_DEVICES` does.

    Raises:
        UnreadableFile: the source cannot be read.
        UsageError: an argument has a wrong value, or arguments exclude each other.
        AmbiguousName: there are several state dicts, and `key` chooses none.
        MatchError: a state dict does not fit `like`.
        NameCollision: two tensors would get the same key.
        NotRepresentable: the format cannot hold a tensor (with `strict`: anything), or a cast it.
        WriteError: nothing was written.
    """
    from ckptool.formats.several import opened_parts  # the command line asks where it needs it

    devices = None if visible_devices is None else _listed("visible_devices", visible_devices)
    conversion = Conversion(
        salvage=salvage, flatten=flatten, nest=nest, master=master, concat=tuple(concat),
        key=key, model_only=model_only, wrappers=wrappers, rename=_listed("rename", rename),
        include=_listed("include", include), exclude=_listed("exclude", exclude),
        resize=_listed("resize", resize), split=_listed("split", split), fuse=_listed("fuse", fuse),
        interpolate_pos=_listed("interpolate_pos", interpolate_pos),
        like=like, like_key=like_key, allow_missing=allow_missing, min_coverage=min_coverage,
        transpose=_listed("transpose", transpose),
        no_transpose=_listed("no_transpose", no_transpose),
        allow_unexpected=allow_unexpected, allow_mismatched=allow_mismatched,
        plain=plain, drop_objects=drop_objects, ties=ties, compact=compact,
        cast=cast, keep=transforms.kept(keep), cast_optimizer=cast_optimizer,
        allow_overflow=allow_overflow, dequantize=dequantize, raw=raw,
        to=to, device_map=device_map, visible_devices=devices,
    )  # fmt: skip
    to_folder, target = is_folder(target), in_folder(target, format)
    with opened_parts(source, salvage=salvage) as checkpoint:
        name = target_format(checkpoint, target, format, sharded=max_shard_size is not None)
        return save(
            conversion.applied(checkpoint, name),
            target,
            format=name,
            max_shard_size=max_shard_size,
            files_from=files_from,
            to_folder=to_folder,
            overwrite=overwrite,
            strict=strict,
            dry_run=dry_run,
            verify=verify,
            progress=progress,
        )


def _listed(name: str, values: Iterable[_Item]) -> tuple[_Item, ...]:
    if isinstance(values, str):
        raise UsageError(f"{name} takes a list, not a string")
    return tuple(values)


def device_rules(to: str | None, device_map: Mapping[str, str] | None) -> dict[str, str]:
    """Return the remap rules of `to` or of `device_map`, which exclude each other.

    Raises:
        UsageError: both are given.
    """
    if to is not None and device_map:
        raise UsageError(
            "choose one device for all (to) or rules for some (device_map), not both",
            hint="--device-map '*=cpu' is the rule for all others",
        )
    return {"*": to} if to is not None else dict(device_map or {})
