"""Objects turned into plain data, or left out, until `torch.load(weights_only=True)` takes all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from ckptool.checkpoint import Change, Checkpoint
from ckptool.errors import NameCollision, NotRepresentable
from ckptool.model import (
    Global,
    Opaque,
    OrderedMap,
    Path,
    TensorRef,
    find_tensors,
)
from ckptool.modules import is_module, module_state
from ckptool.paths import everything, name_of, rebuild, walk
from ckptool.statedict import MODEL_KINDS, Section
from ckptool.transforms.module_rest import module_rest
from ckptool.transforms.plain_forms import plain_form, plain_tensor, tuple_items
from ckptool.transforms.refusals import class_of, is_refused, located, refusals
from ckptool.transforms.selection import plain_state_dict
from ckptool.words import counted, listed, printable

__all__ = ["drop_objects", "to_plain"]

_SETS = ("builtins.set", "builtins.frozenset")
_MOST_NAMED = 20


def to_plain(checkpoint: Checkpoint, *, drop: bool = False) -> Checkpoint:
    """Objects turned into plain data where that loses nothing but their class.

    numpy scalars become numbers, arrays tensors; objects that are only their attributes
    (`argparse.Namespace`, dataclasses) dicts; classes derived from dict or list dicts and lists;
    paths, moments, `Decimal` and the like text; members of an Enum their values; a pickled module
    its `state_dict()`, unless it holds more data than that has (`module_rest`): tensors, dicts and
    objects among its attributes, hooks, buffers that do not persist. A namedtuple remains: the
    names of its fields are in its class. What was shared stays shared. With `drop`, what remains
    is left out (`drop_objects`), and of a module what its state dict has not.

    Raises:
        NotRepresentable: something remains and `drop` is not given; the message names all of it.
        NameCollision: two keys of one dict would become equal.
    """
    plainer = _Plainer(checkpoint, _plain_forms(checkpoint, partly=drop))
    result = plainer.applied()
    if drop:
        return _dropped(result, hint=None)
    remaining = [_remaining(path, node) for path, node in refusals(result.root)]
    if remaining:
        verb = "has" if len(remaining) == 1 else "have"
        raise NotRepresentable(
            f"{len(remaining):,} of its objects {verb} no plain form that loses nothing: "
            f"{listed(remaining, _MOST_NAMED)}",
            file=checkpoint.path or None,
            hint="--drop-objects leaves them out",
        )
    return result


def drop_objects(checkpoint: Checkpoint) -> Checkpoint:
    """What `torch.load(weights_only=True)` refuses left out, each named among the changes.

    An entry of a dict or set leaves, its key being an object as well as its value; in a list or
    tuple None takes the place, so that the others keep theirs. Tensors stay: an array, and a tensor
    of a class of its own, as a tensor of torch; the items of a namedtuple as a tuple.

    Raises:
        NotRepresentable: nothing would remain, or no tensor of a model.
    """
    return _dropped(checkpoint, hint="--plain makes plain data of what it can")


def _dropped(checkpoint: Checkpoint, hint: str | None) -> Checkpoint:
    kept = _Plainer(checkpoint, _kept_form).applied()
    found = [
        Change("left-out", _sentence(path, node), 1, wanted=True)
        for path, node in refusals(kept.root)
    ]
    if not found:
        return kept
    if is_refused(kept.root):
        raise NotRepresentable(
            f"all of it is one object ({class_of(kept.root)}): nothing would remain",
            file=checkpoint.path or None,
            hint=hint,
        )
    result = kept.with_root(rebuild(kept.root, _kept, _with_kept_entries), *found)
    _check_models(kept, result, hint)
    return result


def _check_models(before: Checkpoint, after: Checkpoint, hint: str | None) -> None:
    """Refuse to lose every tensor of a state dict, or every model that there is.

    Raises:
        NotRepresentable: naming it.
    """
    models = [part for part in before.sections if part.kind in MODEL_KINDS and part.tensors()]
    staying = {path for path, _ in after.tensors()}
    lost = [part for part in models if staying.isdisjoint(path for path, _ in part.tensors())]
    for part in lost:
        if part.kind == "state_dict" or len(lost) == len(models):
            where = f"the {part.kind} {printable(part.name) or 'at the root'}"
            raise NotRepresentable(
                f"{where} would lose its {counted(len(part.tensors()), 'tensor')}, which are "
                "objects, or in one",
                file=before.path or None,
                hint=hint,
            )


def _name(path: Path) -> str:
    return printable(name_of(path)) or "the root"


def _sentence(path: Path, node: Any) -> str:
    tensors = 0 if isinstance(node, (Global, TensorRef)) else sum(1 for _ in find_tensors(node))
    inside = f", with {tensors} tensor{'s' if tensors > 1 else ''}" if tensors else ""
    return f"{_name(path)} ({printable(class_of(node))}{inside})"


def _remaining(path: Path, node: Any) -> str:
    lost = module_rest(node).lost if is_module(node) else ()
    beside = f", beside its state_dict: {listed(lost, _MOST_NAMED)}" if lost else ""
    return f"{_name(path)} ({class_of(node)}{beside})"


Forms = Callable[[Any], Any]
"""The form of a tensor or object; itself where it has none."""


def _plain_forms(checkpoint: Checkpoint, *, partly: bool) -> Forms:
    """Plain forms; with `partly` of modules too that hold more than their state dict."""

    def form(leaf: Any) -> Any:
        if isinstance(leaf, TensorRef):
            return plain_tensor(leaf)
        if not is_module(leaf):
            return plain_form(leaf)
        state = module_state(leaf)
        if state is None or (not partly and module_rest(leaf).lost):
            return leaf
        return plain_state_dict(checkpoint, Section((), "module", state, leaf))

    return form


def _kept_form(leaf: Any) -> Any:
    """What stays of a tensor or object that is refused: its elements, its items."""
    if isinstance(leaf, TensorRef):
        form = plain_tensor(leaf) if is_refused(leaf) else leaf
        return leaf if is_refused(form) else form
    items = tuple_items(leaf)
    return leaf if items is None else items


class _Plainer:
    """One pass that turns objects into what they are without their class, and what it did."""

    def __init__(self, checkpoint: Checkpoint, form_of: Forms) -> None:
        self._checkpoint = checkpoint
        self._form_of = form_of
        self._hashed = set(_hashed(checkpoint.root))
        self._forms: dict[int, Any] = {}

    def applied(self) -> Checkpoint:
        """The checkpoint with every form in place; itself where there is none.

        Raises:
            NameCollision: two keys of one dict would become equal.
        """
        try:
            root = rebuild(self._checkpoint.root, self._form)
        except NameCollision as error:
            raise self._collision() or error from error
        changes = list(self.changes())
        return self._checkpoint.with_root(root, *changes) if changes else self._checkpoint

    def _form(self, leaf: Any) -> Any:
        """The form of a leaf; itself where it has none or is plain."""
        if not isinstance(leaf, (TensorRef, Opaque)):
            return leaf
        form = self._form_of(leaf)
        if id(leaf) in self._hashed and not _can_be_hashed(form):
            return leaf  # a dict key or an item of a set must stay one that can be hashed
        if form is not leaf:
            self._forms[id(leaf)] = form
        return form

    def _collision(self) -> NameCollision | None:
        """The error for the first dict of which two keys become equal."""
        found: list[NameCollision] = []

        def enter(path: Path, node: Any) -> bool:
            new: dict[Any, Any] = {}
            for key in node if isinstance(node, dict) and not found else ():
                other = new.setdefault(rebuild(key, self._form), key)
                if other is not key:
                    keys = f"{name_of((other,))} and {name_of((key,))}"
                    found.append(
                        NameCollision(
                            f"the keys {printable(keys)} of {_name(path)} would become equal",
                            file=self._checkpoint.path or None,
                            hint="--drop-objects without --plain leaves out what has such a key",
                        )
                    )
            return not found

        for _ in walk(self._checkpoint.root, enter=enter):
            pass
        return found[0] if found else None

    def changes(self) -> Iterator[Change]:
        """What has become of every object and array, in the order of the file."""
        settings: dict[str, None] = {}
        for path, node in located(self._checkpoint.root, enter=self._has_more):
            is_tensor = isinstance(node, TensorRef)
            form = self._form_of(node) if is_tensor else self._forms.get(id(node), node)
            if form is node:
                continue
            name = _name(path())
            text = f"{name}: {printable(_old_class(node))} becomes {_described(form)}"
            yield Change("plain", f"{text}{_without(node)}", 1)
            if is_module(node):
                rest = module_rest(node)
                settings.update(dict.fromkeys(rest.settings))
                for lost in rest.lost:
                    yield Change("left-out", f"{name}: {lost}", 1, wanted=True)
        if settings:
            text = f"what a state_dict does not have of a module: {listed(settings)}"
            yield Change("left-out", text, len(settings), wanted=True)

    def _has_more(self, node: Any) -> bool:
        """Whether what it holds is in the result: not of numbers, modules, and what remains."""
        form = self._forms.get(id(node))
        return not is_refused(node) or (
            isinstance(form, (dict, list, tuple, Opaque)) and not is_module(node)
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


def _can_be_hashed(form: Any) -> bool:
    if isinstance(form, tuple):
        return not any(isinstance(item, (dict, list, tuple, Opaque)) for item in form)
    return not isinstance(form, (dict, list, Opaque))


def _without(node: Any) -> str:
    """What a plain form does not say of an object whose class is one of the standard library."""
    args = node.args if isinstance(node, Opaque) and isinstance(node.args, tuple) else ()
    match node.class_name if args else "", args:
        case "collections.deque", (_, int() as length):
            return f" without its largest length {length}"
        case "collections.defaultdict", (Global() as factory,):
            return f" without its factory {printable(factory.qualified)}"
        case "collections.defaultdict", (Opaque() as factory,):
            return f" without its factory {printable(factory.class_name)}"
    return ""


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
