"""The sections of a checkpoint: which dicts are state dicts, optimizers, schedulers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ckptool._lazy import Result
from ckptool.core.addressing import resolve
from ckptool.core.model import Opaque, OrderedMap, Path, TensorRef, find_tensors, remade
from ckptool.core.modules import held_apart, holds_tensors, is_module, model_state
from ckptool.core.names import wrappers_of
from ckptool.core.quantizers import class_scheme, find_quantized
from ckptool.core.tree import everything, held_items, name_of, rebuild, walk
from ckptool.errors import AmbiguousName, NotFound
from ckptool.remedies import Remedy
from ckptool.words import counted, listed, printable, shell

if TYPE_CHECKING:
    from ckptool.core.checkpoint import Checkpoint

_MOST_LISTED = 8
"""The number of keys that a hint lists."""
MODEL_KINDS = ("state_dict", "module")
"""The kinds of section with one flat state dict."""
_MODEL_KEY = re.compile(r"model|net|state|weight|param|ema", re.IGNORECASE)
_MODEL_NAME = re.compile(
    r"(model|module|net|network)(_?state(_?dict)?|_?weights|_?params)?|state_?dict", re.IGNORECASE
)
"""Keys under which trainings save the model itself."""
_OPTIMIZER_KEY = re.compile(r"optimizer(_weights)?\Z")
"""Keys under which Keras and TensorFlow keep the variables of an optimizer, in one flat dict."""
_INTEGER = re.compile(r"u?int\d+|bool")
_OF_ARRAYS = ("model", "state_dict", "blobs")
"""Keys under which numpy's arrays are weights: in files of detectron2 and Caffe2."""
OF_THE_MODEL = "_ckptool_model"
"""An attribute next to `_metadata` that marks the model's state dict in its file.

Its value has the keys of the optimizers next to it, each with the key of the state dict whose
parameters it has."""


@dataclass(frozen=True, eq=False, repr=False)
class Section(Result):
    """A section of a checkpoint.

    `kind` is `state_dict`, `optimizer`, `scheduler`, `module` (a pickled one), or `values` for the
    rest. `node` is its mapping: the `state_dict()` of a module, or for `values` the leaves by full
    path. `holder` is the corresponding object of the tree.
    """

    path: Path
    kind: str
    node: dict[Any, Any]
    holder: Any

    @property
    def name(self) -> str:
        """Its path as text, empty for the root."""
        return name_of(self.path)

    @cached_property
    def wrappers(self) -> tuple[str, ...]:
        """The wrappers in its keys, outermost first."""
        if self.kind in MODEL_KINDS:
            return wrappers_of(wrapped_names(self.node))
        return wrappers_of(optimizer_names(self.node)) if self.kind == "optimizer" else ()

    @cached_property
    def apart(self) -> dict[str, int]:
        """Content that only the classes of a pickled module save (`modules.held_apart`), in words.

        Each with its number of tensors.
        """
        held = held_apart(self.holder) if self.kind == "module" else {}
        return {
            only_its_class(path, one): sum(1 for _ in find_tensors(one))
            for path, one in held.items()
        }

    @property
    def is_foreign(self) -> bool:
        """True if it has the optimizer variables of Keras or TensorFlow in one flat dict."""
        return self.kind == "optimizer" and self.node["state"] is self.holder

    @property
    def quantizers(self) -> Counter[str]:
        """The number of weights per known quantizer (`quantizers`)."""
        if self.kind not in MODEL_KINDS:
            return Counter()
        found = Counter(one.scheme for one in find_quantized(self.node).values())
        held = held_apart(self.holder).values() if self.kind == "module" else ()
        return found + Counter(scheme for scheme in map(class_scheme, held) if scheme)

    @property
    def unread(self) -> tuple[str, ...]:
        """The words of `apart`."""
        return tuple(self.apart)

    def tensors(self) -> list[tuple[Path, TensorRef]]:
        """Return the section's tensors with their paths from the root, in the order of the file."""
        if self.kind == "values":
            leaves = iter(self.node.items())
        else:
            leaves = ((self.path + path, leaf) for path, leaf in walk(self.holder))
        return [(path, leaf) for path, leaf in leaves if isinstance(leaf, TensorRef)]


def only_its_class(path: str, node: Any) -> str:
    """Describe content of a module that only its class can save."""
    name, scheme = getattr(node, "class_name", "its class"), class_scheme(node)
    what = "" if scheme or not isinstance(node, Opaque) else "the submodule "
    more = f"; {scheme}" if scheme else ""
    return f"{what}{printable(path)} (only {printable(name)} can separate its weights{more})"


def sections(root: Any) -> tuple[Section, ...]:
    """Return the sections of a checkpoint in the order of the file, with `values` last.

    A dict is a state dict if its keys are strings, at least half of its entries are tensors, and no
    tensor is deeper. Dicts of random states (all one-dimensional uint8) are not. Neither are, below
    the root, dicts of scalar tensors and of numpy arrays (except at `model`), unless they have
    dotted keys of tensors with dimensions, or `_metadata`. Optimizers and schedulers have no
    sections inside.
    """
    found: list[Section] = []
    modules: dict[int, OrderedMap | None] = {}

    def enter(path: Path, node: Any) -> bool:
        section = _classify(path, node, modules)
        if section is None or _is_mere_data(root, section):
            return True
        found.append(section)
        return False

    values = dict(walk(root, enter=enter))
    if values:
        found.append(Section((), "values", values, root))
    return tuple(found)


def _classify(path: Path, node: Any, modules: dict[int, OrderedMap | None]) -> Section | None:
    """Return the section for a container; `modules` caches those already read."""
    if is_module(node):
        if id(node) not in modules:
            modules[id(node)] = model_state(node)
        state = modules[id(node)]
        return None if state is None else Section(path, "module", state, node)
    mapping = _mapping_of(node)
    if mapping is None:
        return None
    if is_optimizer(mapping):
        return Section(path, "optimizer", mapping, node)
    if path and _OPTIMIZER_KEY.match(str(path[-1])) and is_flat(mapping):
        return Section(path, "optimizer", {"state": mapping, "param_groups": []}, node)
    if _is_scheduler(mapping):
        return Section(path, "scheduler", mapping, node)
    if _is_state_dict(mapping, path):
        return Section(path, "state_dict", mapping, node)
    return None


def _mapping_of(node: Any) -> dict[Any, Any] | None:
    """Return a dict, or the items of an instance of a dict subclass."""
    if isinstance(node, dict):
        return node
    if isinstance(node, Opaque) and any(kind == "set" for kind, _ in node.steps):
        return OrderedMap(held_items(node))
    return None


MOMENTS = (
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta",
    "exp_inf", "grad_avg", "sum", "prev", "ax", "variance",
)  # fmt: skip
"""Keys of an optimizer's state whose tensors have the shape of the parameter."""
_OF_A_PARAMETER, _USUAL = {"step", *MOMENTS}, {"exp_avg", "momentum_buffer", "square_avg"}


def is_optimizer(mapping: dict[Any, Any]) -> bool:
    """Return True for a result of `torch.optim.Optimizer.state_dict()`."""
    groups = mapping.get("param_groups")
    return (
        isinstance(mapping.get("state"), dict)
        and isinstance(groups, list)
        and all(isinstance(group, dict) for group in groups)
    )


def is_flat_optimizer(mapping: dict[Any, Any]) -> bool:
    """Return True for an optimizer state flattened by `get_optimizer_state_dict`."""
    return any(isinstance(key, str) and key.startswith("param_groups.") for key in mapping)


def with_numbers(root: Any) -> Any:
    """Return the tree with integer keys in optimizer states whose groups have integers.

    DCP converts all keys to text, and `Optimizer.load_state_dict` silently skips text keys.
    """
    instead: dict[int, Any] = {}
    for node in everything(root):
        if isinstance(node, dict) and is_optimizer(node):
            held = (group.get("params") for group in node["param_groups"])
            every = [one for params in held if isinstance(params, list) for one in params]
            state = node["state"]
            numbers = {str(one): one for one in every if type(one) is int and one not in state}
            if not numbers.keys().isdisjoint(state):
                items = ((numbers.get(key, key), one) for key, one in state.items())
                instead[id(state)] = remade(state, items)
    if not instead:
        return root
    return rebuild(root, mapping=lambda node: instead.get(id(node), node))


def loose_optimizers(root: Any) -> Iterator[Section]:
    """Yield optimizer states by name with their groups, if any, next to them.

    The folders of `ckptool train --sharded` have these.
    """
    if not isinstance(root, dict) or is_optimizer(root):
        return
    groups = {"param_groups": root.get("param_groups", [])}
    for key, state in root.items():
        made = {"state": state, **groups}
        if is_optimizer(made) and state and all(map(_is_of_a_parameter, state.values())):
            yield Section((key,), "optimizer", made, state)


def _is_of_a_parameter(node: Any) -> bool:
    """Return True for an optimizer's state of one parameter."""
    if not isinstance(node, dict):
        return False
    is_usual = node.keys() <= _OF_A_PARAMETER and not node.keys().isdisjoint(_USUAL)
    is_adagrads = node.keys() == {"step", "sum"} and isinstance(node["sum"], TensorRef)
    return is_usual or is_adagrads


def _is_scheduler(mapping: dict[Any, Any]) -> bool:
    """Return True for the state of a scheduler, but not for a checkpoint with an epoch."""
    if "last_epoch" not in mapping and "_step_count" not in mapping:
        return False
    return not any(holds_tensors(one) for one in mapping.values() if not isinstance(one, TensorRef))


CONSTANT = "CONSTANTS.c"
"""The prefix of constants in the code of a frozen TorchScript (torch/csrc/jit)."""


def _is_state_dict(mapping: dict[Any, Any], path: Path) -> bool:
    if not all(isinstance(key, str) for key in mapping):
        return False
    if path and isinstance(path[-1], TensorRef):
        return False  # the state of a parameter in a pickled optimizer
    if is_flat_optimizer(mapping):
        return False
    if path and _is_of_a_parameter(mapping):
        return False  # if no groups decide
    entries = [value for name, value in mapping.items() if not is_extra_state(name)]
    tensors = [value for value in entries if isinstance(value, TensorRef)]
    if mapping and all(name.startswith(CONSTANT) for name in mapping):
        return False  # a frozen program has no keys of a model
    if tensors and isinstance(mapping, OrderedMap) and mapping.metadata is not None:
        return True  # only `Module.state_dict()` puts `_metadata` there
    dotted = any(
        "." in name and isinstance(value, TensorRef) and value.shape
        for name, value in mapping.items()
    )
    if not tensors or (not dotted and not _looks_like_weights(tensors, len(entries), path)):
        return False
    return _are_flat(entries)


def _looks_like_weights(tensors: list[TensorRef], entries: int, path: Path) -> bool:
    # A model's dict has tensors and at most some settings; metrics or configurations with a
    # tensor or two have mostly plain values.
    if 2 * len(tensors) < entries:
        return False
    if all(tensor.dtype == "uint8" and len(tensor.shape) == 1 for tensor in tensors):
        return False
    if not path:
        return True
    takes_arrays = path[-1] in _OF_ARRAYS
    return any(one.shape and (takes_arrays or one.kind != "numpy") for one in tensors)


def is_extra_state(name: Any) -> bool:
    """Return True if an entry is the result of a module's `get_extra_state`, of any type."""
    return isinstance(name, str) and (name.endswith("._extra_state") or name == "_extra_state")


def likely_models(checkpoint: Checkpoint) -> tuple[Section, ...]:
    """Return the state dicts and modules that may be the model; empty if it is not certain.

    For example, it is not certain for several dicts (graphs, data sets) without keys of weights.
    """
    found = _models(checkpoint.root)
    return tuple(found) if len(found) < 2 or any(map(_is_named, found)) else ()


def only_model(found: Sequence[Section]) -> Section | None:
    """Return the only section, or the one that `ckptool.save` marked, or None."""
    if len(found) == 1:
        return found[0]
    top = min((len(section.path) for section in found), default=0)  # of the file as a whole
    marked = [one for one in found if len(one.path) == top and is_the_models(one)]
    return marked[0] if len(marked) == 1 else None


def _is_named(section: Section) -> bool:
    """Return True if it has a model's name, so that sections without one do not compete.

    This includes modules with Parameters, or with weights known only to their class. Integers are
    tables or codes, whatever their key, unless they come from a module.
    """
    if section.kind == "module":
        has_own = any(getattr(one, "is_parameter", True) for one in section.node.values())
        return has_own or bool(section.apart)
    metadata = isinstance(section.node, OrderedMap) and section.node.metadata
    return bool(metadata) or (_calls_weights(section) and not _is_table(section.node))


def _calls_weights(section: Section) -> bool:
    """Return True if its key or a key in it shows that it contains weights."""
    names = (name for name, value in section.node.items() if isinstance(value, TensorRef))
    return bool(_MODEL_KEY.search(section.name)) or any(
        "." in name or name in ("weight", "bias") for name in names
    )


def _is_table(mapping: dict[Any, Any]) -> bool:
    """Return True if all of its tensors are integers: indices, lengths, codes."""
    tensors = (one for one in mapping.values() if isinstance(one, TensorRef))
    return all(_INTEGER.fullmatch(one.dtype) for one in tensors)


def _is_mere_data(root: Any, section: Section) -> bool:
    """Return True if a dict below the root has no sign of weights.

    It has only integers, or is in an object of another library or in a list.
    """
    if section.kind != "state_dict" or not section.path or _is_named(section):
        return False
    if _calls_weights(section):
        return False
    keyed = isinstance(section.path[-1], str)
    return not keyed or _is_table(section.node) or _is_inside(root, section)


def _is_inside(root: Any, section: Section) -> bool:
    """Return True if the section is inside an object."""
    node = root
    for key in section.path:
        if not isinstance(node, (dict, list, tuple)):
            return True
        node = node[key]
    return False


def wrapped_names(mapping: dict[Any, Any]) -> list[str]:
    """Return the keys that show the wrappers: those of the model's own entries.

    These are tensors, `_extra_state`s, and other entries at the path of a module in `_metadata`: a
    quantized layer has a dtype, or None for its bias.
    """
    metadata = mapping.metadata if isinstance(mapping, OrderedMap) else None
    modules = metadata if isinstance(metadata, dict) else {}
    return [
        name
        for name, value in mapping.items()
        if isinstance(name, str)
        and (
            isinstance(value, TensorRef)
            or is_extra_state(name)
            or ("." in name and name.rpartition(".")[0] in modules)
        )
    ]


def named_tensors(mapping: dict[Any, Any]) -> dict[str, TensorRef]:
    """Return the entries of a mapping that are tensors with a text key."""
    items = mapping.items()
    return {key: one for key, one in items if isinstance(key, str) and isinstance(one, TensorRef)}


def values_inside(mapping: dict[Any, Any]) -> list[Any]:
    """Return the keys of a state dict that do not belong to a model."""
    own = frozenset(wrapped_names(mapping))
    return [
        name
        for name, value in mapping.items()
        if name not in own and not isinstance(value, TensorRef)
    ]


def optimizer_names(optimizer: dict[Any, Any]) -> list[str]:
    """Return the parameter names in an optimizer's state dict, each once; empty for numbers.

    They are keys of `state`, items of a group's `params`, or of its `param_names`.
    """
    names = dict.fromkeys(name for name in optimizer["state"] if isinstance(name, str))
    for group in optimizer["param_groups"]:
        for key in ("params", "param_names"):
            held = group.get(key)
            if isinstance(held, (list, tuple)):
                names.update(dict.fromkeys(name for name in held if isinstance(name, str)))
    return list(names)


def model_state_dict(checkpoint: Checkpoint, key: Any = None) -> Section:
    """Return the state dict at the path `key`, or the only one of a model.

    `key` may also be a container of exactly one state dict. There is no guess between averaged and
    raw weights, or a generator and its discriminator; `ckptool.save` marks the model. A root with
    only tensors is a state dict, whatever they are. Otherwise the tensors at the root are the last
    choice, if their keys have dots: torchtitan puts the dicts `optimizer`, `lr_scheduler` and
    `train_state` next to the weights.

    Raises:
        AmbiguousName: if there are several; the message lists them with their tensor counts.
        NotFound: if there is none; the message lists the content.
    """
    if key is None:
        where = "the dict" if checkpoint.in_memory else "the file"
        found = _models(checkpoint.root)
        if not found and (weights := _weights_at(checkpoint.root)):
            return Section((), "state_dict", weights, weights)
        return _require_one(checkpoint, found, where)
    path, node = resolve(
        checkpoint,
        key,
        lambda one: (
            isinstance(one, (list, tuple)) or is_module(one) or _mapping_of(one) is not None
        ),
    )
    section = _classify(path, node, {})
    if section is not None and section.kind in MODEL_KINDS:
        return section
    below = [] if section is not None else _models(node, path)
    mapping = _mapping_of(node)
    if not below and mapping is not None and is_flat(mapping):
        return Section(path, "state_dict", mapping, node)
    return _require_one(checkpoint, below, repr(printable(name_of(path))))


def is_flat(node: Any) -> bool:
    """Return True for a dict with direct tensors, and none deeper."""
    return isinstance(node, dict) and _are_flat(node.values())


def _are_flat(values: Collection[Any]) -> bool:
    others = [value for value in values if not isinstance(value, TensorRef)]
    return len(others) < len(values) and not any(map(holds_tensors, others))


def _weights_at(root: Any) -> dict[Any, Any]:
    """Return the tensors directly in the root if they have keys of weights, or are alone.

    A root with only random states also counts: the caller asked for a state dict.
    """
    if not isinstance(root, dict) or not all(isinstance(key, str) for key in root):
        return {}
    tensors = named_tensors(root)
    if len(tensors) == len(root):
        return root
    dotted = any("." in name and one.shape for name, one in tensors.items())
    return OrderedMap(tensors) if dotted and not is_flat_optimizer(root) else {}


def _models(root: Any, path: Path = ()) -> list[Section]:
    """Return the state dicts and modules below a node, each once.

    If any have a model's name, the others are left out. The same applies to keys of weights
    (`fisher` next to `model`), unless the key is also that of a model. Averages are never taken for
    the model, so they leave the others in.
    """
    found: dict[int, Section] = {}
    for section in sections(root):
        if section.kind in MODEL_KINDS:
            whole = Section(path + section.path, section.kind, section.node, section.holder)
            found.setdefault(id(section.holder), whole)
    named = list(filter(_is_named, found.values()))
    keyed = [one for one in named if _MODEL_KEY.search(one.name)]
    if len(keyed) == 1 and keyed[0].path and _MODEL_NAME.fullmatch(str(keyed[0].path[-1])):
        return keyed
    return named if any("ema" not in one.name.lower() for one in named) else list(found.values())


def _require_one(checkpoint: Checkpoint, found: list[Section], where: str) -> Section:
    chosen = only_model(found)
    if chosen is not None:
        return chosen
    file = checkpoint.path or None
    if found:
        first, *others = (Remedy((("key", one.name),)) for one in found[:_MOST_LISTED])
        raise AmbiguousName(
            f"{where} has {len(found)} state dicts: {listed(map(_counted, found))}",
            file=file,
            hint=first._replace(lead="choose one with ", instead=tuple(others)),
        )
    raise NotFound(
        f"{where} has no state dict of a model; it has {listed(what_there_is(checkpoint))}",
        file=file,
        hint=f"ckptool info {shell(file)}" if file else None,
    )


def is_the_models(section: Section) -> bool:
    """Return True if `ckptool.save` marked it as the model's."""
    marked = isinstance(section.node, OrderedMap) and OF_THE_MODEL in section.node.attributes
    return marked and section.path[-1:] == ("state_dict",)


def noted_owners(section: Section) -> dict[Any, Any]:
    """Return the keys of optimizers noted by `ckptool.save`, each with that of its model."""
    if not isinstance(section.node, OrderedMap) or not is_the_models(section):
        return {}
    noted = section.node.attributes[OF_THE_MODEL]
    return noted if isinstance(noted, dict) else {}


def _counted(section: Section) -> str:
    return f"{section.name or 'the root'} ({counted(len(section.tensors()), 'tensor')})"


def what_there_is(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield descriptions of the sections, and of the first keys outside any section."""
    for section in checkpoint.sections:
        if section.kind == "values":
            paths = [path for path in section.node if path] or [()]
            yield from dict.fromkeys(name_of(path[:1]) or "a lone value" for path in paths)
        else:
            yield f"the {section.kind} {section.name or 'at the root'}"
