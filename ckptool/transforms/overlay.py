"""The step that replaces tensors with those of the same key in another file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ckptool.core.addressing import NameIndex, select, unmatched_error
from ckptool.core.checkpoint import Change, Checkpoint
from ckptool.core.model import OrderedMap, TensorRef
from ckptool.core.names import find_common_wrapper, map_to_bare_names
from ckptool.core.quantizers import find_quantized
from ckptool.core.sections import Section, find_model_state_dict
from ckptool.core.tree import describe_location
from ckptool.errors import NotFound, NotRepresentable, UsageError
from ckptool.formats import Source, open_checkpoint
from ckptool.transforms.extraction import copy_state_dict
from ckptool.transforms.names import replace_entries
from ckptool.transforms.step import Step, check_list_option
from ckptool.words import are, counted, listed, printable, shell


@dataclass(frozen=True)
class Overlay(Step):
    """Replace tensors of the model with those of the same key in another file.

    Wrapper prefixes on either side are ignored. Shapes and dtypes must be equal. Keys tied to a
    replaced one change with it. The other file stays open as long as the result.
    """

    on_files: ClassVar[str] = "use dict.update for dicts in memory"
    options: ClassVar[Mapping[str, str]] = {
        "source": "overlay", "key": "overlay_key", "at": "overlay_at", "include": "overlay_include",
        "add": "overlay_add",
    }  # fmt: skip

    source: Source
    """The other file, of any format, or an open checkpoint."""
    key: Any = None
    """The path of its state dict, if it has several."""
    at: str | None = None
    """The submodule of the model to replace tensors in, for example `first_stage_model`."""
    include: Iterable[str] = ()
    """Globs of the tensors to take from the other file. Default: all."""
    add: bool = False
    """Add keys that the model does not have."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            UsageError: if `include` is a single text, or `at` is empty.
        """
        object.__setattr__(self, "include", check_list_option("overlay_include", self.include))
        if self.at == "":
            raise UsageError(
                "--overlay-at needs the path of a submodule", hint="for example --overlay-at vae"
            )

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with the tensors of the other file.

        Raises:
            UnreadableFile: if the other file cannot be read.
            NotFound, AmbiguousName: if there are no or several state dicts, the files have no key
                in common, or a glob matches nothing.
            NotRepresentable: if a quantized weight would lose its companions.
            UsageError: if a shape or dtype differs, or a key is new and `add` is False.
        """
        section = find_model_state_dict(checkpoint)
        if not isinstance(section.holder, dict):
            raise UsageError(
                "the model is a pickled module, whose class defines its tensors",
                file=checkpoint.path or None,
                hint="add --model-only to convert it to a state dict first",
            )
        if isinstance(self.source, Checkpoint):
            return self._overlay_section(checkpoint, section, self.source)
        other = open_checkpoint(os.fspath(self.source))
        try:
            return self._overlay_section(checkpoint, section, other)
        except BaseException:
            other.close()
            raise

    def _overlay_section(
        self, checkpoint: Checkpoint, section: Section, other: Checkpoint
    ) -> Checkpoint:
        """Return the checkpoint with the tensors of `other` in the state dict `section`."""
        other_state = copy_state_dict(other, find_model_state_dict(other, self.key))
        selected = self._select_tensors(other_state, other)
        model_tensors = {
            name: node for name, node in section.node.items() if isinstance(node, TensorRef)
        }
        bare_keys = map_to_bare_names(model_tensors)
        key_by_bare = {bare: key for key, bare in bare_keys.items()}
        wrapper = find_common_wrapper(bare_keys)
        pairs = {key_by_bare[bare]: new for bare, new in selected.items() if bare in key_by_bare}
        added = {wrapper + bare: new for bare, new in selected.items() if bare not in key_by_bare}
        if not pairs:
            raise self._no_common_key_error(checkpoint, section, selected, key_by_bare, other)
        if added and not self.add:
            raise UsageError(
                f"{counted(len(added), 'tensor')} of {printable(other.path)} "
                f"{are(len(added))} not in the model: "
                f"{listed(map(printable, added), most=3)}",
                file=checkpoint.path or None,
                hint="add --overlay-add to add them, or choose with --overlay-include GLOB",
            )
        _refuse_mismatched(checkpoint, model_tensors, pairs, other)
        _refuse_separated_companions(checkpoint, section.node, pairs.keys(), "the model")
        chosen = {
            name
            for name, node in other_state.items()
            if any(node is tensor for tensor in selected.values())
        }
        _refuse_separated_companions(other, other_state, chosen, "the other file")
        tied = _find_tied_replacements(model_tensors, pairs)
        replacements = {**pairs, **tied}
        items = [(name, replacements.get(name, value)) for name, value in section.holder.items()]
        text = (
            f"replaced {counted(len(pairs), 'tensor')}{describe_location(section.path)} "
            f"with those of {printable(other.path)}"
        )
        changes = [Change("overlay", text, len(pairs))]
        if tied:
            text = f"updated {counted(len(tied), 'tied key')}: {listed(map(printable, tied), 3)}"
            changes.append(Change("overlay", text, len(tied)))
        if added:
            text = f"added {counted(len(added), 'tensor')}: {listed(map(printable, added), most=3)}"
            changes.append(Change("overlay", text, len(added)))
        if any(part.kind == "optimizer" for part in checkpoint.sections):
            text = "the file still has the optimizer state of the old weights"
            changes.append(Change("warning", text))
        entries = {id(section.holder): [*items, *added.items()]}
        result = replace_entries(checkpoint, entries, *changes)
        return replace(result, sources=(*result.sources, *other.sources))

    def _select_tensors(self, other_state: OrderedMap, other: Checkpoint) -> dict[str, TensorRef]:
        """Return the chosen tensors of the other file, by their bare keys in the model."""
        tensors = {name: node for name, node in other_state.items() if isinstance(node, TensorRef)}
        bare_keys = map_to_bare_names(tensors)
        index = NameIndex([((bare_keys[name],), tensor) for name, tensor in tensors.items()])
        chosen = select(index, tuple(self.include), exclude=(), endings=False)
        for unmatched in chosen.unmatched:
            raise unmatched_error(unmatched, other.path)
        prefix = f"{self.at}." if self.at is not None else ""
        return {prefix + key: tensor for (key,), tensor in chosen.pick_from(index)}

    def _no_common_key_error(
        self,
        checkpoint: Checkpoint,
        section: Section,
        selected: Mapping[str, TensorRef],
        key_by_bare: Mapping[str, str],
        other: Checkpoint,
    ) -> NotFound:
        """Return the error for files without a common key.

        Its hint has the submodule with the most tensors of these keys and shapes, if there is one.
        `selected` has the tensors of the other file by bare key, with the path `at` before it.
        """
        shape_by_model_key = {bare: section.node[key].shape for bare, key in key_by_bare.items()}
        # Only keys with the same last component can end alike.
        model_keys_by_component: dict[str, list[str]] = {}
        for model_key in shape_by_model_key:
            component = model_key.rpartition(".")[2]
            model_keys_by_component.setdefault(component, []).append(model_key)
        matches_by_submodule: Counter[str] = Counter()
        for bare, tensor in selected.items():
            end = "." + (bare if self.at is None else bare.removeprefix(f"{self.at}."))
            for model_key in model_keys_by_component.get(end.rpartition(".")[2], ()):
                if model_key.endswith(end) and shape_by_model_key[model_key] == tensor.shape:
                    matches_by_submodule[model_key.removesuffix(end)] += 1
        hint = f"the model has {listed(key_by_bare, 3)}; the other file {listed(selected, 3)}"
        if matches_by_submodule:
            [(path, count)] = matches_by_submodule.most_common(1)
            hint = f"add --overlay-at {path}, which matches {count:,} of {len(selected):,}"
        return NotFound(
            f"no tensor of {printable(other.path)} has a key of the model",
            file=checkpoint.path or None,
            hint=hint,
        )


def _refuse_mismatched(
    checkpoint: Checkpoint,
    model_tensors: Mapping[str, TensorRef],
    pairs: Mapping[str, TensorRef],
    other: Checkpoint,
) -> None:
    """Refuse replacements with another shape or dtype; `pairs` has them by key of the model."""
    differing = [
        f"{printable(name)} (file {tensor.dtype} {list(tensor.shape)}, model "
        f"{model_tensors[name].dtype} {list(model_tensors[name].shape)})"
        for name, tensor in pairs.items()
        if (tensor.shape, tensor.dtype) != (model_tensors[name].shape, model_tensors[name].dtype)
    ]
    if differing:
        only_dtypes_differ = all(
            tensor.shape == model_tensors[name].shape for name, tensor in pairs.items()
        )
        raise UsageError(
            f"{counted(len(differing), 'tensor')} of {printable(other.path)} have a different "
            "shape or dtype in the model: "
            f"{listed(differing, most=3)}",
            file=checkpoint.path or None,
            hint=f"cast the other file first: ckptool cast {shell(other.path)} --dtype "
            f"{model_tensors[next(iter(pairs))].dtype}"
            if only_dtypes_differ
            else None,
        )


def _refuse_separated_companions(
    checkpoint: Checkpoint, state: Mapping[Any, Any], chosen: Iterable[str], owner: str
) -> None:
    """Refuse to choose only some of a quantized weight and its scales; `owner` is for messages."""
    names = {*chosen}
    for weight, quantized in find_quantized(state).items():  # {quantized}: "is quantized (fp8)"
        group = {weight, *quantized.companions}
        is_separated = names & group and not group <= names
        if is_separated:
            raise NotRepresentable(
                f"{printable(weight)!r} of {owner} {quantized}, and would be separated from "
                f"{listed(sorted(group - names), 3)}",
                file=checkpoint.path or None,
                hint="select them together with --overlay-include, or dequantize first",
            )


def _find_tied_replacements(
    model_tensors: Mapping[str, TensorRef], pairs: Mapping[str, TensorRef]
) -> dict[str, TensorRef]:
    """Return the new tensor for each key that is not replaced, but tied to a replaced one.

    `pairs` has the new tensors by replaced key.
    """
    new_by_place = {
        model_tensors[name].place: tensor
        for name, tensor in pairs.items()
        if model_tensors[name].place is not None
    }
    return {
        name: new_by_place[tensor.place]
        for name, tensor in model_tensors.items()
        if name not in pairs and tensor.place is not None and tensor.place in new_by_place
    }
