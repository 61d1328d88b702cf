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
from ckptool.transforms.extraction import plain_state_dict
from ckptool.transforms.names import with_items
from ckptool.transforms.step import Step, listed_option
from ckptool.words import are, counted, listed, printable, shell

_OPTIMIZER = "has an optimizer state, which belongs to the replaced weights"


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
        object.__setattr__(self, "include", listed_option("overlay_include", self.include))
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
        part = find_model_state_dict(checkpoint)
        if not isinstance(part.holder, dict):
            raise UsageError(
                "the model is a pickled module, whose class defines its tensors",
                file=checkpoint.path or None,
                hint="add --model-only to convert it to a state dict first",
            )
        if isinstance(self.source, Checkpoint):
            return self._overlay_section(checkpoint, part, self.source)
        other = open_checkpoint(os.fspath(self.source))
        try:
            return self._overlay_section(checkpoint, part, other)
        except BaseException:
            other.close()
            raise

    def _overlay_section(
        self, checkpoint: Checkpoint, part: Section, other: Checkpoint
    ) -> Checkpoint:
        theirs = plain_state_dict(other, find_model_state_dict(other, self.key))
        taken = self._select_tensors(theirs, other)
        own = {name: one for name, one in part.node.items() if isinstance(one, TensorRef)}
        bare = map_to_bare_names(own)
        by_bare = {short: name for name, short in bare.items()}
        wrapper = find_common_wrapper(bare)
        pairs = {by_bare[short]: one for short, one in taken.items() if short in by_bare}
        added = {wrapper + short: one for short, one in taken.items() if short not in by_bare}
        if not pairs:
            raise self._no_common_key(checkpoint, part, taken, by_bare, other)
        if added and not self.add:
            raise UsageError(
                f"{counted(len(added), 'tensor')} of {printable(other.path)} "
                f"{are(len(added))} not in the model: "
                f"{listed(map(printable, added), most=3)}",
                file=checkpoint.path or None,
                hint="add --overlay-add to add them, or choose with --overlay-include GLOB",
            )
        _check_alike(checkpoint, own, pairs, other)
        _check_companions(checkpoint, part.node, pairs.keys(), "the model")
        chosen = {name for name, one in theirs.items() if any(one is it for it in taken.values())}
        _check_companions(other, theirs, chosen, "the other file")
        tied = _tied_replacements(own, pairs)
        instead = {**pairs, **tied}
        items = [(name, instead.get(name, value)) for name, value in part.holder.items()]
        text = (
            f"replaced {counted(len(pairs), 'tensor')}{describe_location(part.path)} with those of "
            f"{printable(other.path)}"
        )
        changes = [Change("overlay", text, len(pairs))]
        if tied:
            text = f"updated {counted(len(tied), 'tied key')}: {listed(map(printable, tied), 3)}"
            changes.append(Change("overlay", text, len(tied)))
        if added:
            text = f"added {counted(len(added), 'tensor')}: {listed(map(printable, added), most=3)}"
            changes.append(Change("overlay", text, len(added)))
        if any(one.kind == "optimizer" for one in checkpoint.sections):
            changes.append(Change("warning", f"the file {_OPTIMIZER}"))
        entries = {id(part.holder): [*items, *added.items()]}
        made = with_items(checkpoint, entries, *changes)
        return replace(made, sources=(*made.sources, *other.sources))

    def _select_tensors(self, theirs: OrderedMap, other: Checkpoint) -> dict[str, TensorRef]:
        """Return the tensors of the other file by their keys in the model."""
        tensors = {name: one for name, one in theirs.items() if isinstance(one, TensorRef)}
        bare = map_to_bare_names(tensors)
        index = NameIndex([((bare[name],), one) for name, one in tensors.items()])
        chosen = select(index, tuple(self.include), (), endings=False)
        for one in chosen.unmatched:
            raise unmatched_error(one, other.path)
        front = f"{self.at}." if self.at is not None else ""
        return {front + path[0]: one for path, one in chosen.pick_from(index)}

    def _no_common_key(
        self,
        checkpoint: Checkpoint,
        part: Section,
        taken: Mapping[str, TensorRef],
        by_bare: Mapping[str, str],
        other: Checkpoint,
    ) -> NotFound:
        """Return the error for no common key, with the prefix that would give the most matches."""
        front = len(self.at) + 1 if self.at is not None else 0
        prefixes: Counter[str] = Counter()
        shapes = {short: part.node[name].shape for short, name in by_bare.items()}
        ends: dict[str, list[str]] = {}
        for short in shapes:
            ends.setdefault(short.rpartition(".")[2], []).append(short)
        for short, one in taken.items():
            own = short[front:]
            for there in ends.get(own.rpartition(".")[2], ()):
                if there.endswith(f".{own}") and shapes[there] == one.shape:
                    prefixes[there.removesuffix(f".{own}")] += 1
        hint = f"the model has {listed(by_bare, 3)}; the other file {listed(taken, 3)}"
        for path, count in prefixes.most_common(1):
            hint = f"add --overlay-at {path}, which matches {count:,} of {len(taken):,}"
        return NotFound(
            f"no tensor of {printable(other.path)} has a key of the model",
            file=checkpoint.path or None,
            hint=hint,
        )


def _check_alike(
    checkpoint: Checkpoint,
    own: Mapping[str, TensorRef],
    pairs: Mapping[str, TensorRef],
    other: Checkpoint,
) -> None:
    """Refuse tensors of another shape or dtype."""
    wrong = [
        f"{printable(name)} (file {one.dtype} {list(one.shape)}, model "
        f"{own[name].dtype} {list(own[name].shape)})"
        for name, one in pairs.items()
        if (one.shape, one.dtype) != (own[name].shape, own[name].dtype)
    ]
    if wrong:
        casts = all(one.shape == own[name].shape for name, one in pairs.items())
        raise UsageError(
            f"{counted(len(wrong), 'tensor')} of {printable(other.path)} have a different "
            "shape or dtype in the model: "
            f"{listed(wrong, most=3)}",
            file=checkpoint.path or None,
            hint=f"cast the other file first: ckptool cast {shell(other.path)} --dtype "
            f"{own[next(iter(pairs))].dtype}"
            if casts
            else None,
        )


def _check_companions(
    checkpoint: Checkpoint, state: Mapping[Any, Any], chosen: Iterable[str], what: str
) -> None:
    """Refuse to separate quantized weights from their scales."""
    names = {*chosen}
    for weight, known in find_quantized(state).items():
        group = {weight, *known.companions}
        if names & group and not group <= names:
            raise NotRepresentable(
                f"{printable(weight)!r} of {what} {known}, and would be separated from "
                f"{listed(sorted(group - names), 3)}",
                file=checkpoint.path or None,
                hint="select them together with --overlay-include, or dequantize first",
            )


def _tied_replacements(
    own: Mapping[str, TensorRef], pairs: Mapping[str, TensorRef]
) -> dict[str, TensorRef]:
    """Return the new tensors of keys that are only tied to a replaced one."""
    places = {own[name].place: one for name, one in pairs.items() if own[name].place is not None}
    return {
        name: places[one.place]
        for name, one in own.items()
        if name not in pairs and one.place is not None and one.place in places
    }
