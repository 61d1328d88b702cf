"""`ckptool convert`."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import click

from ckptool.cli.changing import divided, workers_option, write_changed
from ckptool.cli.computing_verbs import parsed_keep
from ckptool.cli.console import set_exit_code
from ckptool.cli.like import Allowing, allowance_options, in_options, referred
from ckptool.cli.options import (
    PATH,
    OutputOptions,
    Sectioned,
    dtype_option,
    flag,
    glob_options,
    master_option,
    parsed_rules,
    plain_options,
    quantized_options,
    repeatable,
    shard_option,
    target_options,
    verb,
    visible_option,
)
from ckptool.cli.renaming import RulesInOrder, rename_options
from ckptool.conversion import Destination, converted, opened_for, steps_of, with_configs
from ckptool.conversion.steps import place_in
from ckptool.core.checkpoint import Checkpoint
from ckptool.errors import UsageError
from ckptool.formats.several import keyed
from ckptool.transforms import Drop, Rule
from ckptool.transforms.name_rules import read_text
from ckptool.transforms.tree_edits import parted, plain_json
from ckptool.words import printable


def _only_one(files: tuple[str, ...]) -> str | None:
    if len(files) > 1:
        raise UsageError("--overlay takes one file", hint="run convert once for each")
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
            "salvage": "What is taken",
            "wrappers": "Names and shapes",
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
@flag("--salvage", "Take what is whole of a damaged file; exit code 1 where something is not.")
@click.option(
    "--flatten",
    metavar="[SEP]",
    is_flag=False,
    flag_value=".",
    help="Make nested dicts one flat dict; keys are joined by SEP, a dot by default.",
)
@master_option
@repeatable(
    "--concat", "GLOB=DIM", "Join the parts of Megatron's ranks along this dimension; repeatable."
)
@click.option("--key", metavar="NAME", help="The state dict to take, if there are several.")
@glob_options
@click.option(
    "--overlay",
    metavar="FILE",
    type=PATH,
    multiple=True,
    callback=lambda _, __, files: _only_one(files),
    help="Put the tensors of FILE in the place of those of the same key.",
)
@click.option("--overlay-key", metavar="NAME", help="The state dict of it, if it has several.")
@click.option("--overlay-at", metavar="PATH", help="The submodule that its keys are below.")
@repeatable("--overlay-include", "GLOB", "Take only its tensors that match; repeatable.")
@flag("--overlay-add", "Add keys that the model does not have.")
@flag("--ema", "The averaged weights, under the names of the model that they are an average of.")
@click.option(
    "--wrappers",
    type=click.Choice(["strip", "keep"]),
    help="Remove or keep prefixes such as module. [default: strip for safetensors, else keep]",
)
@click.option("--at", metavar="PATH", help="Remove the wrapper of this submodule, as features.")
@rename_options("a name")
@click.option(
    "--recipe",
    metavar="NAME|FILE",
    type=PATH,
    help="Convert to the layout of another library, for example llama-meta-to-hf (see ckptool "
    "recipes).",
)
@flag("--reverse", "Use the recipe from its target to its source.")
@repeatable(
    "--param", "KEY=VALUE", "Set a parameter of the recipe, for example heads=32. Repeatable."
)
@repeatable(
    "--resize",
    "GLOB=ROWS[:zero]",
    "Cut rows off, or add the mean of the others (or zeros); repeatable.",
)
@repeatable(
    "--interpolate-pos",
    "GLOB=HxW",
    "Fit position embeddings of a ViT to a grid of HxW patches, as timm does; repeatable.",
)
@repeatable(
    "--split", "'*.A=>*.B,*.C@DIM'", "Split tensors into equal parts along a dimension; repeatable."
)
@repeatable("--fuse", "'*.B,*.C=>*.A@DIM'", "Join tensors along a dimension; repeatable.")
@click.option("--nest", metavar="KEY", help="Put all that is written under KEY, as state_dict.")
@click.option(
    "--like",
    metavar="REFERENCE",
    type=PATH,
    help="Use the names of this checkpoint, or of the model of MODULE:FACTORY (ckptool match).",
)
@click.option(
    "--like-key", metavar="NAME", help="The state dict of REFERENCE, if there are several."
)
@allowance_options(casts=False)
@plain_options
@click.option(
    "--ties",
    type=click.Choice(["keep", "copy"]),
    default="keep",
    show_default=True,
    help="Write tied tensors once, or each with its own bytes.",
)
@dtype_option("--dtype", "Cast floating-point tensors to this type: bfloat16, float16.")
@repeatable("--keep", "NAME[=DTYPE]", "Except these from --dtype; repeatable.")
@quantized_options
@flag("--cast-optimizer", "Cast optimizer state, too.")
@flag("--allow-overflow", "Cast values too large for the type, too.")
@flag("--compact", "Trim storages to the part that tensors use.")
@click.option("--to", metavar="DEVICE", help="Move all tensors to it: cpu, cuda:0.")
@repeatable(
    "--map", "A=B", "Move tensors on device A to device B; cuda:* is any index. Repeatable."
)
@visible_option
@repeatable("--drop", "PATH", "Remove the entry at this exact path; repeatable.")
@repeatable("--move", "OLD=NEW", "Give the entry at OLD the path NEW; repeatable, all at once.")
@repeatable(
    "--set",
    "PATH=VALUE",
    "Set a plain value, as JSON or of @FILE.json: epoch=3, 'name=\"a\"'. Repeatable.",
    "values",
)
@click.option("-o", "--output", type=PATH, help="The same as DESTINATION.")
@flag("--in-place", "Change SOURCE itself, under a journal.")
@shard_option
@click.option(
    "--files-from",
    metavar="DIR",
    type=PATH,
    help="Copy configuration, tokenizer and processor files of DIR next to the weights.",
)
@workers_option
@flag("--strict", "Stop with an error if anything is left out.")
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

    --format or the ending of DESTINATION decides the format (.safetensors,
    .safetensors.index.json for shards); .pth and its like keep the format of a torch SOURCE.
    Safetensors holds one flat state dict; the rest is left out and named. The changes are made in
    one pass, in the order of the sections below.

    DESTINATION is a folder if it exists as one or ends with a slash. Without a known extension, it
    is one if SOURCE is a folder or a set of files, or with --files-from or --max-shard-size.
    Convert writes model.safetensors in it, as from_pretrained reads it (for an adapter
    adapter_model.safetensors), and copies config.json, the tokenizer and other such files from
    --files-from or from the folder of SOURCE. It keeps files that exist there; --force replaces
    them. The copy of config.json follows --dequantize, --resize and --dtype. --format dcp writes a
    folder that torch.distributed.checkpoint.load reads.
    """
    if target.in_place:
        if len(sources) > 1 or target.output is not None or max_shard_size is not None:
            raise UsageError(
                "--in-place changes one SOURCE itself, without DESTINATION and shards",
                hint="ckptool convert FILE --in-place --move OLD=NEW",
            )
        if keyed(sources[0]) is not None:
            raise UsageError(
                "--in-place changes one SOURCE itself, which has no KEY=",
                hint="ckptool convert FILE --in-place --nest KEY",
            )
        files, destination = list(sources), sources[0]
    elif target.output is None and len(sources) < 2:
        hint = "ckptool convert A B, or A -o B; --in-place changes A itself"
        raise UsageError("convert needs one file to write", hint=hint)
    else:
        *files, destination = [*sources, target.output] if target.output else sources
    steps = steps_of(
        {
            "salvage": salvage,
            "map": parsed_rules(map),
            "keep": tuple(parsed_keep(keep)),
            "param": _parsed_params(param),
            "like": None if like is None else referred(like),
            "rename": rules,
            "set": parsed_values(values),
            **changes,
        }
    )

    if drop:  # --force is about the target too
        steps.insert(place_in(steps, Drop), Drop(drop, force=target.force))
    goal = Destination(
        destination,
        files if files[1:] else files[0],
        steps,
        format=target.format,
        files_from=files_from,
        sharded=max_shard_size is not None,
    )
    steps = with_configs(steps, goal.folders)

    def change(checkpoint: Checkpoint) -> Checkpoint:
        name = checkpoint.format if target.in_place else goal.format_for(checkpoint)
        with in_options():
            return goal.as_file(converted(checkpoint, steps, name))

    def write() -> None:
        receipt = write_changed(
            files[0],
            change,
            replace(target, output=None if target.in_place else goal.path),
            word="converted",
            strict=strict,
            max_shard_size=max_shard_size,
            files_from=None if target.in_place else goal.companions,
            to_folder=goal.is_folder and not target.in_place,
            apart=goal.apart,
            opening=lambda: opened_for(
                files if files[1:] or keyed(files[0]) else files[0], steps, salvage=salvage
            ),
        )
        if any(one.kind == "salvage" and one.count for one in receipt.changes):
            set_exit_code(1)

    divided(write, workers)


def _parsed_params(params: tuple[str, ...]) -> dict[str, str]:
    """Return parameters of a recipe.

    Raises:
        UsageError: one is not `KEY=VALUE`, or is given twice.
    """
    made: dict[str, str] = {}
    for one in params:
        key, _, value = (part.strip() for part in one.partition("="))
        if not (key and value):
            text = f"{printable(one)!r} is not KEY=VALUE"
            raise UsageError(text, hint="for example --param heads=32")
        if made.setdefault(key, value) != value:
            raise UsageError(f"the parameter {printable(key)} is given twice", hint="keep one")
    return made


def parsed_values(texts: tuple[str, ...]) -> dict[str, Any]:
    """Return the values of `PATH=VALUE`, by their paths.

    Raises:
        UsageError: a text is none of these, or a value is no JSON.
        UnreadableFile: the file of `@FILE.json` cannot be read.
    """
    values: dict[str, Any] = {}
    for text in texts:
        path, equals, value = parted(text)
        if not (path and equals):
            raise UsageError(f"{text!r} is not PATH=VALUE", hint="--set epoch=3")
        if path in values:
            raise UsageError(f"--set names {path!r} twice")
        values[path] = plain_json(read_text(value[1:]) if value.startswith("@") else value)
    return values
