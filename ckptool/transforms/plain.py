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
from ckptool.transforms.extraction import copy_state_dict
from ckptool.transforms.step import Step, format_option
from ckptool.words import counted, listed, printable

_COUNTER = "collections.Counter"
_NOTHING = object()
"""The plain form of objects with no more content than None."""


def is_rejected(node: Any) -> bool:
    """Return True if `torch.load(weights_only=True)` rejects this node, with any content.

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
        # The class of a subclass without a storage; None if `_strip_rejected` has removed it.
        subclass = parts.get("type")
        has_rejected_class = "type" in parts and (subclass is None or is_rejected(subclass))
        return node.is_array or is_jagged or has_rejected_class
    return False


def _is_accepted(node: Opaque) -> bool:
    """Return True if `torch.load(weights_only=True)` accepts the object."""
    if not isinstance(node.func, Global) or is_rejected(node.func):
        return False
    # It accepts persistent ids only of storages, and no opcode with keyword arguments.
    if node.maker == "persid" or node.kwargs is not None:
        return False
    # The pickle may set the state of an object, and items only of a Counter.
    allowed_steps = {"build", "set"} if node.class_name == _COUNTER else {"build"}
    return {kind for kind, _ in node.steps} <= allowed_steps


def get_class_name(node: Any) -> str:
    """Return the class name of an object, class or tensor, as in the file."""
    if isinstance(node, Opaque) and node.plain is not None:
        return f"numpy.{node.plain[0]}"
    if isinstance(node, TensorRef) and node.is_array:
        return "numpy.ndarray"
    name = node.qualified if isinstance(node, Global) else node.class_name
    return str(name)


def find_rejected(root: Any) -> Iterator[tuple[Path, Any]]:
    """Yield every rejected node with its path, once for each mention, but not its content."""
    for link, node in walk_mentions(root, enter=lambda node: not is_rejected(node)):
        if is_rejected(node):
            yield to_path(link), node


_EMPTY_STATES: tuple[Any, ...] = (None, {}, (None, {}), ({}, {}))
"""The states of an object without attributes: a dict, or a pair of a dict and the slots."""


def to_plain_data(node: Opaque) -> Any:
    """Return plain data equivalent to `node`, or `node` itself if there is none.

    Plain data are numbers, text, dicts, lists and sets. Their content is not converted yet. An
    object that torch.load accepts stays.
    """
    if node.plain is not None:
        _, value = node.plain
        return value
    if not is_rejected(node):
        return node
    package = node.class_name.partition(".")[0]
    convert = _CONVERTERS.get(node.class_name) or _CONVERTERS.get(f"{package}.*")
    plain = (convert or _convert_by_structure)(node)
    if plain is None:  # there is no plain form; one that is None itself is `_NOTHING`
        return node
    return None if plain is _NOTHING else plain


def _convert_by_structure(node: Opaque) -> Any:
    """Return the plain form of an object of an unknown class, judging by its pickle calls.

    The result is a dict of attributes (set by a step `build`); a dict or list if the pickle sets or
    appends items. It is None if the class may have more state than these.
    """
    step_kinds = {kind for kind, _ in node.steps}
    base, content = _find_base_class(node)
    if base is None:
        return None
    if step_kinds <= {"build"} and base == "object":
        return _read_attributes(node)
    if step_kinds <= {"build", "set"} and base in ("object", "dict"):
        return _convert_to_dict(node, content)
    if step_kinds == {"append"} and base in ("object", "list"):
        return [*content, *(value for _, value in list_items(node))]
    return list(content) if base == "list" and not step_kinds else None


def _find_base_class(node: Opaque) -> tuple[str | None, Any]:
    """Return the base class from which an object was created, and the content given to it.

    `cls.__new__(cls)`, `cls()` with later steps, or `copyreg._reconstructor(cls, base, content)` in
    protocols 0 and 1. The base is None if only the class knows the meaning of its arguments.
    """
    unknown = None, ()
    if not isinstance(node.func, Global) or node.kwargs is not None or node.maker == "persid":
        return unknown
    match node.func.qualified, node.args:
        case "copyreg._reconstructor", (Global(), Global() as base, content):
            name = base.qualified.removeprefix("builtins.")
            # For `object`, the content is None.
            content_type = {"dict": dict, "list": list}.get(name, type(None))
            return (name, content or ()) if isinstance(content, content_type) else unknown
        case _, ():
            return ("object", ()) if node.maker == "newobj" or node.steps else unknown
    return unknown


def _read_attributes(node: Opaque) -> dict[Any, Any] | None:
    """Return the attributes of an object, or None if its state is not one dict."""
    if not node.steps:
        return {}
    has_only_attributes = bool(node.attributes) or node.state in _EMPTY_STATES
    return node.attributes if len(node.steps) <= 1 and has_only_attributes else None


def _convert_to_dict(node: Opaque, content: Any) -> dict[Any, Any] | None:
    """Return an instance of a dict subclass as a plain dict, or None if its state is not a dict.

    `content` has the items that it was created with. Attributes that are not items are kept.
    """
    items = {**dict(content), **dict(list_items(node))}
    state, attributes = node.state, node.attributes
    is_own_state = state is node  # `self.__dict__ = self`, in classes whose items are attributes
    if not (is_own_state or attributes or state in _EMPTY_STATES):
        return None  # only the class knows the meaning of this state
    if all(name in items and items[name] is value for name, value in attributes.items()):
        return items  # the attributes only repeat the items
    mapping = OrderedMap(items)
    mapping.attributes = attributes
    return mapping


def _read_tuple_items(node: Opaque) -> tuple[Any, ...] | None:
    """Return the items of an instance of a tuple subclass, or None for any other object.

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
        case _, (_, _, *_) if node.maker == "newobj":  # at least two fields
            return tuple(node.args)
    return None


def _to_plain_tensor(tensor: TensorRef) -> TensorRef:
    """Return a numpy array or an instance of a tensor subclass as a plain tensor.

    Attributes stay, and an array that carries a TPU tensor becomes a tensor. The same tensor is
    returned if it is plain, or a DTensor with parts in other files.
    """
    if tensor.whole is not None:  # a DTensor that is complete in this file
        return tensor.whole
    parts = tensor.parts or {}
    if "array" in parts:
        return replace(tensor, kind="strided", parts=None)
    if tensor.is_array:
        return replace_elements(tensor)
    has_rejected_class = any(is_rejected(layer.type) for layer in tensor.wrapping)
    if tensor.storage is None or not has_rejected_class:
        return tensor
    layers = [_strip_rejected_class(layer) for layer in tensor.wrapping]
    kind = "strided" if tensor.kind == "subclass" else tensor.kind
    return replace(tensor, kind=kind, wrapping=tuple(filter(None, layers)))


def _strip_rejected_class(layer: Wrapping) -> Wrapping | None:
    """Return a layer of a tensor with torch.Tensor in place of a rejected class.

    None if it has no state either: the layer is then not needed.
    """
    if layer.kind != "type" or not is_rejected(layer.type):
        return layer
    if layer.state is None:
        return None
    return replace(layer, type=Global("torch", "Tensor"))


# Classes of the standard library and of numpy


def _convert_path(node: Opaque) -> str | None:
    """Return the text of a `pathlib` path, or None if its arguments are not text."""
    if not isinstance(node.args, tuple) or not all(isinstance(part, str) for part in node.args):
        return None
    is_windows = "Windows" in node.class_name.rpartition(".")[2]
    return str((PureWindowsPath if is_windows else PurePosixPath)(*node.args))


def _convert_deque(node: Opaque) -> list[Any] | None:
    """Return the items of a `collections.deque`, or None for arguments of another form."""
    match node.args:
        case () | ((), _):  # `deque()`, or `deque((), maxlen)`; the items are appended later
            return [value for _, value in list_items(node)]
    return None


def _convert_frozenset(node: Opaque) -> Opaque | None:
    """Return a set with the items of a frozenset, or None for arguments of another form."""
    match node.args:
        case ([*items],):
            return Opaque(Global("builtins", "set"), (list(items),))
        case ():
            return Opaque(Global("builtins", "set"), ([],))
    return None


def _convert_dtype(node: Opaque) -> str | None:
    """Return the text for `numpy.dtype`, such as `<f4`.

    None for records, sub-arrays and times, which need more than such a text.
    """
    match node.args, node.state:  # the three None of the state: sub-array, field names, fields
        case (str() as code, *_), (_, str() as order, None, None, None, *_):
            if re.fullmatch(r"[a-zA-Z]\d*", code) and not code.startswith(("M", "m")):
                return code if order == "|" else f"{order}{code}"
    return None


def _convert_scalar(node: Opaque) -> str | bytes | None:
    """Return the value of a `numpy.str_` or `numpy.bytes_`; `Opaque.plain` has numbers already.

    None for any other scalar. numpy stores `str_` as UTF-32 (dtype `<U3`), `bytes_` as `S3`.
    """
    match node.args:
        case (Opaque() as dtype, payload) if dtype.class_name == "numpy.dtype":
            dtype_text, raw = _convert_dtype(dtype) or "", to_bytes(payload)
            if raw is None:
                return None
            if dtype_text.startswith("S"):
                return raw.rstrip(b"\0")
            order_and_kind = dtype_text[:2]
            try:
                return str(raw, _UTF32[order_and_kind]).rstrip("\0")
            except (KeyError, UnicodeDecodeError):
                return None
    return None


def _convert_omegaconf(node: Opaque) -> Any:
    """Return the items of a DictConfig or ListConfig, or the value of a node in one.

    Its types and references to its parent are left out. Interpolations stay text. `_NOTHING` if the
    value is None, and None for an object without a value.
    """
    for name in ("_content", "_val"):
        if name in node.attributes:
            value = node.attributes[name]
            return _NOTHING if value is None else value
    return None


_UTF32 = {"<U": "utf-32-le", ">U": "utf-32-be"}


_CONVERTERS: dict[str, Callable[[Opaque], Any]] = {
    "pathlib.*": _convert_path,
    "builtins.frozenset": _convert_frozenset,
    "collections.defaultdict": lambda node: _convert_to_dict(node, ()),
    "collections.deque": _convert_deque,
    "omegaconf.*": _convert_omegaconf,
    "numpy.dtype": _convert_dtype,
    "numpy.core.multiarray.scalar": _convert_scalar,
    "numpy._core.multiarray.scalar": _convert_scalar,
}
"""Plain forms by class. The factory of a `defaultdict` and `maxlen` of a `deque` are lost."""


_STATE_ATTRIBUTES = frozenset(
    {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
)
"""The attributes of a module that its `state_dict()` is made from."""
_COMMON_ATTRIBUTES = frozenset({"training", "_version", "_is_full_backward_hook", "_backend"})


def _find_content_outside_state(module: Opaque) -> tuple[list[str], list[str]]:
    """Describe the content of a module outside its `state_dict()`.

    Return descriptions of attributes with tensors, such as non-persistent buffers, and the names of
    the other attributes. Tensors with another key in the state dict (`_flat_weights` of an LSTM) do
    not count.
    """
    state_tensors = find_tensors(dict(to_module_state(module) or {}))
    state_places = {tensor.place or id(tensor) for tensor in state_tensors}
    lost = [
        describe_opaque_content(path, node) for path, node in find_opaque_content(module).items()
    ]
    setting_names: dict[str, None] = {}
    for prefix, submodule in walk_modules(module):
        candidates = {
            **submodule.attributes.get("_buffers", {}),
            **{
                name: node
                for name, node in submodule.attributes.items()
                if name not in _STATE_ATTRIBUTES
            },
        }
        for name, value in candidates.items():
            tensors = list(find_tensors(value))
            n_lost = sum((tensor.place or id(tensor)) not in state_places for tensor in tensors)
            if n_lost:
                lost.append(f"{printable(f'{prefix}{name}')} ({counted(n_lost, 'tensor')})")
            is_empty = value is None or (isinstance(value, (dict, list, tuple)) and not value)
            if not tensors and not is_empty and name not in _COMMON_ATTRIBUTES:
                setting_names[printable(str(name))] = None
    return lost, list(setting_names)


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
                yield from format_option(name, True)

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint without objects.

        Raises:
            NotRepresentable: if objects have no plain form and `drop_objects` is False (the
                message lists them); nothing, or no tensor of the model, would be left; or tensors
                have no values.
        """
        if not self.drop_objects:
            return self._convert(checkpoint)
        result = (
            self._convert(checkpoint)
            if self.plain
            else _drop_rejected(checkpoint, hint="add --plain to convert objects to plain data")
        )
        # With `drop_objects`, the user also asked for the losses that leave the result incomplete.
        changes = tuple(
            replace(change, wanted=True) if change.needed else change for change in result.changes
        )
        return result if changes == result.changes else replace(result, changes=changes)

    def _convert(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with plain data in place of objects.

        Raises:
            NotRepresentable: if objects without a plain form remain and `drop_objects` is False.
        """
        checkpoint = checkpoint.with_late_values()
        refuse_placeholders(checkpoint)
        result = _convert_leaves(
            checkpoint, _make_converter(checkpoint, can_lose_tensors=self.drop_objects)
        )
        if self.drop_objects:
            return _drop_rejected(result, hint=None)
        remaining = [_describe_remaining(path, node) for path, node in find_rejected(result.root)]
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
    """Return the checkpoint without the objects that torch rejects; `hint` is for errors.

    Tensor subclasses and namedtuples first become plain tensors and tuples.

    Raises:
        NotRepresentable: if nothing, or no tensor of a model, would remain.
    """
    unwrapped = _convert_leaves(checkpoint, _unwrap_rejected)
    changes = [
        Change("left-out", _describe_rejected(path, node), 1, wanted=True)
        for path, node in find_rejected(unwrapped.root)
    ]
    if not changes:
        return unwrapped
    if is_rejected(unwrapped.root):
        raise NotRepresentable(
            f"the file is one object ({get_class_name(unwrapped.root)}), so nothing would remain",
            file=checkpoint.path or None,
            hint=hint,
        )
    result = unwrapped.with_root(
        rebuild(unwrapped.root, _strip_rejected, _drop_rejected_entries), *changes
    )
    _refuse_lost_models(unwrapped, result, hint)
    _refuse_empty_result(unwrapped, result, hint)
    return result


def _refuse_lost_models(before: Checkpoint, after: Checkpoint, hint: str | None) -> None:
    """Refuse to lose every tensor of a state dict, or of all models together.

    Raises:
        NotRepresentable: if one would be lost.
    """
    models = [
        section for section in before.sections if section.kind in MODEL_KINDS and section.tensors()
    ]
    remaining_paths = {path for path, _ in after.tensors()}
    lost = [
        section
        for section in models
        if remaining_paths.isdisjoint(path for path, _ in section.tensors())
    ]
    for section in lost:
        if section.kind == "state_dict" or len(lost) == len(models):
            subject = f"the {section.kind} {printable(section.name) or 'at the root'}"
            raise NotRepresentable(
                f"{subject} would lose {counted(len(section.tensors()), 'tensor')}, which are "
                "in objects",
                file=before.path or None,
                hint=hint,
            )


def _refuse_empty_result(before: Checkpoint, after: Checkpoint, hint: str | None) -> None:
    """Refuse to lose all tensors, or all content of a file without tensors.

    Raises:
        NotRepresentable: if `after` has none; the message lists the objects of `before`.
    """
    had_tensors = has_tensors(before.root)
    keeps_any = has_tensors(after.root) if had_tensors else _has_content(after)
    if not keeps_any:
        subject = "every tensor of the file" if had_tensors else "all content"
        classes = dict.fromkeys(get_class_name(node) for _, node in find_rejected(before.root))
        raise NotRepresentable(
            f"{subject} is in objects, so nothing would remain: {listed(classes, most=4)}",
            file=before.path or None,
            hint=hint,
        )


def _has_content(checkpoint: Checkpoint) -> bool:
    """Return True if the tree has a leaf that is not None."""
    return any(leaf is not None for _, leaf in checkpoint.leaves)


def _describe_rejected(path: Path, node: Any) -> str:
    """Return the path and class of a rejected node, with the number of tensors in it."""
    tensors = 0 if isinstance(node, (Global, TensorRef)) else sum(1 for _ in find_tensors(node))
    inside = f", with {tensors} tensor{'s' if tensors > 1 else ''}" if tensors else ""
    return f"{describe_path(path)} ({printable(get_class_name(node))}{inside})"


def _describe_remaining(path: Path, node: Any) -> str:
    """Return the path and class of an object without a plain form.

    For a module, also its tensors outside its state dict.
    """
    lost, _others = _find_content_outside_state(node) if is_module(node) else ([], [])
    exception = f", except for its state_dict: {listed(lost, _MOST_NAMED)}" if lost else ""
    return f"{describe_path(path)} ({get_class_name(node)}{exception})"


Forms = Callable[[Any], Any]
"""Returns the plain form of a tensor or object, or the node itself."""


def _make_converter(checkpoint: Checkpoint, *, can_lose_tensors: bool) -> Forms:
    """Return the function that converts a leaf to its plain form.

    With `can_lose_tensors`, it also converts modules with tensors outside their state dict, which
    are lost.
    """

    def convert(leaf: Any) -> Any:
        """Return the plain form of a leaf, or the leaf itself."""
        if isinstance(leaf, TensorRef):
            return _to_plain_tensor(leaf)
        if not is_module(leaf):
            return to_plain_data(leaf)
        state = to_model_state(leaf)
        if state is None:
            return leaf
        if not can_lose_tensors:
            lost_tensors, _setting_names = _find_content_outside_state(leaf)
            if lost_tensors:
                return leaf
        return copy_state_dict(checkpoint, Section((), "module", state, leaf))

    return convert


def _unwrap_rejected(leaf: Any) -> Any:
    """Return a rejected tensor as a plain one, a namedtuple as its items, or else the leaf."""
    if isinstance(leaf, TensorRef):
        plain = _to_plain_tensor(leaf) if is_rejected(leaf) else leaf
        return leaf if is_rejected(plain) else plain
    items = _read_tuple_items(leaf)
    return leaf if items is None else items


def _convert_leaves(checkpoint: Checkpoint, convert: Forms) -> Checkpoint:
    """Return the checkpoint with all leaves converted, or the same one if none changes."""
    key_ids = _find_objects_in_keys(checkpoint.root)
    plain_by_id: dict[int, Any] = {}

    def convert_leaf(leaf: Any) -> Any:
        """Return the plain form of a leaf and note it in `plain_by_id`.

        In a key of a dict, only numbers and tuples change: another form may be unhashable, or equal
        to another key.
        """
        if not isinstance(leaf, (TensorRef, Opaque)):
            return leaf
        plain = convert(leaf)
        is_number = isinstance(leaf, Opaque) and leaf.plain is not None
        can_be_key = is_number or isinstance(plain, tuple)
        if id(leaf) in key_ids and not can_be_key:
            return leaf
        if plain is not leaf:
            plain_by_id[id(leaf)] = plain
        return plain

    root = rebuild(checkpoint.root, convert_leaf)
    changes = list(_report_conversions(checkpoint.root, convert, plain_by_id))
    return checkpoint.with_root(root, *changes) if changes else checkpoint


def _report_conversions(root: Any, convert: Forms, plain_by_id: dict[int, Any]) -> Iterator[Change]:
    """Yield a change for every object and array that was converted, in the order of the file.

    Then one for all attributes of modules that are lost. `plain_by_id` has the plain form by the
    identity of the object.
    """

    def keeps_content(node: Any) -> bool:
        """Return True if the objects inside a node are converted too, and reported.

        Not inside objects that became a number, or a module, which became its state dict.
        """
        is_container = isinstance(plain_by_id.get(id(node)), (dict, list, tuple, Opaque))
        return not is_rejected(node) or (is_container and not is_module(node))

    lost_attributes: dict[str, None] = {}
    for link, node in walk_mentions(root, enter=keeps_content):
        # A tensor may have been converted as a copy with other parts, so its identity is not known.
        form = convert(node) if isinstance(node, TensorRef) else plain_by_id.get(id(node), node)
        if form is node:
            continue
        name = describe_path(to_path(link))
        yield Change(
            "plain",
            f"{name}: converted {printable(get_class_name(node))} to {_describe_form(form)}",
            1,
        )
        if is_module(node):
            tensors, attributes = _find_content_outside_state(node)
            lost_attributes.update(dict.fromkeys(attributes))
            for lost in tensors:
                yield Change("left-out", f"{name}: {lost}", 1, wanted=True)
    if lost_attributes:
        text = f"module attributes that are not in a state_dict: {listed(lost_attributes)}"
        yield Change("left-out", text, len(lost_attributes), wanted=True)


def _find_objects_in_keys(root: Any) -> set[int]:
    """Return the ids of objects in dict keys and items of sets, also inside tuples."""
    keys: list[Any] = []
    for node in walk_everything(root):
        if isinstance(node, dict):
            keys.extend(node)
        elif isinstance(node, Opaque) and node.class_name in _SETS and node.args:
            keys.extend(node.args[0])  # the items
    return {id(node) for node in walk_everything(keys) if isinstance(node, Opaque)}


def _describe_form(form: Any) -> str:
    """Return a phrase for a plain form, such as `a dict` or `text`; an `Opaque` form is a set."""
    nouns = {TensorRef: "tensor", Opaque: "set", OrderedMap: "OrderedDict", str: "text"}
    noun = nouns.get(type(form), type(form).__name__)
    if noun in ("text", "bytes"):
        return noun
    return f"an {noun}" if noun.startswith(tuple("aeiouO")) else f"a {noun}"


# Leaving out


def _strip_rejected(leaf: Any) -> Any:
    """Return a leaf without its rejected layers or set items; None for a rejected leaf.

    `rebuild` passes the leaves inside a leaf first: a rejected class in a layer is then None.
    """
    if is_rejected(leaf):
        return None
    if isinstance(leaf, TensorRef):
        layers = tuple(layer for layer in leaf.wrapping if layer.kind != "type" or layer.type)
        if len(layers) == len(leaf.wrapping):
            return leaf
        # A subclass without its class is a plain tensor.
        kind = "strided" if leaf.kind == "subclass" else leaf.kind
        return replace(leaf, kind=kind, wrapping=layers)
    if isinstance(leaf, Opaque) and leaf.class_name in _SETS and leaf.args:
        items = leaf.args[0]
        kept = [item for item in items if not any(find_rejected(item))]
        return leaf if len(kept) == len(items) else replace(leaf, args=(kept,))
    return leaf


def _drop_rejected_entries(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dict without the entries and attributes that have a rejected key or value."""
    kept = _select_accepted_entries(mapping)
    attributes = mapping.attributes if isinstance(mapping, OrderedMap) else {}
    kept_attributes = _select_accepted_entries(attributes)
    if len(kept) == len(mapping) and len(kept_attributes) == len(attributes):
        return mapping
    smaller = copy_with_items(mapping, kept)
    if isinstance(smaller, OrderedMap):
        smaller.attributes = kept_attributes
    return smaller


def _select_accepted_entries(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """Return the entries in which neither the key nor the value is rejected."""
    return {
        key: value
        for key, value in mapping.items()
        if not any(find_rejected(key)) and not is_rejected(value)
    }
