"""`convert`: the changing verbs in one pass, from a format that is read to one that is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

from ckptool import transforms
from ckptool.checkpoint import Checkpoint
from ckptool.errors import UsageError
from ckptool.formats import open_checkpoint
from ckptool.writing import Receipt, save, target_format

__all__ = ["convert", "converted", "device_rules"]


def convert(
    source: str | os.PathLike[str] | Checkpoint,
    target: str | os.PathLike[str],
    *,
    wrappers: str | None = None,
    to: str | None = None,
    device_map: Mapping[str, str] | None = None,
    visible_devices: Iterable[int] | None = None,
    key: str | None = None,
    model_only: bool = False,
    ties: str = "keep",
    format: str | None = None,
    strict: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Receipt:
    """Write `source` to `target`, changed as asked; tensor bytes that do not change are copied.

    Args:
        source: A path, or a checkpoint that is open.
        target: Its extension decides the format, unless `format` does.
        wrappers: `strip` (the default towards safetensors) or `keep`.
        to: A device that every tag becomes; or
        device_map: tags by tag (`{"cuda:1": "cuda:0"}`); or
        visible_devices: renumber as `CUDA_VISIBLE_DEVICES` does.
        key: The state dict to carry, alone, by its address.
        model_only: Carry the one model state dict alone; a pickled module becomes one.
        ties: `keep` writes tied tensors once where the format can, `copy` each on its own.
        format: `torch-zip`, `torch-legacy`, `safetensors`.
        strict: Refuse to leave anything out.
        overwrite: Replace an existing target.
        dry_run: Plan only.
        progress: Told bytes done and in all.

    Raises:
        UnreadableFile: the source cannot be read.
        AmbiguousName: several state dicts, and none chosen by `key`.
        NameCollision: stripping would give two tensors one name.
        NotRepresentable: the target's format cannot hold a tensor (or, `strict`, anything else).
        WriteError: nothing was written.
    """
    opened = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    try:
        name = target_format(opened, target, format)
        changed = converted(
            opened,
            name,
            wrappers=wrappers,
            rules=device_rules(to, device_map),
            visible_devices=visible_devices,
            key=key,
            model_only=model_only,
            ties=ties,
        )
        return save(
            changed,
            target,
            format=name,
            overwrite=overwrite,
            strict=strict,
            dry_run=dry_run,
            progress=progress,
        )
    finally:
        if opened is not source:
            opened.close()


def device_rules(to: str | None, device_map: Mapping[str, str] | None) -> dict[str, str]:
    """The remap rules of `to` or of `device_map`, which exclude each other."""
    if to is not None and device_map:
        raise UsageError("choose one device for all (to) or rules for some (device_map), not both")
    return {"*": to} if to is not None else dict(device_map or {})


def converted(
    checkpoint: Checkpoint,
    target: str,
    *,
    wrappers: str | None = None,
    rules: Mapping[str, str] | None = None,
    visible_devices: Iterable[int] | None = None,
    key: str | None = None,
    model_only: bool = False,
    ties: str = "keep",
) -> Checkpoint:
    """The checkpoint with `convert`'s changes made, as a file of the format `target` wants it.

    Safetensors holds one flat state dict, by tradition without wrappers; other formats all there
    is, with the names that it has.
    """
    flat = target == "safetensors"
    if wrappers not in (None, "strip", "keep"):
        raise UsageError(f"wrappers takes 'strip' or 'keep', not {wrappers!r}")
    if ties not in ("keep", "copy"):
        raise UsageError(f"ties takes 'keep' or 'copy', not {ties!r}")
    if visible_devices is not None and rules:
        raise UsageError("choose device rules or visible devices, not both")
    if flat or model_only or key is not None:
        checkpoint = transforms.single_state_dict(checkpoint, key)
    if wrappers == "strip" or (wrappers is None and flat):
        checkpoint = transforms.strip_module(checkpoint)
    if ties == "copy":
        checkpoint = transforms.untie(checkpoint)
    if visible_devices is not None:
        return transforms.visible_devices(checkpoint, list(visible_devices))
    return transforms.remap(checkpoint, rules) if rules else checkpoint
