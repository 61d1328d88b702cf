"""Change the shape of the tree: flatten nested containers, or put the tree under a key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ckptool.core.checkpoint import Change, Checkpoint
from ckptool.core.model import Opaque, OrderedMap, Path, TensorRef
from ckptool.core.tree import describe_path, walk
from ckptool.errors import NameCollision, NotRepresentable
from ckptool.transforms.step import Step
from ckptool.words import counted, listed, printable


@dataclass(frozen=True)
class Flatten(Step):
    """Flatten nested dicts and lists into one dict, keyed by the joined paths of the entries."""

    options: ClassVar[Mapping[str, str]] = {"separator": "flatten"}

    separator: str = "."
    """The text between joined keys and list indexes."""

    def words(self) -> Iterator[str]:
        """Yield the command-line words of this step for `convert`."""
        yield "--flatten" if self.separator == "." else f"--flatten={self.separator}"

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with one dict as its root.

        Raises:
            NameCollision: if two entries would get the same key.
            NotRepresentable: if tensors are in an object, whose class would be lost.
        """
        root, losses = OrderedMap(), list[str]()

        def note_losses(path: Path, node: Any) -> bool:
            """Note the losses of a container, and enter it; refuse an object."""
            shown = describe_path(path)
            if isinstance(node, Opaque):
                raise NotRepresentable(
                    f"{shown} is an object of class {printable(node.class_name)} with tensors "
                    "inside",
                    file=checkpoint.path or None,
                    hint="add --plain to convert objects to plain data, or choose one part "
                    "with --key",
                )
            if isinstance(node, OrderedMap) and node.attributes:
                losses.append(f"the attributes of {shown}: {listed(map(str, node.attributes))}")
            if not node and path:
                losses.append(f"{shown} is empty")
            return True

        for path, leaf in walk(checkpoint.root, enter=note_losses):
            name = self.separator.join(map(str, path))
            if name in root:
                raise NameCollision(
                    f"two entries would both become {printable(name)!r}",
                    file=checkpoint.path or None,
                    hint="choose another separator, for example --flatten /",
                )
            root[name] = leaf
        count = sum(isinstance(leaf, TensorRef) for leaf in root.values())
        text = (
            f"flattened {counted(count, 'tensor')} into one dict, keys joined with "
            f"{self.separator!r}"
        )
        left_out = [Change("left-out", loss, 1) for loss in losses]
        return checkpoint.with_root(root, Change("flatten", text, count), *left_out)


@dataclass(frozen=True)
class Nest(Step):
    """Put everything under one key."""

    options: ClassVar[Mapping[str, str]] = {"key": "nest"}

    key: str
    """The key, for example `state_dict`."""

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with a dict of one key as its root."""
        text = f'moved everything under "{printable(self.key)}"'
        return checkpoint.with_root({self.key: checkpoint.root}, Change("nest", text))
