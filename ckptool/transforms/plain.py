"""Objects turned into plain data, or left out, until `torch.load(weights_only=True)` takes all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from ckptool.checkpoint import Change, Checkpoint
from ckptool.errors import NotRepresentable
from ckptool.model import (
    Global,
    Opaque,
    OrderedMap,
    Path,
    TensorRef,
    find_tensors,
)
from ckptool.modules import is_module, module_state, unread_submodules
from ckptool.paths import everything, listed, name_of, printable, rebuild
from ckptool.statedict import Section
from ckptool.transforms.plain_forms import plain_form, plain_tensor
from ckptool.transforms.refusals import class_of, is_refused, located, refusals
from ckptool.transforms.selection import plain_state_dict

__all__ = ["drop_objects", "to_plain"]

_SETS = ("builtins.set", "builtins.frozenset")
_MOST_NAMED = 20


def to_plain(checkpoint: Checkpoint, *, drop: bool = False) -> Checkpoint:
    """Objects turned into plain data where that loses nothing but their class.

    numpy scalars become numbers, arrays tensors; objects that are only their attributes
    (`argparse.Namespace`, dataclasses) dicts; classes derived from dict or list dicts and lists;
    paths, moments, `Decimal` and the like text; members of an Enum their values; a pickled module
    its `state_dict()`. What was shared stays shared. With `drop`, what remains is left out
    (`drop_objects`), and of a module what only its class can read.

    Raises:
        NotRepresentable: something remains and `drop` is not given; the message names all of it.
        NameCollision: two keys of one dict would become equal.
    """
    plainer = _Plainer(checkpoint, partly=drop)
    root = rebuild(checkpoint.root, plainer.form)
    changes = list(plainer.changes())
    result = checkpoint.with_root(root, *changes) if changes else checkpoint
    if drop:
        return drop_objects(result)
    remaining = [f"{_name(path)} ({class_of(node)})" for path, node in refusals(root)]
    if remaining:
        raise NotRepresentable(
            f"{len(remaining):,} of its objects have no plain form that loses nothing: "
            f"{listed(remaining, _MOST_NAMED)}",
            file=checkpoint.path or None,
            hint="--drop-objects leaves them out",
        )
    return result


def drop_objects(checkpoint: Checkpoint) -> Checkpoint:
    """What `torch.load(weights_only=True)` refuses left out, each named among the changes.

    An entry of a dict or set leaves, its key being an object as well as its value; in a list or
    tuple None takes the place, so that the others keep theirs. A tensor of a class of its own stays
    as a tensor of torch.

    Raises:
        NotRepresentable: nothing would remain.
    """
    found = [
        Change("left-out", _sentence(path, node), 1, wanted=True)
        for path, node in refusals(checkpoint.root)
    ]
    if not found:
        return checkpoint
    if is_refused(checkpoint.root):
        raise NotRepresentable(
            f"all of it is one object ({class_of(checkpoint.root)}): nothing would remain",
            file=checkpoint.path or None,
            hint="--plain makes plain data of what it can",
        )
    return checkpoint.with_root(rebuild(checkpoint.root, _kept, _with_kept_entries), *found)


def _name(path: Path) -> str:
    return printable(name_of(path)) or "the root"


def _sentence(path: Path, node: Any) -> str:
    tensors = 0 if isinstance(node, (Global, TensorRef)) else sum(1 for _ in find_tensors(node))
    inside = f", with {tensors} tensor{'s' if tensors > 1 else ''}" if tensors else ""
    return f"{_name(path)} ({printable(class_of(node))}{inside})"


class _Plainer:
    """One pass that turns objects into plain data, and what it did."""

    def __init__(self, checkpoint: Checkpoint, *, partly: bool) -> None:
        """`partly`: of modules too that only their class can read in whole."""
        self._checkpoint = checkpoint
        self._partly = partly
        self._hashed = set(_hashed(checkpoint.root))
        self._forms: dict[int, Any] = {}

    def form(self, leaf: Any) -> Any:
        """The plain form of a leaf; itself where it has none or is plain."""
        if isinstance(leaf, TensorRef):
            return plain_tensor(leaf)
        if not isinstance(leaf, Opaque):
            return leaf
        form = self._state_dict(leaf) if is_module(leaf) else plain_form(leaf)
        if isinstance(form, (dict, list, Opaque)) and id(leaf) in self._hashed:
            return leaf  # a dict key or an item of a set must stay one that can be hashed
        if form is not leaf:
            self._forms[id(leaf)] = form
        return form

    def _state_dict(self, module: Opaque) -> Any:
        state = module_state(module)
        if state is None or (unread_submodules(module) and not self._partly):
            return module
        return plain_state_dict(self._checkpoint, Section((), "module", state, module))

    def changes(self) -> Iterator[Change]:
        """What has become of every object and array, in the order of the file."""
        for path, node in located(self._checkpoint.root, enter=self._has_more):
            is_tensor = isinstance(node, TensorRef)
            form = plain_tensor(node) if is_tensor else self._forms.get(id(node), node)
            if form is node:
                continue
            text = f"{_name(path())}: {printable(_old_class(node))} becomes {_described(form)}"
            yield Change("plain", text, 1)
            if isinstance(node, Opaque) and is_module(node):
                section = Section(path(), "module", OrderedMap(), node)
                for unread in section.unread:
                    yield Change("left-out", unread, 1, wanted=True)

    def _has_more(self, node: Any) -> bool:
        """Whether what it holds is in the result: not of numbers, modules, and what remains."""
        form = self._forms.get(id(node))
        return not is_refused(node) or (
            isinstance(form, (dict, list, Opaque)) and not is_module(node)
        )


def _hashed(root: Any) -> Iterator[int]:
    """The identities of what is a dict key, an item of a set, or in a tuple that is."""
    for node in everything(root):
        keys: Iterable[Any] = ()
        if isinstance(node, dict):
            keys = node
        elif isinstance(node, Opaque) and node.class_name in _SETS:
            keys = node.args[0] if isinstance(node.args, tuple) and node.args else ()
        todo = [key for key in keys if isinstance(key, (tuple, Opaque))]
        while todo:
            key = todo.pop()
            yield id(key)
            todo.extend(key if isinstance(key, tuple) else ())


def _old_class(node: Any) -> str:
    if isinstance(node, TensorRef) and not is_refused(node):
        layers = (layer.type for layer in node.wrapping if is_refused(layer.type))
        return next((layer.qualified for layer in layers if isinstance(layer, Global)), "a class")
    return class_of(node)


def _described(form: Any) -> str:
    """What a form is, in words."""
    if isinstance(form, TensorRef):
        return "a tensor"
    if isinstance(form, Opaque):
        return "a set"
    if isinstance(form, OrderedMap):
        return "an OrderedDict"
    if isinstance(form, str):
        return "text"
    word = type(form).__name__
    return f"an {word}" if word[0] in "aeiou" else word if word == "bytes" else f"a {word}"


# Leaving out


def _kept(leaf: Any) -> Any:
    """A leaf as it stays: None for what is refused."""
    if is_refused(leaf):
        return None
    if isinstance(leaf, TensorRef):
        layers = tuple(layer for layer in leaf.wrapping if layer.kind != "type" or layer.type)
        if len(layers) == len(leaf.wrapping):
            return leaf
        kind = "strided" if leaf.kind == "subclass" else leaf.kind
        return replace(leaf, kind=kind, wrapping=layers)
    if isinstance(leaf, Opaque) and leaf.class_name in _SETS and leaf.args:
        items = [item for item in leaf.args[0] if not _is_refused_key(item)]
        return leaf if len(items) == len(leaf.args[0]) else replace(leaf, args=(items,))
    return leaf


def _with_kept_entries(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """A dict without the entries of which key or value goes, attributes alike."""
    kept = _kept_entries(mapping)
    if not isinstance(mapping, OrderedMap):
        return mapping if len(kept) == len(mapping) else kept
    attributes = _kept_entries(mapping.attributes)
    if len(kept) == len(mapping) and len(attributes) == len(mapping.attributes):
        return mapping
    made = OrderedMap(kept)
    made.attributes = attributes
    return made


def _kept_entries(mapping: dict[Any, Any]) -> dict[Any, Any]:
    return {
        key: value
        for key, value in mapping.items()
        if not _is_refused_key(key) and not is_refused(value)
    }


def _is_refused_key(key: Any) -> bool:
    """Whether a key or an item of a set is refused, or a tuple with something that is."""
    todo = [key]
    while todo:
        part = todo.pop()
        if is_refused(part):
            return True
        todo.extend(part if isinstance(part, tuple) else ())
    return False
