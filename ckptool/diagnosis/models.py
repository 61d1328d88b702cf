"""Complaints about state dicts: their level, their keys, and values among the tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from ckptool.core.finding import Severity
from ckptool.core.model import Opaque, OrderedMap, TensorRef, find_tensors
from ckptool.core.modules import to_model_state
from ckptool.core.names import (
    N_AVERAGED,
    PEFT,
    find_common_wrapper,
    is_wrappable,
    split_partly_wrapped,
    strip_names,
)
from ckptool.core.sections import Section, get_named_tensors, list_value_keys, list_wrappable_keys
from ckptool.core.tree import name_of, walk_everything
from ckptool.diagnosis.complaint import (
    Choice,
    Complaint,
    Subject,
    map_to_bare_keys,
    summarize_names,
)
from ckptool.errors import NameCollision
from ckptool.formats import load_format
from ckptool.inspection.blockers import detect_missing_weights, find_called_names, suggest_import
from ckptool.inspection.commands import ema_command
from ckptool.inspection.scan_calls import is_data_constructor
from ckptool.matching.align import escape_regex, escape_replacement, find_wrapped_submodules
from ckptool.matching.known_renames import ADAPTER, NAMED_ADAPTER
from ckptool.quotes import Quote, quote
from ckptool.symbolic.encoder import find_blocked_names
from ckptool.transforms import Flatten, Plain, Rename, Strip, Take
from ckptool.transforms.ema import AVERAGED, find_average_prefix, has_online_model
from ckptool.transforms.plain import find_rejected, get_class_name
from ckptool.words import counted, listed, printable, shell

INTEGER_BUFFERS = frozenset(
    {
        "num_batches_tracked",
        "n_averaged",
        "position_ids",
        "token_type_ids",
        "relative_position_index",
    }
)
"""Last components of keys of buffers that count or index."""
_BASE_LAYER = ".base_layer."
_LIGHTNING_VERSION_KEY = "pytorch-lightning_version"
_MAX_WRAPPED_SUBMODULES = 50
"""The most submodules from which wrapper prefixes are removed, by one rule each."""
_COMMON_PACKAGES = ("torch", "builtins", "collections", "numpy")
"""Packages that are installed wherever a file is loaded."""
_RANDOM_STATE_DTYPES = frozenset({"uint8", "uint32"})
"""Dtypes of the random generator states of torch and numpy."""
_BLOCKED_MODULES = ("sys", "os", "posix", "nt")
"""Modules with a different error in torch (torch/_weights_only_unpickler.py)."""
_CALL_ON_UNWRAPPED = "load_state_dict on the unwrapped model"
"""The call with the quoted error of complaints about wrapper prefixes."""
_SHARDED_CLASSES = ("DTensor", "ShardedTensor")


def is_floating(dtype: str) -> bool:
    """Return True for a floating-point or complex dtype."""
    return "float" in dtype or "complex" in dtype


def check_level(subject: Subject) -> Iterator[Complaint]:
    """Yield complaints about the level of the state dict, and about entries that are no weights.

    Without a model to load: one complaint about several models, or about none.
    """
    model = subject.model
    if model is None:
        if subject.models:
            yield _complain_of_several_models(subject)
        elif detect_missing_weights(subject.checkpoint) is None:
            yield _complain_of_no_model(subject)
        return
    if model.path:
        yield _complain_of_level(subject, model)
    value_names = [str(name) for name in list_value_keys(model.node)]
    if value_names and model.kind == "state_dict":
        yield Complaint(
            "values-inside",
            f"the state dict has plain values among its tensors: {listed(value_names)}",
            summarize_names(value_names),
            hint="ckptool.load_state_dict and a safetensors file leave them out",
            quote=quote("unexpected-key", printable(value_names[0])),
            fix=(Take(model_only=True),),
        )
    bare_keys = map_to_bare_keys(model)
    # The comparison with a reference reports the counter if the model does not have it.
    if N_AVERAGED in bare_keys and len(bare_keys) > 1 and not subject.is_compared(model):
        yield Complaint(
            "averaged",
            f"the state dict is of an AveragedModel (it has {N_AVERAGED})",
            (N_AVERAGED,),
            quote=quote("unexpected-key", N_AVERAGED),
            effect='an AveragedModel loads it, with "module." in front of the keys',
            fix=(Take(exclude=(name_of((*model.path, N_AVERAGED)),)),),
        )


def _complain_of_level(subject: Subject, model: Section) -> Complaint:
    """Return the complaint about weights under a key: a note in a training checkpoint.

    It quotes the error for loading the root as a state dict.
    """
    root = subject.checkpoint.root
    root_keys = [str(key) for key in root] if isinstance(root, dict) else []
    is_training = subject.is_training
    return Complaint(
        "level",
        f'the weights are under the key "{printable(model.name)}"'
        + (", next to the training state" if is_training else ""),
        (printable(model.name),),
        hint=f"in code: torch.load(FILE){_format_subscripts(model)}",
        severity="note" if is_training else "fails",
        quote=quote("unexpected-key", printable(root_keys[0])) if root_keys else quote("no-dict"),
        fix=(Take(subject.key, model_only=True),),
    )


def _format_subscripts(section: Section) -> str:
    """Return the Python subscripts of a section: `['model'][0]`."""
    return printable("".join(f"[{key!r}]" for key in section.path))


def _complain_of_several_models(subject: Subject) -> Complaint:
    """Return the complaint about several state dicts, with a choice for each."""
    named_sections = [section for section in subject.models if section.name]
    join_choice = (Choice((Flatten(),)),) if _are_parts_of_one(subject) else ()
    descriptions = [
        f"{section.name or 'the root'} ({counted(len(section.tensors()), 'tensor')})"
        for section in subject.models
    ]
    choices = (
        Choice((Take(section.name, model_only=True),), word=_make_file_word(section))
        for section in named_sections
    )
    return Complaint(
        "several-models",
        f"it has {len(descriptions)} state dicts"
        + (
            " that share no key: load one of them, or all as one"
            if join_choice
            else ": choose one to load"
        ),
        summarize_names(descriptions, max_count=20),
        hint=f"ckptool doctor FILE --key {shell(named_sections[0].name)}"
        if named_sections
        else None,
        # A training checkpoint is loaded by its script, which knows its parts.
        severity="note" if subject.is_training else "fails",
        quote=quote("missing"),
        choices=(*join_choice, *choices),
    )


def _are_parts_of_one(subject: Subject) -> bool:
    """Return True if the file has only state dicts, which share no key.

    Some libraries read these together, from a dict of dicts or from flat keys: for example
    diffusers `image_proj.` and `ip_adapter.` of an IP-Adapter.
    """
    root = subject.checkpoint.root
    keys = [key for section in subject.models for key in section.node]
    paths = [section.path for section in subject.models]
    has_only_models = isinstance(root, dict) and paths == [(key,) for key in root]
    return has_only_models and len(keys) == len({*keys})


def _make_file_word(section: Section) -> str:
    """Return the name of a section as part of a file name."""
    return re.sub(r"[^\w-]+", "-", section.name, flags=re.ASCII).strip("-")[:40] or "extracted"


def _complain_of_no_model(subject: Subject) -> Complaint:
    """Return the complaint about a file without a model.

    It is a note if the file is not meant to have one: training state, settings, one tensor.
    """
    root, sections = subject.checkpoint.root, subject.checkpoint.sections
    load_error = quote("missing" if isinstance(root, dict) else "no-dict")
    if subject.companion is not None:
        return Complaint(
            "no-model",
            subject.companion.what,
            hint=f"{subject.companion.reader} reads it",
            severity="note",
            quote=load_error,
        )
    section_names = [f"the {section.kind} {section.name or 'at the root'}" for section in sections]
    # Neither plain values nor a state dict that is no model explain what the file is for.
    shown_names = [
        name for name in section_names if not name.startswith(("the values", "the state_dict"))
    ]
    tensors = list(find_tensors(root))
    states = [section for section in sections if section.kind in ("optimizer", "scheduler")]
    states.sort(key=lambda section: section.kind)  # the optimizer first
    has_only_random_states = all(
        tensor.dtype in _RANDOM_STATE_DTYPES and len(tensor.shape) == 1 for tensor in tensors
    )
    is_value = not isinstance(root, (dict, Opaque))  # one tensor, a list, ...
    is_harmless = bool(states) or is_value or has_only_random_states
    hint = ""
    if states:
        call = f"torch.load(FILE){_format_subscripts(states[0])}"
        hint = f"{states[0].kind}.load_state_dict({call}) loads it"
    elif not is_harmless:
        hint = "use the file that has the weights"
    elif subject.blocked:
        hint = _hint_for_unpickling(subject)
    return Complaint(
        "no-model",
        "it has no state dict of a model; it has "
        + (listed(shown_names, most=4) if shown_names else _describe_root(root, len(tensors))),
        summarize_names(section_names),
        hint=hint,
        severity="note" if is_harmless else "fails",
        quote=load_error,
    )


def _hint_for_unpickling(subject: Subject) -> str:
    """Return the call that loads a file with its objects, or the calls that this would make."""
    called = [
        name for name in find_called_names(subject.checkpoint) if not is_data_constructor(name)
    ]
    if called:
        return f"unpickling the file calls {listed(called, most=5)}"
    loader = load_format(subject.checkpoint.format).unsafe_loader
    return f"{loader} loads it, if you trust its author"


def _describe_root(root: Any, tensor_count: int) -> str:
    """Describe a file without sections: `a dict of 3 entries with 2 tensors`."""
    if isinstance(root, TensorRef):
        return "one tensor"
    if isinstance(root, (dict, list, tuple)):
        kind = "dict" if isinstance(root, dict) else type(root).__name__
        return f"a {kind} of {counted(len(root), 'entry')} with {counted(tensor_count, 'tensor')}"
    if isinstance(root, Opaque):
        return f"an object of class {printable(get_class_name(root))}"
    return f"a value of type {type(root).__name__}"


def check_objects(subject: Subject) -> Iterator[Complaint]:
    """Yield complaints about objects that `torch.load` rejects, or that need their classes.

    Pickled models, other objects, models with weights that only their class reads, and numpy 2.
    """
    rejected = list(find_rejected(subject.checkpoint.root))
    modules = [(name_of(path), node) for path, node in rejected if to_model_state(node) is not None]
    module_ids = {id(node) for _, node in modules}
    other_objects = [
        (name_of(path), get_class_name(node))
        for path, node in rejected
        if id(node) not in module_ids
    ]
    if modules:
        yield _make_module_complaint(subject, modules)
    if other_objects or (subject.blocked and not modules):
        # Without an object in the tree, the names that keep the file from loading are listed.
        classes = dict.fromkeys([kind for _, kind in other_objects] or subject.blocked)
        yield Complaint(
            "objects",
            f"it contains objects that weights_only=True rejects: {listed(classes)}",
            summarize_names(
                (f"{name or 'the root'} ({kind})" for name, kind in other_objects), max_count=20
            ),
            hint=_hint_for_objects(classes),
            quote=_quote_first_rejection(subject),
            effect="weights_only=False, which it proposes, runs any code in the file",
            fix=(Plain(),),
        )
    yield from _check_unread_weights(subject)
    globals_of_numpy_2 = [
        name for name in subject.checkpoint.details.globals if name.startswith("numpy._core.")
    ]
    if globals_of_numpy_2:
        yield Complaint(
            "numpy",
            f"it contains numpy 2 pickles ({listed(globals_of_numpy_2)})",
            severity="note",
            quote=quote("numpy"),
            fix=(Plain(),),
        )


def _quote_first_rejection(subject: Subject) -> Quote:
    """Return the error of `torch.load` about the first class or function that it rejects."""
    rejected_globals = find_blocked_names(subject.checkpoint.details.globals)
    first = next(iter(rejected_globals), None) or next(iter(subject.blocked), "")
    module, _, _ = first.partition(".")
    kind = "blocked-global" if module in _BLOCKED_MODULES else "global"  # two messages of torch
    return quote(kind, printable(first))


def _make_module_complaint(subject: Subject, modules: list[tuple[str, Any]]) -> Complaint:
    """Return the complaint about pickled models, given with their names."""
    classes = dict.fromkeys(get_class_name(node) for _, node in modules)
    custom_class = next(
        (
            name
            for name in (*classes, *subject.blocked)
            if name.partition(".")[0] not in _COMMON_PACKAGES
        ),
        None,
    )
    is_model = subject.model is not None and subject.model.kind == "module"
    return Complaint(
        "module",
        f"it contains a pickled model ({listed(classes)}), not a state dict",
        summarize_names(name or "the root" for name, _ in modules),
        quote=_quote_first_rejection(subject),
        effect=f"other tools cannot load it without the class {printable(custom_class)}"
        if custom_class
        else "",
        fix=(Take(model_only=True),) if is_model else (Plain(),),
    )


def _check_unread_weights(subject: Subject) -> Iterator[Complaint]:
    """Yield a complaint about weights of a pickled model that only its class reads."""
    texts = [text for section in subject.models for text in section.unread]
    if texts:
        # No hint may advise to load a file that runs code of its own.
        runs_code = bool(find_called_names(subject.checkpoint))
        yield Complaint(
            "unread",
            "a state dict made from the pickled model would lack weights",
            summarize_names(texts),
            hint="save model.state_dict() in the process that has the model"
            if runs_code
            else f"{load_format(subject.checkpoint.format).unsafe_loader} with its classes "
            "installed, and save model.state_dict()",
            severity="misleads",
            quote=quote("missing"),
            effect="a class with its own __getstate__ stores them in a form that only it reads",
        )


def _hint_for_objects(classes: Iterable[str]) -> str:
    """Return the hint for objects that no command turns into plain data."""
    if any(kind.rpartition(".")[2] in _SHARDED_CLASSES for kind in classes):
        return "gather the full tensors in the training job, and save those"
    return suggest_import(classes)


def check_keys(subject: Subject) -> Iterator[Complaint]:
    """Yield complaints about keys of state dicts that are not compared with a reference."""
    models = [section for section in subject.models if not subject.is_compared(section)]
    for section in models:
        yield from _check_averages(subject, section)
    yield from _check_wrappers([section for section in models if section.wrappers])
    yield from _check_wrapped_submodules(models)
    for section in models:
        wrapped, unwrapped_keys = split_partly_wrapped(map_to_bare_keys(section).values())
        if wrapped:
            yield Complaint(
                "wrapped-in-part",
                f"{counted(len(wrapped), 'key')} {'starts' if len(wrapped) == 1 else 'start'} with "
                f'"module.", but {printable(unwrapped_keys[0])} does not',
                summarize_names(wrapped),
                hint="if it is a wrapper: ckptool rename FILE --prefix module.=",
                severity="note",
                effect="strip-module keeps it, because it may be the name of a layer.",
            )
        yield from _check_adapters(section)
    yield from _check_lightning(subject)


def _check_wrappers(sections: list[Section]) -> Iterator[Complaint]:
    """Yield a complaint about the wrapper prefixes of these sections."""
    if not sections:
        return
    wrappers = dict.fromkeys(word for section in sections for word in section.wrappers)
    wrapped_keys = [
        key
        for section in sections
        for key in list_wrappable_keys(section.node)
        if is_wrappable(key)
    ]
    section_names = dict.fromkeys(section.name for section in sections if section.name)
    suffix = f" in {listed(section_names)}" if section_names else ""
    common_prefixes = {
        find_common_wrapper(
            {key: bare for key, bare in map_to_bare_keys(section).items() if is_wrappable(key)}
        )
        for section in sections
    }
    prefix = common_prefixes.pop() if len(common_prefixes) == 1 else ""
    text = f'every key{suffix} starts with "{prefix}"'
    if not prefix:
        prefixes = listed(f'"{word}."' for word in wrappers)
        text = f"keys{suffix} have the wrapper prefix{'es' if len(wrappers) > 1 else ''} {prefixes}"
    yield Complaint(
        "wrappers",
        text,
        summarize_names(wrapped_keys),
        hint=_describe_collision(sections),
        quote=quote("other-keys", printable(wrapped_keys[0]), call=_CALL_ON_UNWRAPPED),
        effect="with strict=False it loads nothing, without an error",
        fix=(Strip(),),
    )


def _describe_collision(sections: Iterable[Section]) -> str:
    """Return why the wrapper prefixes cannot be removed; "" if they can."""
    try:
        for section in sections:
            strip_names(list_wrappable_keys(section.node))
    except NameCollision as error:
        return f"{error.message}: load one of them (ckptool extract FILE --include NAME)"
    return ""


def _check_averages(subject: Subject, section: Section) -> Iterator[Complaint]:
    """Yield a complaint about averaged weights (EMA), with keys that start with `ema_model.`.

    If the weights that were averaged are there too, the averages are a choice instead of the fix.
    """
    keys = [*get_named_tensors(section.node)]
    prefix = find_average_prefix(keys)
    if not prefix:
        return
    average_keys = [key for key in keys if key.startswith(prefix)]
    other_keys = [key for key in keys if not key.startswith(prefix)]
    steps, has_only_averages = (Take(ema=True),), not has_online_model(keys)
    # `AVERAGED` is that of ema-pytorch, which gives the other copy a prefix too: no key is plain.
    always_fails = prefix == AVERAGED
    exception = f" except {listed(other_keys, most=3)}" if other_keys else ""
    yield Complaint(
        "averages",
        f'every key{exception} starts with "{prefix}": averaged weights (EMA)'
        if has_only_averages
        else f'{len(average_keys):,} of {len(keys):,} keys start with "{prefix}": averaged weights '
        "(EMA), next to those of the model",
        summarize_names(average_keys),
        hint=f"{ema_command(subject.checkpoint)} writes them under the keys of the model",
        severity="fails" if has_only_averages or always_fails else "note",
        quote=quote("unexpected-key", printable(average_keys[0])),
        effect="the class that computed the averages loads them",
        fix=steps if has_only_averages else None,
        choices=() if has_only_averages else (Choice(steps, "ema"),),
    )


def _check_wrapped_submodules(models: list[Section]) -> Iterator[Complaint]:
    """Yield a complaint about submodules that DataParallel wrapped."""
    names = [
        name
        for section in models
        for name in map_to_bare_keys(section).values()
        if not find_average_prefix([name])  # a copy of another submodule
    ]
    paths = find_wrapped_submodules(filter(is_wrappable, names))[:_MAX_WRAPPED_SUBMODULES]
    if not paths:
        return
    prefixes = tuple(f"{path}.module." for path in paths)
    affected = [name for name in names if name.startswith(prefixes)]
    rules = (rf"^{escape_regex(path)}\.module\.=>{escape_replacement(path)}." for path in paths)
    # `Strip(at=...)` takes one path, in keys without a wrapper prefix of the whole model.
    can_strip = len(paths) == 1 and not any(section.wrappers for section in models)
    yield Complaint(
        "submodule-wrapper",
        f'every key below {listed(map(printable, paths), most=3)} starts with "module.": '
        "DataParallel wrapped part of the model",
        summarize_names(affected),
        quote=quote("unexpected-key", printable(affected[0]), call=_CALL_ON_UNWRAPPED),
        effect="a model with a layer of that name loads it (check with --like REFERENCE)",
        fix=(Strip(at=paths[0]) if can_strip else Rename(tuple(rules)),),
    )


def _check_adapters(section: Section) -> Iterator[Complaint]:
    """Yield complaints about the keys of PEFT: `base_model.model.`, `base_layer`, adapter names.

    A merged model only needs other keys. Adapters need a base model, unless the file has it too.
    """
    keys = [key for key in list_wrappable_keys(section.node) if is_wrappable(key)]
    peft_keys = [key for key in keys if key.startswith(PEFT)]
    adapter_by_key = {key: match[2] for key in keys if (match := NAMED_ADAPTER.search(key))}
    adapter_keys = [
        key
        for key in keys
        if key in adapter_by_key or (key.startswith(PEFT) and ADAPTER.search(key))
    ]
    base_layer_keys = [key for key in keys if _BASE_LAYER in key]
    if len(adapter_by_key) == len(keys) and len(adapters := {*adapter_by_key.values()}) == 1:
        yield _complain_of_adapter_name(adapters.pop(), [*adapter_by_key])
    if not peft_keys and not base_layer_keys:
        return
    # A PeftModel that was merged has its prefix on every key, and no adapter.
    is_merged = not adapter_keys and not base_layer_keys and len(peft_keys) == len(keys)
    has_only_adapters = len(adapter_keys) == len(keys)
    if is_merged:
        kind, hint = "a merged model", ""
    else:
        kind = "a model with its adapters"
        hint = (
            "ckptool merge-lora BASE FILE -o OUT merges it into its base model; "
            "PeftModel.from_pretrained loads it on top of the base model"
        )
        if has_only_adapters:
            kind = "adapters without their base model"
        elif adapter_keys and base_layer_keys:
            hint = (
                "ckptool merge-lora FILE -o OUT --alpha N merges them, where N is the lora_alpha; "
                "its PeftModel loads it as is"
            )
    shown_keys = base_layer_keys or adapter_keys or peft_keys
    yield Complaint(
        "adapter",
        f"it is a PEFT checkpoint: {kind}",
        summarize_names(shown_keys),
        hint=hint,
        severity="fails" if is_merged or base_layer_keys else "note",
        quote=quote("unexpected-key", printable(shown_keys[0])),
        effect="with strict=False no adapter is applied, without an error",
        fix=(Rename((f"^{escape_regex(PEFT)}=>",)),) if is_merged else None,
    )


def _complain_of_adapter_name(adapter: str, names: list[str]) -> Complaint:
    """Return the note about keys with an adapter name, which PEFT itself would not write.

    A choice is to remove it: `q.lora_A.default.weight` -> `q.lora_A.weight`.
    """
    rule = rf"\.{escape_regex(adapter)}(?=(\.weight|\.bias)?$)=>"
    return Complaint(
        "adapter-name",
        f'the keys contain the adapter name "{printable(adapter)}", as in the state dict of a '
        "PeftModel",
        summarize_names(names),
        severity="note",
        effect="The PeftModel loads them with strict=False; PeftModel.from_pretrained adds the "
        "name itself and finds none of these keys.",
        choices=(Choice((Rename((rule,)),)),),
    )


def _check_lightning(subject: Subject) -> Iterator[Complaint]:
    """Yield a note if every key starts with one attribute of a LightningModule.

    Nothing for other files, and for a model whose keys are compared with a reference.
    """
    root, model = subject.checkpoint.root, subject.model
    if not isinstance(root, dict) or _LIGHTNING_VERSION_KEY not in root or model is None:
        return
    names = list(map_to_bare_keys(model).values())
    attributes = {name.partition(".")[0] for name in names}
    if len(attributes) != 1 or not all("." in name for name in names) or subject.is_compared(model):
        return
    prefix = f"{attributes.pop()}."
    yield Complaint(
        "lightning",
        f'every key starts with "{printable(prefix)}", the attribute of the LightningModule that '
        "has the model",
        summarize_names(names),
        severity="note",
        quote=quote(
            "unexpected-key", printable(names[0]), call="load_state_dict on the inner model"
        ),
        effect="the LightningModule loads it",
        choices=(Choice((Rename((f"^{escape_regex(prefix)}=>",)),), "renamed"),),
    )


def check_versions(subject: Subject) -> Iterator[Complaint]:
    """Yield complaints about buffers that were cast to floating point, and lost `_metadata`.

    `_metadata` has the version of each module, by which torch reads older states. BatchNorm and
    quantized layers read a state without it wrongly.
    """
    for section in subject.models:
        tensors = get_named_tensors(section.node)
        cast_names = [
            name
            for name, tensor in tensors.items()
            if name.rpartition(".")[2] in INTEGER_BUFFERS and is_floating(tensor.dtype)
        ]
        if cast_names:
            dtypes = dict.fromkeys(tensors[name].dtype for name in cast_names)
            yield Complaint(
                "cast-buffers",
                f"counter and index buffers were cast to {', '.join(dtypes)}",
                summarize_names(cast_names),
                hint="in code: state[name] = state[name].long(); ckptool cast skips them",
                severity="misleads",
                effect="load_state_dict copies them into the model's integer buffers without an "
                "error: float16 counts to 2048, bfloat16 to 256, and fractions are cut off.",
            )
        if section.kind == "state_dict" and not _has_metadata(section.node):
            yield from _check_batch_norms(subject, tensors)
    packed_keys = list(_find_packed_keys(subject.checkpoint.root))
    if packed_keys:
        why = "a quantized layer reads the state as the oldest version"
        yield _complain_of_lost_metadata("fails", packed_keys, why, quote("packed"))


def _find_packed_keys(root: Any) -> Iterator[str]:
    """Yield the keys of packed parameters in dicts without `_metadata`.

    Every dict is searched, because one of packed parameters alone is not found as a state dict. In
    a pickled module the key has no dot.
    """
    for node in walk_everything(root):
        if isinstance(node, dict) and not _has_metadata(node):
            for key, value in node.items():
                is_packed = isinstance(key, str) and key.endswith("._packed_params")
                # A `_metadata` has such keys too, each with a dict that has the version.
                if is_packed and not isinstance(value, dict):
                    yield key


def _check_batch_norms(subject: Subject, tensors: dict[str, TensorRef]) -> Iterator[Complaint]:
    """Yield a complaint about BatchNorm layers in a state dict without `_metadata`.

    Without the version, BatchNorm does not report a missing `num_batches_tracked`; if no counter
    is missing, it is a note, and only for files that torch itself writes with `_metadata`.
    """
    mean_names = [name for name in tensors if name.rpartition(".")[2] == "running_mean"]
    counter = "num_batches_tracked"
    without_counter = [
        name
        for name in mean_names
        if f"{name.removesuffix('running_mean')}{counter}" not in tensors
    ]
    why = "BatchNorm reads the state as from torch before 0.4.1"
    if without_counter:
        yield _complain_of_lost_metadata(
            "misleads", without_counter, f"{why}: the model silently keeps its own counter"
        )
    elif mean_names and load_format(subject.checkpoint.format).by_torch:
        yield _complain_of_lost_metadata("note", mean_names, f"{why}, which here changes nothing")


def _has_metadata(node: Any) -> bool:
    """Return True if a state dict has its `_metadata`."""
    return isinstance(node, OrderedMap) and bool(node.metadata)


def _complain_of_lost_metadata(
    severity: Severity, names: Iterable[str], why: str, load_error: Quote | None = None
) -> Complaint:
    """Return the complaint about a state dict without `_metadata`, and why it matters."""
    return Complaint(
        "metadata",
        "the state dict lost its _metadata, the versions of its modules",
        summarize_names(names),
        hint="save model.state_dict() unchanged in the process that has the model",
        severity=severity,
        quote=load_error,
        effect=f"{{k: v for k, v in state.items()}} and safetensors drop it; {why}",
    )
