"""`ckptool convert`."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import click

from ckptool.cli.changing import run_divided, workers_option, write_changed
from ckptool.cli.computing_verbs import parse_keep_rules
from ckptool.cli.console import set_exit_code
from ckptool.cli.like import Allowing, allowance_options, hint_with_options, resolve_reference
from ckptool.cli.options import (
    PATH,
    OutputOptions,
    Sectioned,
    dtype_option,
    flag,
    glob_options,
    master_option,
    parse_device_rules,
    plain_options,
    quantized_options,
    repeatable,
    shard_option,
    target_options,
    verb,
    visible_option,
)
from ckptool.cli.renaming import RulesInOrder, rename_options
from ckptool.conversion import Destination, apply_steps, make_steps, open_for_steps, with_configs
from ckptool.conversion.steps import position_for
from ckptool.core.checkpoint import Checkpoint
from ckptool.errors import UsageError
from ckptool.formats.several import split_key
from ckptool.transforms import Drop, Rule
from ckptool.transforms.name_rules import read_text
from ckptool.transforms.tree_edits import parse_json, split_rule
from ckptool.words import printable


def _require_one_overlay(files: tuple[str, ...]) -> str | None:
    """Return the one overlay file, or None without any."""
    if len(files) > 1:
        raise UsageError("--overlay accepts one file", hint="run convert once for each file")
    return files[0] if files else None


class _Convert(Allowing, RulesInOrder, Sectioned):
    most_used = frozenset(
        {
            "key", "model_only", "exclude", "wrappers", "rename", "recipe", "like", "plain",
            "dtype", "to", "max_shard_size", "output", "dry_run", "force", "as_json",
        }
    )  # fmt: skip
    begins = MappingProxyType(
        {
            "salvage": "Input",
            "wrappers": "Keys and shapes",
            "plain": "Values",
            "to": "Devices",
            "drop": "Entries",
            "output": "Files",
            "as_json": "Output",
        }
    )


@verb(
    "convert",
    "ckptool convert model.pth model.safetensors",
    "ckptool convert model.pth laptop.pth --wrappers strip --to cpu",
    "ckptool convert whole.pth weights.pth --model-only --plain",
    "ckptool convert model.pth small.safetensors --dtype bfloat16 --keep '*.norm.*=float32'",
    "ckptool convert model.pth model.safetensors --max-shard-size 5GB",
    "ckptool convert model.safetensors.index.json merged.safetensors",
    "ckptool convert part1.safetensors part2.safetensors -o whole.safetensors",
    "ckptool convert model.pth fitted.pth --like reference.pth",
    "ckptool convert step-1000/ hf-model/ --recipe llama-torchtitan-to-hf",
    cls=_Convert,
)
@click.argument("sources", type=PATH, nargs=-1, required=True, metavar="SOURCE... [DESTINATION]")
@flag("--salvage", "Salvage the intact tensors of a damaged file. Exits with 1 if any are lost.")
@click.option(
    "--flatten",
    metavar="[SEP]",
    is_flag=False,
    flag_value=".",
    help="Flatten nested dicts into one, with keys joined by SEP. [default: a dot]",
)
@master_option
@repeatable(
    "--concat", "GLOB=DIM", "Join the parts of Megatron ranks along this dimension. Repeatable."
)
@click.option("--key", metavar="NAME", help="Take this state dict, if the file has several.")
@glob_options
@click.option(
    "--overlay",
    metavar="FILE",
    type=PATH,
    multiple=True,
    callback=lambda _, __, files: _require_one_overlay(files),
    help="Replace tensors with the ones in FILE that have the same keys.",
)
@click.option(
    "--overlay-key", metavar="NAME", help="Take this state dict of the overlay, if it has several."
)
@click.option("--overlay-at", metavar="PATH", help="Apply the overlay to this submodule.")
@repeatable(
    "--overlay-include", "GLOB", "Apply only the overlay tensors that match GLOB. Repeatable."
)
@flag("--overlay-add", "Also add overlay keys that the model does not have.")
@flag("--ema", "Take the averaged (EMA) weights under the model's own keys.")
@click.option(
    "--wrappers",
    type=click.Choice(["strip", "keep"]),
    help='Strip or keep wrapper prefixes such as "module." [default: strip for safetensors, '
    "else keep]",
)
@click.option(
    "--at",
    metavar="PATH",
    help="Remove the wrapper prefix inside this submodule, for example features.",
)
@rename_options("a key")
@click.option(
    "--recipe",
    metavar="NAME|FILE",
    type=PATH,
    help="Convert with a recipe to the layout of another library, for example llama-meta-to-hf. "
    "ckptool recipes lists them.",
)
@flag("--reverse", "Apply the recipe in reverse.")
@repeatable(
    "--param", "KEY=VALUE", "Set a parameter of the recipe, for example heads=32. Repeatable."
)
@repeatable(
    "--resize",
    "GLOB=ROWS[:zero]",
    "Resize to ROWS: cut off rows, or add rows with the mean (or zeros). Repeatable.",
)
@repeatable(
    "--interpolate-pos",
    "GLOB=HxW",
    "Interpolate ViT position embeddings to a grid of HxW patches, as timm does. Repeatable.",
)
@repeatable(
    "--split", "'*.A=>*.B,*.C@DIM'", "Split tensors into equal parts along a dimension. Repeatable."
)
@repeatable("--fuse", "'*.B,*.C=>*.A@DIM'", "Join tensors along a dimension. Repeatable.")
@click.option("--nest", metavar="KEY", help="Put the result under KEY, for example state_dict.")
@click.option(
    "--like",
    metavar="REFERENCE",
    type=PATH,
    help="Use the keys of this checkpoint, or of the model that MODULE:FACTORY builds, as ckptool "
    "match does.",
)
@click.option(
    "--like-key", metavar="NAME", help="Use this state dict of REFERENCE, if it has several."
)
@allowance_options(casts=False)
@plain_options
@click.option(
    "--ties",
    type=click.Choice(["keep", "copy"]),
    default="keep",
    show_default=True,
    help="Write tied tensors once, or each separately.",
)
@dtype_option("--dtype", "Cast floating-point tensors to DTYPE, for example bfloat16.")
@repeatable(
    "--keep",
    "NAME[=DTYPE]",
    "Cast matching tensors to this DTYPE instead, or not at all. Repeatable.",
)
@quantized_options
@flag("--cast-optimizer", "Also cast optimizer state.")
@flag("--allow-overflow", "Cast even if values overflow.")
@flag("--compact", "Drop bytes that no tensor uses.")
@click.option("--to", metavar="DEVICE", help="Move every tensor to DEVICE, for example cpu.")
@repeatable(
    "--map", "A=B", "Move tensors from device A to B; cuda:* matches every index. Repeatable."
)
@visible_option
@repeatable("--drop", "PATH", "Remove the entry at this exact path. Repeatable.")
@repeatable(
    "--move", "OLD=NEW", "Move the entry at OLD to NEW. Repeatable; all moves happen at once."
)
@repeatable(
    "--set",
    "PATH=VALUE",
    "Set a value to JSON, or to @FILE.json: epoch=3, 'name=\"a\"'. Repeatable.",
    "values",
)
@click.option(
    "-o", "--output", type=PATH, help="Write to this file or folder; same as DESTINATION."
)
@flag("--in-place", "Change SOURCE itself; recover undoes an interrupted edit.")
@shard_option
@click.option(
    "--files-from",
    metavar="DIR",
    type=PATH,
    help="Copy configuration, tokenizer and processor files from DIR.",
)
@workers_option
@flag("--strict", "Stop with an error if anything would be left out.")
@target_options(place=False)
def command(
    sources: tuple[str, ...],
    map: tuple[str, ...],
    rules: list[Rule],
    keep: tuple[str, ...],
    param: tuple[str, ...],
    max_shard_size: str | None,
    files_from: str | None,
    workers: int | None,
    strict: bool,
    like: str | None,
    salvage: bool,
    values: tuple[str, ...],
    drop: tuple[str, ...],
    target: OutputOptions,
    **changes: Any,
) -> None:
    """Convert to another format; rename, cast and move on the way.

    --format or the extension of DESTINATION decides the format (.safetensors, or
    .safetensors.index.json for shards). With .pth and similar extensions, a torch SOURCE keeps its
    format. Safetensors contains one flat state dict; the receipt lists everything left out. All
    changes are made in one pass, in the order of the sections below.

    DESTINATION is a folder if it is an existing folder or ends with a slash. Without a known
    extension, it is also a folder if SOURCE is a folder or a set of files, or with --files-from or
    --max-shard-size. convert writes model.safetensors into it, as from_pretrained expects
    (adapter_model.safetensors for an adapter), and copies config.json, the tokenizer and similar
    files from --files-from or the folder of SOURCE. Existing files are kept; --force replaces them.
    The copied config.json is updated for --dequantize, --resize and --dtype. --format dcp writes a
    folder for torch.distributed.checkpoint.load.
    """
    *files, destination = _resolve_files(sources, target, max_shard_size)
    source = files if files[1:] else files[0]
    steps = make_steps(
        {
            "salvage": salvage,
            "map": parse_device_rules(map),
            "keep": tuple(parse_keep_rules(keep)),
            "param": _parse_params(param),
            "like": None if like is None else resolve_reference(like),
            "rename": rules,
            "set": parse_values(values),
            **changes,
        }
    )

    if drop:  # not made by `make_steps`, because --force is an option of the target
        steps.insert(position_for(steps, Drop), Drop(drop, force=target.force))
    goal = Destination(
        destination,
        source,
        steps,
        format=target.format,
        files_from=files_from,
        sharded=max_shard_size is not None,
    )
    steps = with_configs(steps, goal.folders)

    def change(checkpoint: Checkpoint) -> Checkpoint:
        """Apply the steps for the format of the target, which in place is that of the file."""
        name = checkpoint.format if target.in_place else goal.format_for(checkpoint)
        with hint_with_options():
            return goal.unwrap_only_file(apply_steps(checkpoint, steps, name))

    def write() -> None:
        """Write the result, and exit with 1 if a damaged tensor was lost."""
        receipt = write_changed(
            files[0],
            change,
            replace(target, output=None if target.in_place else goal.path),
            word="converted",
            strict=strict,
            max_shard_size=max_shard_size,
            files_from=None if target.in_place else goal.companions,
            to_folder=goal.is_folder and not target.in_place,
            divide_files=goal.divide_files,
            # `KEY=FILE` is only understood in a list.
            opening=lambda: open_for_steps(
                files if split_key(files[0]) else source, steps, salvage=salvage
            ),
        )
        if any(change.kind == "salvage" and change.count for change in receipt.changes):
            set_exit_code(1)

    run_divided(write, workers)


def _resolve_files(
    sources: tuple[str, ...], target: OutputOptions, max_shard_size: str | None
) -> list[str]:
    """Return the files to read, then the one to write: with --in-place, the same one.

    Raises:
        UsageError: if no destination is given, or an option or source excludes --in-place.
    """
    if target.in_place:
        if len(sources) > 1 or target.output is not None or max_shard_size is not None:
            raise UsageError(
                "--in-place needs one SOURCE, and no DESTINATION or --max-shard-size",
                hint="ckptool convert FILE --in-place --move OLD=NEW",
            )
        if split_key(sources[0]) is not None:
            raise UsageError(
                "--in-place does not accept KEY=FILE as SOURCE",
                hint="ckptool convert FILE --in-place --nest KEY",
            )
        return [sources[0], sources[0]]
    if target.output is None and len(sources) < 2:
        hint = "ckptool convert A B, or ckptool convert A --in-place to change A itself"
        raise UsageError("convert needs a DESTINATION", hint=hint)
    files = [*sources, target.output] if target.output else [*sources]
    if not files[-1]:
        raise UsageError("DESTINATION is empty", hint="ckptool convert A B")
    return files


def _parse_params(params: tuple[str, ...]) -> dict[str, str]:
    """Return the recipe parameters as a mapping.

    Raises:
        UsageError: if one is not `KEY=VALUE`, or a key is given twice with different values.
    """
    params_by_name: dict[str, str] = {}
    for text in params:
        key, _, value = (part.strip() for part in text.partition("="))
        if not (key and value):
            message = f"{printable(text)!r} is not KEY=VALUE"
            raise UsageError(message, hint="give a value, such as --param heads=32")
        if params_by_name.setdefault(key, value) != value:
            raise UsageError(f"parameter {printable(key)} is given twice", hint="keep one of them")
    return params_by_name


def parse_values(texts: tuple[str, ...]) -> dict[str, Any]:
    """Return the values in `PATH=VALUE`, by path.

    Raises:
        UsageError: if a text has another form, or a value is not JSON.
        UnreadableFile: if the file in `@FILE.json` cannot be read.
    """
    values: dict[str, Any] = {}
    for text in texts:
        path, equals, value = split_rule(text)
        if not (path and equals):
            raise UsageError(
                f"{text!r} is not PATH=VALUE", hint="give a value, such as --set epoch=3"
            )
        if path in values:
            raise UsageError(f"--set has {path!r} twice")
        values[path] = parse_json(read_text(value[1:]) if value.startswith("@") else value)
    return values
