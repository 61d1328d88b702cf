"""Turn objects into plain data, or leave them out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, ClassVar

from ckptool.core.checkpoint import Change, Checkpoint
from ckptool.core.model import (
    Global,
    Opaque,
    OrderedMap,
    Path,
    TensorRef,
    Wrapping,
    copy_with_items,
    find_tensors,
    replace_elements,
)
from ckptool.core.modules import (
    find_opaque_content,
    has_tensors,
    is_module,
    to_model_state,
    to_module_state,
    walk_modules,
)
from ckptool.core.placeholders import refuse_placeholders
from ckptool.core.sections import MODEL_KINDS, Section, describe_opaque_content
from ckptool.core.tree import (
    describe_path,
    list_items,
    rebuild,
    to_path,
    walk_everything,
    walk_mentions,
)
from ckptool.errors import NotRepresentable, UsageError
from ckptool.symbolic.encoder import find_blocked_names
from ckptool.symbolic.text import to_bytes
from ckptool.transforms.extraction import plain_state_dict
from ckptool.transforms.step import Step, option_words
from ckptool.words import counted, listed, printable

_COUNTER = "collections.Counter"
_NOTHING = object()
"""The plain form of objects with no more content than None."""


def is_refused(node: Any) -> bool:
    """Return True if `weights_only=True` rejects this node, whatever its content.

    Source: torch/_weights_only_unpickler.py, which allows some names, and sets the state of some
    classes only. A tensor is accepted even if a layer around it has a rejected class.
    """
    if isinstance(node, Global):
        return "." in node.name or bool(find_blocked_names((node.qualified,)))
    if isinstance(node, Opaque):
        return not _is_accepted(node)
    if isinstance(node, TensorRef):
        parts = node.parts or {}
        is_jagged = node.kind == "nested" and "state" in parts
        foreign = "type" in parts and (parts["type"] is None or is_refused(parts["type"]))
        return node.is_array or is_jagged or foreign
    return False


def _is_accepted(node: Opaque) -> bool:
    if not isinstance(node.func, Global) or is_refused(node.func):
        return False
    if node.maker == "persid" or node.kwargs is not None:
        return False
    filled = {"build", "set"} if node.class_name == _COUNTER else {"build"}
    return {kind for kind, _ in node.steps} <= filled


def class_of(node: Any) -> str:
    """Return the class name of an object, class or tensor, as in the file."""
    if isinstance(node, Opaque) and node.plain is not None:
        return f"numpy.{node.plain[0]}"
    if isinstance(node, TensorRef) and node.is_array:
        return "numpy.ndarray"
    name = node.qualified if isinstance(node, Global) else node.class_name
    return str(name)


def refusals(root: Any) -> Iterator[tuple[Path, Any]]:
    """Yield every mention of a rejected node with its path, but not the content of the node."""
    for link, node in walk_mentions(root, enter=lambda node: not is_refused(node)):
        if is_refused(node):
            yield to_path(link), node


_NO_STATE: tuple[Any, ...] = (None, {}, (None, {}), ({}, {}))


def plain_form(node: Opaque) -> Any:
    """Return plain data equivalent to `node`, or `node` itself if there is none.

    Plain data are numbers, text, dicts, lists and sets. Their content is not converted yet.
    """
    if node.plain is not None:
        return node.plain[1]
    if not is_refused(node):
        return node
    home = node.class_name.partition(".")[0]
    known = _KNOWN.get(node.class_name) or _KNOWN.get(f"{home}.*")
    form = (known or _by_structure)(node)
    if form is None:
        return node
    return None if form is _NOTHING else form


def _by_structure(node: Opaque) -> Any:
    """Return the plain form of an object of an unknown class, by the way it is pickled."""
    kinds = {kind for kind, _ in node.steps}
    base, inside = _base_of(node)
    if base is None:
        return None
    if kinds <= {"build"} and base == "object":
        return _attributes_of(node)
    if kinds <= {"build", "set"} and base in ("object", "dict"):
        return _as_dict(node, inside)
    if kinds == {"append"} and base in ("object", "list"):
        return [*inside, *(value for _, value in list_items(node))]
    return list(inside) if base == "list" and not kinds else None


def _base_of(node: Opaque) -> tuple[str | None, Any]:
    """Return the base class from which an object was created, and its content.

    `cls.__new__(cls)`, `cls()` with later steps, or `copyreg._reconstructor(cls, base, content)` in
    protocols 0 and 1. None: only the class knows the meaning of its arguments.
    """
    if not isinstance(node.func, Global) or node.kwargs is not None or node.maker == "persid":
        return None, ()
    match node.func.qualified, node.args:
        case "copyreg._reconstructor", (Global(), Global() as base, content):
            name = base.qualified.removeprefix("builtins.")
            is_content = isinstance(content, {"dict": dict, "list": list}.get(name, type(None)))
            return (name, content or ()) if is_content else (None, ())
        case _, ():
            return ("object", ()) if node.maker == "newobj" or node.steps else (None, ())
    return None, ()


def _attributes_of(node: Opaque) -> dict[Any, Any] | None:
    """Return the attributes of an object, or None if its state is not one dict."""
    if not node.steps:
        return {}
    state = node.state
    if len(node.steps) > 1 or not (node.attributes or state in _NO_STATE):
        return None
    return node.attributes


def _as_dict(node: Opaque, content: Any) -> dict[Any, Any] | None:
    """Return the items of an instance of a dict subclass, with its attributes as items."""
    items = {**dict(content), **dict(list_items(node))}
    state, attributes = node.state, node.attributes
    if not (state is node or attributes or state in _NO_STATE):
        return None
    if all(name in items and items[name] is value for name, value in attributes.items()):
        return items  # its attributes are its items
    made = OrderedMap(items)
    made.attributes = attributes
    return made


def _tuple_items(node: Opaque) -> tuple[Any, ...] | None:
    """Return the items of a namedtuple, or of another tuple subclass, else None.

    `cls.__new__(cls, *items)`, or `cls.__new__(cls, items)` if the class has no fields; in
    protocols 0 and 1, `copyreg._reconstructor(cls, tuple, items)`. Also None if the object has
    attributes.
    """
    if not isinstance(node.func, Global) or node.kwargs is not None or node.steps:
        return None
    match node.func.qualified, node.args:
        case "copyreg._reconstructor", (Global(), Global(name="tuple"), tuple() as items):
            return items
        case _, (tuple() as items,) if node.maker == "newobj":
            return items
        case _, (_, _, *_) if node.maker == "newobj":
            return tuple(node.args)
    return None


def _plain_tensor(tensor: TensorRef) -> TensorRef:
    """Return a numpy array or an instance of a tensor subclass as a plain tensor.

    Attributes stay, and an array that carries a TPU tensor becomes a tensor. The same tensor is
    returned if it is plain, or a DTensor with parts in other files.
    """
    if tensor.whole is not None:
        return tensor.whole
    parts = tensor.parts or {}
    if "array" in parts:
        return replace(tensor, kind="strided", parts=None)
    if tensor.is_array:
        return replace_elements(tensor)
    if tensor.storage is None or not any(is_refused(layer.type) for layer in tensor.wrapping):
        return tensor
    layers = [_plain_layer(layer) for layer in tensor.wrapping]
    kind = "strided" if tensor.kind == "subclass" else tensor.kind
    return replace(tensor, kind=kind, wrapping=tuple(filter(None, layers)))


def _plain_layer(layer: Wrapping) -> Wrapping | None:
    """Return a layer without its rejected class; None if nothing of it remains.

    The state may not be complete yet.
    """
    if layer.kind != "type" or not is_refused(layer.type):
        return layer
    if layer.state is None:
        return None
    return replace(layer, type=Global("torch", "Tensor"))


# Classes of the standard library and of numpy


def _path(node: Opaque) -> str | None:
    if not isinstance(node.args, tuple) or not all(isinstance(part, str) for part in node.args):
        return None
    windows = "Windows" in node.class_name.rpartition(".")[2]
    return str((PureWindowsPath if windows else PurePosixPath)(*node.args))


def _deque(node: Opaque) -> list[Any] | None:
    match node.args:
        case () | ((), _):
            return [value for _, value in list_items(node)]
    return None


def _frozenset(node: Opaque) -> Opaque | None:
    match node.args:
        case ([*items],):
            return Opaque(Global("builtins", "set"), (list(items),))
    return Opaque(Global("builtins", "set"), ([],)) if node.args == () else None


def _dtype(node: Opaque) -> str | None:
    """Return the text for `numpy.dtype`, such as `<f4`; None for records and sub-arrays."""
    match node.args, node.state:
        case (str() as code, *_), (_, str() as order, None, None, None, *_):
            if re.fullmatch(r"[a-zA-Z]\d*", code) and code[0] not in "Mm":  # these have a unit
                return code if order == "|" else f"{order}{code}"
    return None


def _scalar(node: Opaque) -> str | bytes | None:
    """Return the value of a `numpy.str_` or `numpy.bytes_`; `Opaque.plain` has numbers already."""
    match node.args:
        case (Opaque() as dtype, payload) if dtype.class_name == "numpy.dtype":
            code, raw = _dtype(dtype) or "", to_bytes(payload)
            if raw is None:
                return None
            if code.startswith("S"):
                return raw.rstrip(b"\0")
            try:
                return str(raw, _UTF32[code[:2]]).rstrip("\0")
            except (KeyError, UnicodeDecodeError):
                return None
    return None


def _omegaconf(node: Opaque) -> Any:
    """Return the items of a DictConfig or ListConfig, or the value of a node in one.

    The rest of it is types and references to its parent. Interpolations stay text.
    """
    held = node.attributes
    value = held.get("_content", held.get("_val"))
    return _NOTHING if value is None and not held.keys().isdisjoint(("_content", "_val")) else value


_UTF32 = {"<U": "utf-32-le", ">U": "utf-32-be"}


_KNOWN: dict[str, Callable[[Opaque], Any]] = {
    "pathlib.*": _path,
    "builtins.frozenset": _frozenset,
    "collections.defaultdict": lambda node: _as_dict(node, ()),
    "collections.deque": _deque,
    "omegaconf.*": _omegaconf,
    "numpy.dtype": _dtype,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
}
"""Plain forms by class. The factory of a `defaultdict` and `maxlen` of a `deque` are lost."""


_HELD = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_OF_EVERY_MODULE = frozenset({"training", "_version", "_is_full_backward_hook", "_backend"})


def _content_outside_state(module: Opaque) -> tuple[list[str], list[str]]:
    """Return the content of a module that is not in its `state_dict()`: tensors, and attributes.

    Tensors with another key in the state dict (`_flat_weights` of an LSTM) do not count.
    """
    in_state = find_tensors(dict(to_module_state(module) or {}))
    known = {tensor.place or id(tensor) for tensor in in_state}
    lost = [describe_opaque_content(path, one) for path, one in find_opaque_content(module).items()]
    names: dict[str, None] = {}
    for prefix, part in walk_modules(module):
        rest = {name: one for name, one in part.attributes.items() if name not in _HELD}
        for name, value in {**part.attributes.get("_buffers", {}), **rest}.items():
            tensors = list(find_tensors(value))
            hidden = [one for one in tensors if (one.place or id(one)) not in known]
            if hidden:
                lost.append(f"{printable(f'{prefix}{name}')} ({counted(len(hidden), 'tensor')})")
            is_empty = value is None or (isinstance(value, (dict, list, tuple)) and not value)
            if not tensors and not is_empty and name not in _OF_EVERY_MODULE:
                names[printable(str(name))] = None
    return lost, list(names)


_SETS = ("builtins.set", "builtins.frozenset")
_MOST_NAMED = 20


@dataclass(frozen=True)
class Plain(Step):
    """Turn objects into plain data (`plain`), or leave them out (`drop_objects`).

    With `plain`, numpy scalars become numbers, and arrays become tensors. Objects that consist of
    attributes (`argparse.Namespace`, dataclasses) become dicts, subclasses of dict and list
    become dicts and lists, and paths become text. A pickled module becomes its `state_dict()`,
    unless it has other tensors (attributes, non-persistent buffers). Enum members and other objects
    made from one value remain, because the value is not the object. A namedtuple remains, because
    its class has the field names. Shared objects stay shared. The changes list the attributes of
    modules that are lost with their class.

    With `drop_objects`, objects without a plain form are left out (without `plain`: every object
    that `torch.load(weights_only=True)` rejects). An entry of a dict or set is removed if its key
    or value is such an object. In a list or tuple, None replaces it. Tensors stay: arrays and
    tensor subclasses become plain tensors, and a namedtuple becomes a tuple.
    """

    selects: ClassVar[bool] = True
    on_files: ClassVar[str] = "a dict in memory keeps its objects"

    plain: bool = True
    """Turn objects into plain data."""
    drop_objects: bool = False
    """Leave out objects; with `plain`, only those without a plain form."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            UsageError: if neither is True.
        """
        if not (self.plain or self.drop_objects):
            raise UsageError("plain needs --plain or --drop-objects")

    def words(self) -> Iterator[str]:
        """Yield the command-line words of this step for `convert`."""
        for name in ("plain", "drop_objects"):
            if getattr(self, name):
                yield from option_words(name, True)

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint without objects.

        Raises:
            NotRepresentable: if objects have no plain form and `drop_objects` is False (the
                message lists them); nothing, or no tensor of the model, would be left; or tensors
                have no values.
        """
        if not self.drop_objects:
            return self._convert(checkpoint)
        made = (
            self._convert(checkpoint)
            if self.plain
            else _drop_rejected(checkpoint, hint="add --plain to convert objects to plain data")
        )
        asked = tuple(replace(one, wanted=one.wanted or one.needed) for one in made.changes)
        return made if asked == made.changes else replace(made, changes=asked)

    def _convert(self, checkpoint: Checkpoint) -> Checkpoint:
        checkpoint = checkpoint.with_late_values()
        refuse_placeholders(checkpoint)
        result = _with_forms(checkpoint, _plain_forms(checkpoint, partly=self.drop_objects))
        if self.drop_objects:
            return _drop_rejected(result, hint=None)
        remaining = [_describe_remaining(path, node) for path, node in refusals(result.root)]
        if remaining:
            raise NotRepresentable(
                f"{counted(len(remaining), 'object')} cannot be converted to plain data "
                "without loss: "
                f"{listed(remaining, _MOST_NAMED)}",
                file=checkpoint.path or None,
                hint="add --drop-objects to leave them out",
            )
        return result


def _drop_rejected(checkpoint: Checkpoint, hint: str | None) -> Checkpoint:
    kept = _with_forms(checkpoint, _kept_form)
    found = [
        Change("left-out", _sentence(path, node), 1, wanted=True)
        for path, node in refusals(kept.root)
    ]
    if not found:
        return kept
    if is_refused(kept.root):
        raise NotRepresentable(
            f"the file is one object ({class_of(kept.root)}), so nothing would remain",
            file=checkpoint.path or None,
            hint=hint,
        )
    result = kept.with_root(rebuild(kept.root, _strip_rejected, _with_kept_entries), *found)
    _check_models(kept, result, hint)
    _refuse_nothing(kept, result, hint)
    return result


def _check_models(before: Checkpoint, after: Checkpoint, hint: str | None) -> None:
    """Refuse to lose every tensor of a state dict, or every model.

    Raises:
        NotRepresentable: if one would be lost.
    """
    models = [part for part in before.sections if part.kind in MODEL_KINDS and part.tensors()]
    staying = {path for path, _ in after.tensors()}
    lost = [part for part in models if staying.isdisjoint(path for path, _ in part.tensors())]
    for part in lost:
        if part.kind == "state_dict" or len(lost) == len(models):
            where = f"the {part.kind} {printable(part.name) or 'at the root'}"
            raise NotRepresentable(
                f"{where} would lose {counted(len(part.tensors()), 'tensor')}, which are "
                "in objects",
                file=before.path or None,
                hint=hint,
            )


def _refuse_nothing(before: Checkpoint, after: Checkpoint, hint: str | None) -> None:
    """Refuse to lose all tensors, or all content of a file without tensors.

    Raises:
        NotRepresentable: if that would happen; the message lists the objects.
    """
    had_tensors = has_tensors(before.root)
    if not (has_tensors(after.root) if had_tensors else _has_content(after)):
        what = "every tensor of the file" if had_tensors else "all content"
        classes = dict.fromkeys(class_of(node) for _, node in refusals(before.root))
        raise NotRepresentable(
            f"{what} is in objects, so nothing would remain: {listed(classes, most=4)}",
            file=before.path or None,
            hint=hint,
        )


def _has_content(checkpoint: Checkpoint) -> bool:
    return any(leaf is not None for _, leaf in checkpoint.leaves)


def _sentence(path: Path, node: Any) -> str:
    tensors = 0 if isinstance(node, (Global, TensorRef)) else sum(1 for _ in find_tensors(node))
    inside = f", with {tensors} tensor{'s' if tensors > 1 else ''}" if tensors else ""
    return f"{describe_path(path)} ({printable(class_of(node))}{inside})"


def _describe_remaining(path: Path, node: Any) -> str:
    lost = _content_outside_state(node)[0] if is_module(node) else ()
    beside = f", except for its state_dict: {listed(lost, _MOST_NAMED)}" if lost else ""
    return f"{describe_path(path)} ({class_of(node)}{beside})"


Forms = Callable[[Any], Any]
"""Returns the plain form of a tensor or object, or the node itself."""


def _plain_forms(checkpoint: Checkpoint, *, partly: bool) -> Forms:
    """Return the plain forms; with `partly`, also those of modules with other tensors."""

    def form(leaf: Any) -> Any:
        if isinstance(leaf, TensorRef):
            return _plain_tensor(leaf)
        if not is_module(leaf):
            return plain_form(leaf)
        state = to_model_state(leaf)
        if state is None or (not partly and _content_outside_state(leaf)[0]):
            return leaf
        return plain_state_dict(checkpoint, Section((), "module", state, leaf))

    return form


def _kept_form(leaf: Any) -> Any:
    """Return the elements of a rejected tensor, the items of a rejected tuple, or else the leaf."""
    if isinstance(leaf, TensorRef):
        form = _plain_tensor(leaf) if is_refused(leaf) else leaf
        return leaf if is_refused(form) else form
    items = _tuple_items(leaf)
    return leaf if items is None else items


def _with_forms(checkpoint: Checkpoint, form_of: Forms) -> Checkpoint:
    """Return the checkpoint with every plain form in place, or the same one if there are none."""
    keys = _objects_in_keys(checkpoint.root)
    forms: dict[int, Any] = {}

    def form(leaf: Any) -> Any:
        if not isinstance(leaf, (TensorRef, Opaque)):
            return leaf
        found = form_of(leaf)
        is_number = isinstance(leaf, Opaque) and leaf.plain is not None
        if id(leaf) in keys and not is_number and not isinstance(found, tuple):
            return leaf  # as a key, a plain form may be unhashable, or equal to another key
        if found is not leaf:
            forms[id(leaf)] = found
        return found

    root = rebuild(checkpoint.root, form)
    changes = list(_form_changes(checkpoint.root, form_of, forms))
    return checkpoint.with_root(root, *changes) if changes else checkpoint


def _form_changes(root: Any, form_of: Forms, forms: dict[int, Any]) -> Iterator[Change]:
    """Yield a change for every object and array with a plain form, in the order of the file."""

    def has_more(node: Any) -> bool:
        """Return True if the result keeps the content of a node (not of numbers or modules)."""
        is_container = isinstance(forms.get(id(node)), (dict, list, tuple, Opaque))
        return not is_refused(node) or (is_container and not is_module(node))

    settings: dict[str, None] = {}
    for link, node in walk_mentions(root, enter=has_more):
        form = form_of(node) if isinstance(node, TensorRef) else forms.get(id(node), node)
        if form is node:
            continue
        name = describe_path(to_path(link))
        yield Change(
            "plain", f"{name}: converted {printable(class_of(node))} to {_describe_form(form)}", 1
        )
        if is_module(node):
            tensors, attributes = _content_outside_state(node)
            settings.update(dict.fromkeys(attributes))
            for lost in tensors:
                yield Change("left-out", f"{name}: {lost}", 1, wanted=True)
    if settings:
        text = f"module attributes that are not in a state_dict: {listed(settings)}"
        yield Change("left-out", text, len(settings), wanted=True)


def _objects_in_keys(root: Any) -> set[int]:
    """Return the ids of objects in dict keys and items of sets, also inside tuples."""
    keys: list[Any] = []
    for node in walk_everything(root):
        if isinstance(node, dict):
            keys.extend(node)
        elif isinstance(node, Opaque) and node.class_name in _SETS and node.args:
            keys.extend(node.args[0])
    return {id(node) for node in walk_everything(keys) if isinstance(node, Opaque)}


def _describe_form(form: Any) -> str:
    names = {TensorRef: "tensor", Opaque: "set", OrderedMap: "OrderedDict", str: "text"}
    word = names.get(type(form), type(form).__name__)
    article = "an " if word[0] in "aeiouO" else "a "
    return word if word in ("text", "bytes") else article + word


# Leaving out


def _strip_rejected(leaf: Any) -> Any:
    """Return a leaf without rejected parts; None for a rejected leaf."""
    if is_refused(leaf):
        return None
    if isinstance(leaf, TensorRef):
        layers = tuple(layer for layer in leaf.wrapping if layer.kind != "type" or layer.type)
        if len(layers) == len(leaf.wrapping):
            return leaf
        kind = "strided" if leaf.kind == "subclass" else leaf.kind
        return replace(leaf, kind=kind, wrapping=layers)
    if isinstance(leaf, Opaque) and leaf.class_name in _SETS and leaf.args:
        items = [item for item in leaf.args[0] if not any(refusals(item))]
        return leaf if len(items) == len(leaf.args[0]) else replace(leaf, args=(items,))
    return leaf


def _with_kept_entries(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dict without the entries and attributes that have a rejected key or value."""
    kept = _kept_entries(mapping)
    attributes = mapping.attributes if isinstance(mapping, OrderedMap) else {}
    rest = _kept_entries(attributes)
    if len(kept) == len(mapping) and len(rest) == len(attributes):
        return mapping
    made = copy_with_items(mapping, kept)
    if isinstance(made, OrderedMap):
        made.attributes = rest
    return made


def _kept_entries(mapping: dict[Any, Any]) -> dict[Any, Any]:
    return {
        key: value
        for key, value in mapping.items()
        if not any(refusals(key)) and not is_refused(value)
    }
