"""The sections of a checkpoint: which dicts are state dicts, optimizers, schedulers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

from ckptool._lazy import Result
from ckptool.core.addressing import resolve
from ckptool.core.model import Opaque, OrderedMap, Path, TensorRef, copy_with_items, find_tensors
from ckptool.core.modules import find_opaque_content, has_tensors, is_module, to_model_state
from ckptool.core.names import find_wrappers
from ckptool.core.quantizers import class_scheme, find_quantized
from ckptool.core.tree import list_items, name_of, rebuild, walk, walk_everything
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
_INTEGER_DTYPE = re.compile(r"u?int\d+|bool")
_ARRAY_MODEL_KEYS = ("model", "state_dict", "blobs")
"""Keys under which numpy's arrays are weights: in files of detectron2 and Caffe2."""
MODEL_MARK = "_ckptool_model"
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
    """The mapping; for an optimizer without groups, a new one with `state` and `param_groups`."""
    holder: Any

    @property
    def name(self) -> str:
        """Its path as text, empty for the root."""
        return name_of(self.path)

    @cached_property
    def wrappers(self) -> tuple[str, ...]:
        """The wrappers in its keys, outermost first."""
        if self.kind in MODEL_KINDS:
            return find_wrappers(list_wrappable_keys(self.node))
        return find_wrappers(list_optimizer_names(self.node)) if self.kind == "optimizer" else ()

    @cached_property
    def apart(self) -> dict[str, int]:
        """What a pickled module has apart from `node`: by description, the number of its tensors.

        Submodules and quantizers that are no plain dicts of parameters: only their class could say
        what its `state_dict()` saves, and it is never run (`modules.find_opaque_content`).
        """
        content = find_opaque_content(self.holder) if self.kind == "module" else {}
        return {
            describe_opaque_content(path, node): sum(1 for _ in find_tensors(node))
            for path, node in content.items()
        }

    @property
    def is_foreign(self) -> bool:
        """True if it has the optimizer variables of Keras or TensorFlow in one flat dict."""
        return self.kind == "optimizer" and self.node["state"] is self.holder

    @property
    def quantizers(self) -> Counter[str]:
        """The number of weights per known quantizer, with those that only their class can save."""
        if self.kind not in MODEL_KINDS:
            return Counter()
        counts = Counter(weight.scheme for weight in find_quantized(self.node).values())
        objects = find_opaque_content(self.holder).values() if self.kind == "module" else ()
        return counts + Counter(scheme for scheme in map(class_scheme, objects) if scheme)

    @property
    def unread(self) -> tuple[str, ...]:
        """Descriptions of the content that only the classes of a pickled module save."""
        return tuple(self.apart)

    def tensors(self) -> list[tuple[Path, TensorRef]]:
        """Return the section's tensors with their paths from the root, in the order of the file."""
        if self.kind == "values":
            leaves = iter(self.node.items())
        else:
            leaves = ((self.path + path, leaf) for path, leaf in walk(self.holder))
        return [(path, leaf) for path, leaf in leaves if isinstance(leaf, TensorRef)]


def describe_opaque_content(path: str, node: Any) -> str:
    """Describe content of a module that only its class can save."""
    name, scheme = getattr(node, "class_name", "its class"), class_scheme(node)
    is_submodule = isinstance(node, Opaque) and not scheme  # neither of a quantizer nor plain data
    kind = "the submodule " if is_submodule else ""
    remark = f"; {scheme}" if scheme else ""
    return f"{kind}{printable(path)} (only {printable(name)} can separate its weights{remark})"


def find_sections(root: Any) -> tuple[Section, ...]:
    """Return the sections of a checkpoint in the order of the file, with `values` last.

    A dict is a state dict if its keys are strings, at least half of its entries are tensors, and no
    tensor is deeper. Dicts of random states (all one-dimensional uint8) are not. Neither are, below
    the root, dicts of scalar tensors and of numpy arrays (except at `model`), unless they have
    dotted keys of tensors with dimensions, or `_metadata`. Optimizers and schedulers have no
    sections inside.
    """
    result: list[Section] = []
    modules: dict[int, OrderedMap | None] = {}  # a cache of `_classify`

    def enter(path: Path, node: Any) -> bool:
        """Add the section of a node, if it is one; return True to search inside the node."""
        section = _classify(path, node, modules)
        if section is None or _is_mere_data(root, section):
            return True
        result.append(section)
        return False

    values = dict(walk(root, enter=enter))
    if values:
        result.append(Section((), "values", values, root))
    return tuple(result)


def _classify(path: Path, node: Any, modules: dict[int, OrderedMap | None]) -> Section | None:
    """Return the section for a container, or None; `modules` caches those already read."""
    if is_module(node):
        if id(node) not in modules:
            modules[id(node)] = to_model_state(node)
        state = modules[id(node)]
        return None if state is None else Section(path, "module", state, node)
    mapping = _mapping_of(node)
    if mapping is None:
        return None
    if is_optimizer(mapping):
        return Section(path, "optimizer", mapping, node)
    # Keras stores an optimizer as a flat dict of variables, known only by its key.
    if path and _OPTIMIZER_KEY.match(str(path[-1])) and is_flat(mapping):
        return Section(path, "optimizer", {"state": mapping, "param_groups": []}, node)
    if _is_scheduler(mapping):
        return Section(path, "scheduler", mapping, node)
    if _is_state_dict(mapping, path):
        return Section(path, "state_dict", mapping, node)
    return None


def _mapping_of(node: Any) -> dict[Any, Any] | None:
    """Return a dict, or the items of an instance of a dict subclass; None for anything else."""
    if isinstance(node, dict):
        return node
    if isinstance(node, Opaque) and any(kind == "set" for kind, _ in node.steps):
        return OrderedMap(list_items(node))
    return None


MOMENTS = (
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta",
    "exp_inf", "grad_avg", "sum", "prev", "ax", "variance",
)  # fmt: skip
"""Keys of an optimizer's state whose tensors have the shape of the parameter."""
_PARAMETER_STATE_KEYS = {"step", *MOMENTS}
_COMMON_MOMENTS = {"exp_avg", "momentum_buffer", "square_avg"}
"""Keys by which the state of a parameter is recognized, because no model uses them."""


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


def restore_integer_keys(root: Any) -> Any:
    """Return the tree with integer keys in optimizer states whose groups have integers.

    DCP converts all keys to text, and `Optimizer.load_state_dict` silently skips text keys.
    """
    replacements: dict[int, Any] = {}
    for node in walk_everything(root):
        if isinstance(node, dict) and is_optimizer(node):
            params_of_groups = (group.get("params") for group in node["param_groups"])
            parameters = chain.from_iterable(
                params for params in params_of_groups if isinstance(params, list)
            )
            state = node["state"]
            number_by_text = {
                str(parameter): parameter
                for parameter in parameters
                if type(parameter) is int and parameter not in state
            }
            if not number_by_text.keys().isdisjoint(state):
                items = ((number_by_text.get(key, key), value) for key, value in state.items())
                replacements[id(state)] = copy_with_items(state, items)
    if not replacements:
        return root
    return rebuild(root, mapping=lambda node: replacements.get(id(node), node))


def find_loose_optimizers(root: Any) -> Iterator[Section]:
    """Yield the optimizer states at the root, each as an optimizer with the groups next to them.

    A state is by parameter name. The folders of `ckptool train --sharded` have these; the groups
    may be missing.
    """
    if not isinstance(root, dict) or is_optimizer(root):
        return
    groups = {"param_groups": root.get("param_groups", [])}
    for key, state in root.items():
        optimizer = {"state": state, **groups}
        if is_optimizer(optimizer) and state and all(map(_is_parameter_state, state.values())):
            yield Section((key,), "optimizer", optimizer, state)


def _is_parameter_state(node: Any) -> bool:
    """Return True for an optimizer's state of one parameter; Adagrad's has only step and sum."""
    if not isinstance(node, dict):
        return False
    is_usual = node.keys() <= _PARAMETER_STATE_KEYS and not node.keys().isdisjoint(_COMMON_MOMENTS)
    is_adagrad = node.keys() == {"step", "sum"} and isinstance(node["sum"], TensorRef)
    return is_usual or is_adagrad


def _is_scheduler(mapping: dict[Any, Any]) -> bool:
    """Return True for the state of a scheduler: if it has tensors, they are its own values.

    A whole checkpoint may have a `last_epoch` too, but its tensors are in dicts.
    """
    if "last_epoch" not in mapping and "_step_count" not in mapping:
        return False
    return not any(
        has_tensors(value) for value in mapping.values() if not isinstance(value, TensorRef)
    )


CONSTANT = "CONSTANTS.c"
"""The prefix of constants in the code of a frozen TorchScript (torch/csrc/jit)."""


def _is_state_dict(mapping: dict[Any, Any], path: Path) -> bool:
    """Return True if a mapping has the keys and tensors of a module's state dict.

    See `find_sections`. In `path`, a key may be a tensor: a pickled optimizer has its parameters.
    """
    if not all(isinstance(key, str) for key in mapping):
        return False
    if path and isinstance(path[-1], TensorRef):
        return False  # the state of a parameter in a pickled optimizer
    if is_flat_optimizer(mapping):
        return False
    if path and _is_parameter_state(mapping):
        return False  # the state of one parameter, in an optimizer whose groups are missing
    entries = [value for name, value in mapping.items() if not is_extra_state(name)]
    tensors = [value for value in entries if isinstance(value, TensorRef)]
    if mapping and all(name.startswith(CONSTANT) for name in mapping):
        return False  # a frozen program has no keys of a model
    if tensors and isinstance(mapping, OrderedMap) and mapping.metadata is not None:
        return True  # only `Module.state_dict()` puts `_metadata` there
    has_dotted_key = any(  # numbers under dotted keys may be metrics, such as `val.loss`
        "." in name and isinstance(value, TensorRef) and value.shape
        for name, value in mapping.items()
    )
    if not tensors or (not has_dotted_key and not _looks_like_weights(tensors, len(entries), path)):
        return False
    return _has_flat_tensors(entries)  # no other entry contains a tensor


def _looks_like_weights(tensors: list[TensorRef], entries: int, path: Path) -> bool:
    """Return True if tensors without dotted keys may be weights.

    `entries` is the number of all entries of their dict, which is at `path`.
    """
    # A model's dict has tensors and at most some settings; metrics or configurations with a
    # tensor or two have mostly plain values.
    if 2 * len(tensors) < entries:
        return False
    if all(tensor.dtype == "uint8" and len(tensor.shape) == 1 for tensor in tensors):
        return False  # the states of random number generators
    if not path:
        return True
    # Below the root, scalars are metrics, and numpy arrays data unless their key says otherwise.
    can_be_arrays = path[-1] in _ARRAY_MODEL_KEYS
    return any(tensor.shape and (can_be_arrays or tensor.kind != "numpy") for tensor in tensors)


def is_extra_state(name: Any) -> bool:
    """Return True if an entry is the result of a module's `get_extra_state`, of any type."""
    return isinstance(name, str) and (name.endswith("._extra_state") or name == "_extra_state")


def find_likely_models(checkpoint: Checkpoint) -> tuple[Section, ...]:
    """Return the state dicts and modules that may be the model; empty if it is not certain.

    For example, it is not certain for several dicts (graphs, data sets) without keys of weights.
    """
    models = _find_models(checkpoint.root)
    return tuple(models) if len(models) < 2 or any(map(_is_clearly_model, models)) else ()


def choose_only_model(sections: Sequence[Section]) -> Section | None:
    """Return the only section, or the one that `ckptool.save` marked, or None."""
    if len(sections) == 1:
        return sections[0]
    # Marks deeper in the file are of checkpoints inside this one.
    depth = min((len(section.path) for section in sections), default=0)
    marked = [
        section
        for section in sections
        if len(section.path) == depth and is_marked_as_model(section)
    ]
    return marked[0] if len(marked) == 1 else None


def _is_clearly_model(section: Section) -> bool:
    """Return True if a section is recognizably a model, so that others do not compete with it.

    A state dict is one by its `_metadata`, or by a name of weights unless it has only integers
    (tables or codes); a module by its Parameters, or by weights known only to their class.
    """
    if section.kind == "module":
        has_parameters = any(
            getattr(value, "is_parameter", True)  # values that are no tensors belong to a model
            for value in section.node.values()
        )
        return has_parameters or bool(section.apart)  # weights known only to their class
    metadata = isinstance(section.node, OrderedMap) and section.node.metadata
    return bool(metadata) or (_has_weight_key(section) and not _is_table(section.node))


def _has_weight_key(section: Section) -> bool:
    """Return True if its key or a key in it shows that it contains weights."""
    names = (name for name, value in section.node.items() if isinstance(value, TensorRef))
    return bool(_MODEL_KEY.search(section.name)) or any(
        "." in name or name in ("weight", "bias") for name in names
    )


def _is_table(mapping: dict[Any, Any]) -> bool:
    """Return True if all of its tensors are integers: indices, lengths, codes."""
    tensors = (tensor for tensor in mapping.values() if isinstance(tensor, TensorRef))
    return all(_INTEGER_DTYPE.fullmatch(tensor.dtype) for tensor in tensors)


def _is_mere_data(root: Any, section: Section) -> bool:
    """Return True if a dict below the root has no sign of weights.

    Then it has only integers, or is in an object of another library or in a list.
    """
    if section.kind != "state_dict" or not section.path:
        return False
    if _is_clearly_model(section) or _has_weight_key(section):
        return False
    is_in_list = not isinstance(section.path[-1], str)
    return is_in_list or _is_table(section.node) or _is_inside(root, section)


def _is_inside(root: Any, section: Section) -> bool:
    """Return True if the section is inside an object that is no dict, list or tuple."""
    node = root
    for key in section.path:
        if not isinstance(node, (dict, list, tuple)):
            return True
        node = node[key]
    return False


def list_wrappable_keys(mapping: dict[Any, Any]) -> list[str]:
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


def get_named_tensors(mapping: dict[Any, Any]) -> dict[str, TensorRef]:
    """Return the entries of a mapping that are tensors with a text key."""
    items = mapping.items()
    return {
        key: value for key, value in items if isinstance(key, str) and isinstance(value, TensorRef)
    }


def list_value_keys(mapping: dict[Any, Any]) -> list[Any]:
    """Return the keys of a state dict that do not belong to a model."""
    model_keys = frozenset(list_wrappable_keys(mapping))
    return [
        key
        for key, value in mapping.items()
        if key not in model_keys and not isinstance(value, TensorRef)
    ]


def list_optimizer_names(optimizer: dict[Any, Any]) -> list[str]:
    """Return the parameter names in an optimizer's state dict, each once; empty for numbers.

    They are keys of `state`, items of a group's `params`, or of its `param_names`.
    """
    names = dict.fromkeys(name for name in optimizer["state"] if isinstance(name, str))
    for group in optimizer["param_groups"]:
        for key in ("params", "param_names"):
            values = group.get(key)
            if isinstance(values, (list, tuple)):
                names.update(dict.fromkeys(name for name in values if isinstance(name, str)))
    return list(names)


def find_model_state_dict(checkpoint: Checkpoint, key: Any = None) -> Section:
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
        models = _find_models(checkpoint.root)
        if not models and (weights := _find_root_weights(checkpoint.root)):
            return Section((), "state_dict", weights, weights)
        return _require_one(checkpoint, models, where)
    path, node = resolve(
        checkpoint,
        key,
        lambda candidate: (
            isinstance(candidate, (list, tuple))
            or is_module(candidate)
            or _mapping_of(candidate) is not None
        ),
    )
    section = _classify(path, node, {})
    if section is not None and section.kind in MODEL_KINDS:
        return section
    # A section of another kind, for example an optimizer, has no models below it.
    models_below = [] if section is not None else _find_models(node, path)
    mapping = _mapping_of(node)
    if not models_below and mapping is not None and is_flat(mapping):
        return Section(path, "state_dict", mapping, node)
    return _require_one(checkpoint, models_below, repr(printable(name_of(path))))


def is_flat(node: Any) -> bool:
    """Return True for a dict with direct tensors, and none deeper."""
    return isinstance(node, dict) and _has_flat_tensors(node.values())


def _has_flat_tensors(values: Collection[Any]) -> bool:
    """Return True if some values are tensors, and the others contain none."""
    others = [value for value in values if not isinstance(value, TensorRef)]
    return len(others) < len(values) and not any(map(has_tensors, others))


def _find_root_weights(root: Any) -> dict[Any, Any]:
    """Return the tensors directly in the root as a state dict, or an empty dict if they are none.

    A root of only tensors is one, even of random states: the caller asked for a state dict. Next to
    other entries, a tensor that is not a scalar must have a dotted key.
    """
    if not isinstance(root, dict) or not all(isinstance(key, str) for key in root):
        return {}
    tensors = get_named_tensors(root)
    if len(tensors) == len(root):
        return root
    has_dotted_key = any("." in name and tensor.shape for name, tensor in tensors.items())
    return OrderedMap(tensors) if has_dotted_key and not is_flat_optimizer(root) else {}


def _find_models(root: Any, path: Path = ()) -> list[Section]:
    """Return the state dicts and modules below a node, each once, that may be the model.

    If any is recognizably a model, the others are left out. If only one of these has a key of
    weights, and it is a usual one (`model` next to `fisher`), it is the model. Averages (`ema`) are
    never taken for the model, so they leave the others in.
    """
    models: dict[int, Section] = {}
    for section in find_sections(root):
        if section.kind in MODEL_KINDS:
            model = Section(path + section.path, section.kind, section.node, section.holder)
            models.setdefault(id(section.holder), model)
    likely = list(filter(_is_clearly_model, models.values()))
    with_weight_key = [candidate for candidate in likely if _MODEL_KEY.search(candidate.name)]
    if len(with_weight_key) == 1:
        model_path = with_weight_key[0].path
        if model_path and _MODEL_NAME.fullmatch(str(model_path[-1])):
            return with_weight_key
    are_averages = all("ema" in candidate.name.lower() for candidate in likely)
    return list(models.values()) if are_averages else likely


def _require_one(checkpoint: Checkpoint, sections: list[Section], where: str) -> Section:
    """Return the only section, or the one marked as the model; else raise an error with a list."""
    chosen = choose_only_model(sections)
    if chosen is not None:
        return chosen
    file = checkpoint.path or None
    if sections:
        first, *others = (Remedy((("key", section.name),)) for section in sections[:_MOST_LISTED])
        raise AmbiguousName(
            f"{where} has {len(sections)} state dicts: "
            f"{listed(map(_describe_with_count, sections))}",
            file=file,
            hint=first._replace(lead="choose one with ", instead=tuple(others)),
        )
    raise NotFound(
        f"{where} has no state dict of a model; it has {listed(describe_sections(checkpoint))}",
        file=file,
        hint=f"ckptool info {shell(file)}" if file else None,
    )


def is_marked_as_model(section: Section) -> bool:
    """Return True if `ckptool.save` marked it as the model's."""
    marked = isinstance(section.node, OrderedMap) and MODEL_MARK in section.node.attributes
    return marked and section.path[-1:] == ("state_dict",)


def read_noted_owners(section: Section) -> dict[Any, Any]:
    """Return the keys of optimizers noted by `ckptool.save`, each with that of its model."""
    if not isinstance(section.node, OrderedMap) or not is_marked_as_model(section):
        return {}
    owners = section.node.attributes[MODEL_MARK]
    return owners if isinstance(owners, dict) else {}


def _describe_with_count(section: Section) -> str:
    """Return the name of a section with its number of tensors."""
    return f"{section.name or 'the root'} ({counted(len(section.tensors()), 'tensor')})"


def describe_sections(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield descriptions of the sections, and of the first keys outside any section."""
    for section in checkpoint.sections:
        if section.kind == "values":
            paths = [path for path in section.node if path] or [()]  # a value at the root
            yield from dict.fromkeys(name_of(path[:1]) or "a lone value" for path in paths)
        else:
            yield f"the {section.kind} {section.name or 'at the root'}"
