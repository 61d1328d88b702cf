"""The target of a load: the keys of a model, its live tensors, and its own loading code."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptool.core.names import WRAPPERS
from ckptool.core.sections import is_extra_state
from ckptool.errors import UsageError
from ckptool.loading.ranks import (
    describe_fsdp_state,
    list_fsdp_modules,
    list_own_tensors,
    remove_hidden_parts,
)
from ckptool.matching import EXTRA, Slot, Slots
from ckptool.matching.layouts import Kinds, find_kinds
from ckptool.tensors import require_torch
from ckptool.tensors.live import dtype_name, shape_of

if TYPE_CHECKING:
    import torch

REFERENCE = "the reference"
"""The label of a target without a name, for messages."""
_HINT_LIKE = "give a model, a state dict, a dict of shapes, a list of keys, or a path"


class ModelTarget(NamedTuple):
    """A model to fill, or a description of one."""

    label: str
    """The class of the model inside all wrappers, or the path of a reference, for messages."""
    slots: Slots
    entries: Mapping[str, torch.Tensor] = MappingProxyType({})
    """The live parameters and buffers by key, without extra states and FSDP shards."""
    metadata: Mapping[str, Any] | None = None
    """The `_metadata` of the model's own state dict."""
    custom: Mapping[str, str] = MappingProxyType({})
    """Paths of modules with loading code that is not torch's, each with its class."""
    unrespelled_paths: Collection[str] = ()
    """The paths in `custom`, and others below which no key has an older spelling."""
    kinds: Callable[[], Kinds] = dict
    """A function that returns the kinds of parameters by module type; empty if unknown."""

    def find_custom_holder(self, name: str) -> str | None:
        """Return the class of the innermost custom module that contains a key, or None."""
        while name:
            name = name.rpartition(".")[0]
            if name in self.custom:
                return self.custom[name]
        return None


def describe_target(model: torch.nn.Module) -> ModelTarget:
    """Return the target of `model`, with the keys of its `state_dict`; no tensor data is read.

    Parameters and buffers that the model's own `state_dict` leaves out are included, because torch
    expects them on loading. A model inside FSDP 1 is not gathered: the keys are those of its full
    state dict.
    """
    metadata: Mapping[str, Any] | None
    if list_fsdp_modules(model):
        # Parameters inside flat parameters, and extra states, are slots. The rest is live tensors:
        # those of type `Parameter` are seen as parameters, all others are buffers.
        fsdp_state, metadata = describe_fsdp_state(model)
        live = {name: value for name, value in fsdp_state.items() if not isinstance(value, Slot)}
        slots = {**fsdp_state, **make_live_slots(live, default_kind="buffer")}
    else:
        state = read_state_dict(model)
        metadata = getattr(state, "_metadata", None)
        live = {**state, **_find_unlisted_tensors(model, state)}
        slots = make_live_slots(live, parameters=model.parameters(), default_kind="buffer")
    # Keys in modules with their own loading code are passed on as they are, so none is respelled,
    # such as `weight_g` as `parametrizations.weight.original0`.
    custom = find_custom_modules(model)
    modules = [
        (remove_hidden_parts(path), module)
        for path, module in model.named_modules(remove_duplicate=False)
    ]
    return ModelTarget(
        label=type(_unwrap(model)).__name__,
        slots=slots,
        entries=_filter_tensors(live),
        metadata=metadata,
        custom=custom,
        unrespelled_paths=(*custom, *_find_unrespelled_paths(modules)),
        kinds=partial(find_kinds, modules),
    )


def _find_unlisted_tensors(
    model: torch.nn.Module, state: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the tensors that `state`, the model's own state dict, leaves out, by their key."""
    unlisted = {}
    for path, module in model.named_modules(remove_duplicate=False):
        bare_path = remove_hidden_parts(path)
        for name, tensor in list_own_tensors(module).items():
            key, key_with_wrappers = (
                f"{parent}.{name}".lstrip(".") for parent in (bare_path, path)
            )
            if key not in state and key_with_wrappers not in state:
                unlisted[key] = tensor
    return unlisted


def _find_unrespelled_paths(modules: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[str]:
    """Yield the paths of parametrizations with keys that have no older spelling.

    Only a single weight norm or spectral norm of torch has one: before parametrizations, it saved
    `weight_g` and `weight_v`, or `weight_orig`.
    """
    from torch.nn.utils import parametrizations
    from torch.nn.utils.parametrize import ParametrizationList

    norms = (parametrizations._WeightNorm, parametrizations._SpectralNorm)
    for path, module in modules:
        parts = list(module) if isinstance(module, ParametrizationList) else ()
        if len(parts) > 1 or (parts and not isinstance(parts[0], norms)):
            yield path


def _unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside all wrappers: modules with one child that has a wrapper's name."""
    while True:
        children = [(name, child) for name, child in model._modules.items() if child is not None]
        match children:
            case [(name, child)] if name in WRAPPERS and not model._parameters:
                model = child
            case _:
                return model


def read_state_dict(model: torch.nn.Module) -> Mapping[str, Any]:
    """Return the state dict of live tensors, or of detached ones if an override requires it."""
    try:
        state: Mapping[str, Any] = model.state_dict(keep_vars=True)
    except TypeError:
        state = model.state_dict()
    return state


def make_live_slots(
    values: Mapping[str, Any],
    *,
    parameters: Iterable[torch.Tensor] = (),
    default_kind: str = "tensor",
) -> Slots:
    """Return a slot for each entry; an `_extra_state` or another non-tensor is `extra`.

    A `Parameter`, or a tensor with the elements of one in `parameters`, is a parameter;
    `default_kind` is the kind of the other tensors. Tensors with the same elements are tied.
    """
    import torch

    tensors = _filter_tensors(values)
    identity_by_key = {key: _identify(tensor) for key, tensor in tensors.items()}
    counts = Counter(identity_by_key.values())
    # The type comes first, because `isinstance` with Parameter is slow for a plain tensor.
    subclass_tensors = {
        key: tensor for key, tensor in tensors.items() if type(tensor) is not torch.Tensor
    }
    parameter_identities = {
        identity_by_key[key]
        for key, tensor in subclass_tensors.items()
        if isinstance(tensor, torch.nn.Parameter)
    }
    identified = set(map(id, subclass_tensors.values()))  # most of `parameters` are among these
    parameter_identities.update(
        _identify(tensor) for tensor in parameters if id(tensor) not in identified
    )
    slots: Slots = dict.fromkeys(values, EXTRA)
    for key, tensor in tensors.items():
        identity = identity_by_key[key]
        kind = "parameter" if identity in parameter_identities else default_kind
        tie = identity if counts[identity] > 1 else None
        slots[key] = Slot(shape_of(tensor), dtype_name(tensor), kind, tie)
    return slots


def _filter_tensors(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the entries that are tensors, without extra states."""
    import torch

    return {
        name: value
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and not is_extra_state(name)
    }


def _identify(tensor: torch.Tensor) -> Hashable:
    """Return a value that is equal for tensors that are the same elements in memory."""
    try:
        # Without an address (on the meta device, or empty), the storage object counts.
        start = tensor.data_ptr() or tensor.untyped_storage()._cdata
        flags = tensor.is_conj(), tensor.is_neg()
        return start, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, flags
    except (RuntimeError, ValueError):  # it has no storage (yet)
        return id(tensor)


# names or shapes in place of a model


def parse_description(like: Any) -> ModelTarget | None:
    """Return the target of a list of keys or a dict of shapes; None for any other mapping.

    Raises:
        UsageError: if `like` is something else.
    """
    import torch

    if isinstance(like, Mapping) and not _are_shapes(like.values()):
        return None
    if not isinstance(like, Iterable) or isinstance(like, (bytes, torch.Tensor)):
        raise UsageError(
            f"like is a {type(like).__name__}, expected a model or a description of one",
            hint=_HINT_LIKE,
        )
    names = list(like)
    for name in names:
        if not isinstance(name, str):
            raise UsageError(
                f"keys are strings, but one is a {type(name).__name__}", hint=_HINT_LIKE
            )
    if not isinstance(like, Mapping):
        return ModelTarget(REFERENCE, dict.fromkeys(names, Slot()))
    slots = {name: EXTRA if is_extra_state(name) else Slot(tuple(like[name])) for name in names}
    return ModelTarget(REFERENCE, slots)


def _are_shapes(values: Iterable[Any]) -> bool:
    """Return True if all values are lists or tuples of sizes."""
    shapes = list(values)
    if not all(isinstance(shape, (tuple, list)) for shape in shapes):
        return False
    sizes = list(chain.from_iterable(shapes))
    # A bool is an int, but no size.
    return {int}.issuperset(map(type, sizes)) and min(sizes, default=0) >= 0


# the code that runs when the model is loaded

_TORCH_MODULES = ("torch.nn.", "torch.distributed.")
"""Modules with hooks and loading code that only change keys in ways that matching knows."""
_KEY_RENAMING_MODULES = frozenset(
    {
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "torch.nn.utils.parametrizations",
    }
)
"""Torch modules with hooks that only change keys."""


def overrides_load(model: torch.nn.Module) -> bool:
    """Return True if the model overrides `load_state_dict`."""
    import torch

    own = type(model).load_state_dict
    return own is not torch.nn.Module.load_state_dict or "load_state_dict" in vars(model)


def find_custom_modules(model: torch.nn.Module) -> dict[str, str]:
    """Return the paths of modules with loading code that is not torch's, each with its class.

    This code may load other keys than those of the module, or fewer. An own `load_state_dict` only
    counts in the root, because torch does not call it for the modules inside.
    """
    class_by_path = {}
    for path, module in model.named_modules(remove_duplicate=False):
        functions = (_load_method(module), *map(_unwrap_hook, _list_load_hooks(module)))
        is_foreign = any(
            not _module_of(function).startswith(_TORCH_MODULES) for function in functions
        )
        if is_foreign or (not path and overrides_load(module)):
            class_by_path[remove_hidden_parts(path)] = type(module).__name__
    return class_by_path


def loads_by_name(model: torch.nn.Module, optimizers: Iterable[Any] = ()) -> bool:
    """Return True if torch only copies tensors by key when it loads this model.

    No module has a hook, loading code or an extra state, and none of `optimizers` has code of its
    own that could access the model.
    """
    import torch

    # torch may also exchange tensors instead of copying: the older versions have no such option.
    swaps = getattr(torch.__future__, "get_swap_module_params_on_conversion", bool)()
    if swaps or overrides_load(model) or any(map(runs_foreign_code, optimizers)):
        return False
    return all(map(_is_loaded_by_name, model.modules()))


def _is_loaded_by_name(module: torch.nn.Module) -> bool:
    """Return True if torch only copies tensors by key to the own tensors of a module."""
    import torch

    # Normalizations override the method only for a counter that old files lack: matching knows it.
    copying_classes = (torch.nn.Module, torch.nn.BatchNorm1d, torch.nn.InstanceNorm1d)
    copying_methods = {kind._load_from_state_dict for kind in copying_classes}
    if _load_method(module) not in copying_methods or isinstance(module, torch.jit.ScriptModule):
        return False
    kind: Any = type(module)
    if kind.set_extra_state is not torch.nn.Module.set_extra_state:
        return False
    if "set_extra_state" in vars(module):
        return False
    if not _module_of(kind.__setattr__).startswith("torch."):  # torch assigns tensors with it
        return False
    hooks = map(_unwrap_hook, _list_load_hooks(module))
    return all(_module_of(hook) in _KEY_RENAMING_MODULES for hook in hooks)


def runs_foreign_code(optimizer: Any) -> bool:
    """Return True if loading an optimizer runs code that is not torch's."""
    hooks = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    if any(vars(optimizer).get(name) for name in (*hooks, "load_state_dict")):  # of the object
        return True
    methods = (getattr(type(optimizer), name, None) for name in ("load_state_dict", "__setstate__"))
    return not all(_module_of(method).startswith("torch.") for method in methods)


def _load_method(module: torch.nn.Module) -> Any:
    """Return the `_load_from_state_dict` of a module."""
    return vars(module).get("_load_from_state_dict", type(module)._load_from_state_dict)


def _list_load_hooks(module: torch.nn.Module) -> Iterable[Any]:
    """Return the hooks of a module that run when it is loaded."""
    before, after = module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks
    return (*before.values(), *after.values())


def _unwrap_hook(hook: Any) -> Any:
    """Return the function inside a hook: torch wraps hooks that receive the module."""
    hook = getattr(hook, "hook", hook)
    return hook.func if isinstance(hook, partial) else hook


def _module_of(code: Any) -> str:
    """Return the name of the module that defines a function."""
    return str(getattr(code, "__module__", ""))


def on_meta(make: Callable[[], Any]) -> Any:
    """Return the result of `make` on the meta device, or None if that fails for any reason."""
    require_torch()
    import torch

    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about weights copied to the meta device
            return make()
    except KeyboardInterrupt:
        raise
    except BaseException:  # user code may raise anything
        return None
