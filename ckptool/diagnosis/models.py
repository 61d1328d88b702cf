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
    names_of,
    unwrapped,
)
from ckptool.errors import NameCollision
from ckptool.formats import load_format
from ckptool.inspection.blockers import calls, missing_weights, needed_import
from ckptool.inspection.commands import ema_command
from ckptool.inspection.scan_calls import makes_data
from ckptool.matching.align import escaped, literal, wrapped_submodules
from ckptool.matching.known_renames import ADAPTER, NAMED_ADAPTER
from ckptool.quotes import Quote, quote
from ckptool.symbolic.encoder import blocking
from ckptool.transforms import Flatten, Plain, Rename, Strip, Take
from ckptool.transforms.ema import AVERAGED, average_prefix, has_online_model
from ckptool.transforms.plain import class_of, refusals
from ckptool.words import counted, listed, printable, shell

INTEGERS = frozenset(
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
_LIGHTNING = "pytorch-lightning_version"
_MOST_PARTS = 50
"""Submodules from which wrapper prefixes are removed, by one rule each."""
_EVERYWHERE = ("torch", "builtins", "collections", "numpy")
"""Packages that are installed wherever a file is loaded."""
_RANDOM = frozenset({"uint8", "uint32"})
"""Dtypes of the random generator states of torch and numpy."""
_BLOCKED = ("sys", "os", "posix", "nt")
"""Modules with a different error in torch (torch/_weights_only_unpickler.py)."""
_UNWRAPPED = "load_state_dict on the unwrapped model"
_SHARDED = ("DTensor", "ShardedTensor")


def is_floating(dtype: str) -> bool:
    """Return True for a floating-point or complex dtype."""
    return "float" in dtype or "complex" in dtype


def level(subject: Subject) -> Iterator[Complaint]:
    """Yield complaints about where the state dict is, and about other entries in it."""
    model = subject.model
    if model is None:
        if subject.models:
            yield _several(subject)
        elif missing_weights(subject.checkpoint) is None:
            yield _none(subject)
        return
    if model.path:
        yield _one_level_down(subject, model)
    names = [str(name) for name in list_value_keys(model.node)]
    if names and model.kind == "state_dict":
        yield Complaint(
            "values-inside",
            f"the state dict has plain values among its tensors: {listed(names)}",
            names_of(names),
            hint="ckptool.load_state_dict and a safetensors file leave them out",
            quote=quote("unexpected-key", printable(names[0])),
            fix=(Take(model_only=True),),
        )
    bare = unwrapped(model)
    if N_AVERAGED in bare and len(bare) > 1 and not subject.is_compared(model):
        yield Complaint(
            "averaged",
            f"the state dict is of an AveragedModel (it has {N_AVERAGED})",
            (N_AVERAGED,),
            quote=quote("unexpected-key", N_AVERAGED),
            effect='an AveragedModel loads it, with "module." in front of the keys',
            fix=(Take(exclude=(name_of((*model.path, N_AVERAGED)),)),),
        )


def _one_level_down(subject: Subject, model: Section) -> Complaint:
    """Return the complaint about weights under a key: a note in a training checkpoint."""
    root = subject.checkpoint.root
    keys = [str(key) for key in root] if isinstance(root, dict) else []
    is_training = subject.is_training
    return Complaint(
        "level",
        f'the weights are under the key "{printable(model.name)}"'
        + (", next to the training state" if is_training else ""),
        (printable(model.name),),
        hint=f"in code: torch.load(FILE){_subscripts(model)}",
        severity="note" if is_training else "fails",
        quote=quote("unexpected-key", printable(keys[0])) if keys else quote("no-dict"),
        fix=(Take(subject.key, model_only=True),),
    )


def _subscripts(section: Section) -> str:
    """Return the Python subscripts of a section: `['model'][0]`."""
    return printable("".join(f"[{key!r}]" for key in section.path))


def _several(subject: Subject) -> Complaint:
    named = [section for section in subject.models if section.name]
    flat = (Choice((Flatten(),)),) if _are_parts(subject) else ()
    shown = [
        f"{section.name or 'the root'} ({counted(len(section.tensors()), 'tensor')})"
        for section in subject.models
    ]
    choices = (Choice((Take(one.name, model_only=True),), _word(one)) for one in named)
    return Complaint(
        "several-models",
        f"it has {len(shown)} state dicts"
        + (" without a common key: load one, or all as one" if flat else ": choose one to load"),
        names_of(shown, most=20),
        hint=f"ckptool doctor FILE --key {shell(named[0].name)}" if named else None,
        severity="note" if subject.is_training else "fails",
        quote=quote("missing"),
        choices=(*flat, *choices),
    )


def _are_parts(subject: Subject) -> bool:
    """Return True if the file has only state dicts, which share no key.

    Some libraries read these together, from a dict of dicts or from flat keys: for example
    diffusers `image_proj.` and `ip_adapter.` of an IP-Adapter.
    """
    root, keys = subject.checkpoint.root, [key for one in subject.models for key in one.node]
    paths = [one.path for one in subject.models]
    is_only_these = isinstance(root, dict) and paths == [(key,) for key in root]
    return is_only_these and len(keys) == len({*keys})


def _word(section: Section) -> str:
    """Return the name of a section as part of a file name."""
    return re.sub(r"[^\w-]+", "-", section.name, flags=re.ASCII).strip("-")[:40] or "extracted"


def _none(subject: Subject) -> Complaint:
    """Return the complaint about a file without a model: a note for training state."""
    root, sections = subject.checkpoint.root, subject.checkpoint.sections
    kinds = [f"the {part.kind} {part.name or 'at the root'}" for part in sections]
    named = [kind for kind in kinds if not kind.startswith(("the values", "the state_dict"))]
    states = [part for part in sections if part.kind in ("optimizer", "scheduler")]
    states.sort(key=lambda part: part.kind)
    found = list(find_tensors(root))
    # A tensor, a list, settings, and random generator states are not meant to be a model.
    harmless = bool(states or not found) or (
        not isinstance(root, (dict, Opaque))
        or all(one.dtype in _RANDOM and len(one.shape) == 1 for one in found)
    )
    remedy = ""
    if states:
        remedy = (
            f"{states[0].kind}.load_state_dict(torch.load(FILE){_subscripts(states[0])}) loads it"
        )
    elif harmless and subject.blocked:
        called = [name for name in calls(subject.checkpoint) if not makes_data(name)]
        loader = load_format(subject.checkpoint.format).unsafe_loader
        remedy = f"{loader} loads it, if you trust its author"
        if called:
            remedy = f"unpickling the file calls {listed(called, most=5)}"
    elif not harmless:
        remedy = "use the file that has the weights"
    said = quote("missing" if isinstance(root, dict) else "no-dict")
    if subject.companion is not None:
        return Complaint(
            "no-model",
            subject.companion.what,
            hint=f"{subject.companion.reader} reads it",
            severity="note",
            quote=said,
        )
    return Complaint(
        "no-model",
        "it has no state dict of a model; it has "
        + (listed(named, most=4) if named else _describe(root, len(found))),
        names_of(kinds),
        hint=remedy,
        severity="note" if harmless else "fails",
        quote=said,
    )


def _describe(root: Any, tensors: int) -> str:
    """Describe a file without sections: `a dict of 3 entries with 2 tensors`."""
    if isinstance(root, TensorRef):
        return "one tensor"
    if isinstance(root, (dict, list, tuple)):
        kind = "dict" if isinstance(root, dict) else type(root).__name__
        return f"a {kind} of {counted(len(root), 'entry')} with {counted(tensors, 'tensor')}"
    if isinstance(root, Opaque):
        return f"an object of class {printable(class_of(root))}"
    return f"a value of type {type(root).__name__}"


def objects(subject: Subject) -> Iterator[Complaint]:
    """Yield complaints about objects that `torch.load` rejects, or that need their classes."""
    refused = list(refusals(subject.checkpoint.root))
    modules = [(name_of(path), node) for path, node in refused if to_model_state(node) is not None]
    whole = {id(node) for _, node in modules}
    others = [(name_of(path), class_of(node)) for path, node in refused if id(node) not in whole]
    names = subject.checkpoint.details.globals
    first = next(iter(blocking(names)), None) or next(iter(subject.blocked), "")
    kind = "blocked-global" if first.partition(".")[0] in _BLOCKED else "global"
    said = quote(kind, printable(first))
    if modules:
        classes = dict.fromkeys(class_of(node) for _, node in modules)
        known = [*classes, *subject.blocked]
        own = next((one for one in known if one.partition(".")[0] not in _EVERYWHERE), None)
        absent = f"nothing else loads it without the class {printable(own)}" if own else ""
        alone = subject.model is not None and subject.model.kind == "module"
        yield Complaint(
            "module",
            f"it contains a pickled model ({listed(classes)}), not a state dict",
            names_of(name or "the root" for name, _ in modules),
            quote=said,
            effect=absent,
            fix=(Take(model_only=True),) if alone else (Plain(),),
        )
    if others or (subject.blocked and not modules):
        classes = dict.fromkeys([kind for _, kind in others] or subject.blocked)
        yield Complaint(
            "objects",
            f"it contains objects that weights_only=True rejects: {listed(classes)}",
            names_of((f"{name or 'the root'} ({kind})" for name, kind in others), most=20),
            hint=_remedy(classes),
            quote=said,
            effect="weights_only=False, which it proposes, runs any code in the file",
            fix=(Plain(),),
        )
    texts = [text for section in subject.models for text in section.unread]
    if texts:
        yield Complaint(
            "unread",
            "a state dict made from the pickled model would lack weights",
            names_of(texts),
            hint="save model.state_dict() in the process that has the model"
            if calls(subject.checkpoint)
            else f"{load_format(subject.checkpoint.format).unsafe_loader} with its classes "
            "installed, and save model.state_dict()",
            severity="misleads",
            quote=quote("missing"),
            effect="a class with its own __getstate__ stores them in a form that only it reads",
        )
    numpy = [name for name in names if name.startswith("numpy._core.")]
    if numpy:
        yield Complaint(
            "numpy",
            f"it contains numpy 2 pickles ({listed(numpy)})",
            severity="note",
            quote=quote("numpy"),
            fix=(Plain(),),
        )


def _remedy(classes: Iterable[str]) -> str:
    """Return the hint for objects that no command turns into plain data."""
    if any(kind.rpartition(".")[2] in _SHARDED for kind in classes):
        return "gather the full tensors in the training job, and save those"
    return needed_import(classes)


def naming(subject: Subject) -> Iterator[Complaint]:
    """Yield complaints about keys of state dicts that are not compared with a reference."""
    models = [one for one in subject.models if not subject.is_compared(one)]
    for section in models:
        yield from _averages(subject, section)
    yield from _wrappers([section for section in models if section.wrappers])
    yield from _submodules(models)
    for section in models:
        within, others = split_partly_wrapped(unwrapped(section).values())
        if within:
            yield Complaint(
                "wrapped-in-part",
                f"{counted(len(within), 'key')} {'starts' if len(within) == 1 else 'start'} with "
                f'"module.", but {printable(others[0])} does not',
                names_of(within),
                hint="if it is a wrapper: ckptool rename FILE --prefix module.=",
                severity="note",
                effect="strip-module keeps it, because it may be the name of a layer.",
            )
        yield from _adapters(section)
    yield from _lightning(subject)


def _wrappers(sections: list[Section]) -> Iterator[Complaint]:
    if not sections:
        return
    kinds = dict.fromkeys(word for section in sections for word in section.wrappers)
    names = [
        name
        for section in sections
        for name in list_wrappable_keys(section.node)
        if is_wrappable(name)
    ]
    named = dict.fromkeys(section.name for section in sections if section.name)
    inside = f" in {listed(named)}" if named else ""
    bare = [unwrapped(section) for section in sections]
    fronts = {
        find_common_wrapper({k: v for k, v in one.items() if is_wrappable(k)}) for one in bare
    }
    front = fronts.pop() if len(fronts) == 1 else ""
    text = f'every key{inside} starts with "{front}"'
    if not front:
        prefixes = listed(f'"{word}."' for word in kinds)
        text = f"keys{inside} have the wrapper prefix{'es' if len(kinds) > 1 else ''} {prefixes}"
    yield Complaint(
        "wrappers",
        text,
        names_of(names),
        hint=_collision(sections),
        quote=quote("other-keys", printable(names[0]), call=_UNWRAPPED),
        effect="with strict=False it loads nothing, without an error",
        fix=(Strip(),),
    )


def _collision(sections: Iterable[Section]) -> str:
    """Return why the wrapper prefixes cannot be removed; "" if they can."""
    try:
        for section in sections:
            strip_names(list_wrappable_keys(section.node))
    except NameCollision as error:
        return f"{error.message}: load one of them (ckptool extract FILE --include NAME)"
    return ""


def _averages(subject: Subject, section: Section) -> Iterator[Complaint]:
    """Yield a complaint about averaged weights under the prefix of their class."""
    names = [*get_named_tensors(section.node)]
    prefix = average_prefix(names)
    if not prefix:
        return
    own = [name for name in names if name.startswith(prefix)]
    others = [name for name in names if not name.startswith(prefix)]
    steps, is_alone = (Take(ema=True),), not has_online_model(names)
    besides = f" except {listed(others, most=3)}" if others else ""
    yield Complaint(
        "averages",
        f'every key{besides} starts with "{prefix}": averaged weights (EMA)'
        if is_alone
        else f'{len(own):,} of {len(names):,} keys start with "{prefix}": averaged weights (EMA), '
        "next to those of the model",
        names_of(own),
        hint=f"{ema_command(subject.checkpoint)} writes them under the keys of the model",
        severity="fails" if is_alone or prefix == AVERAGED else "note",
        quote=quote("unexpected-key", printable(own[0])),
        effect="the class that computed the averages loads them",
        fix=steps if is_alone else None,
        choices=() if is_alone else (Choice(steps, "ema"),),
    )


def _submodules(models: list[Section]) -> Iterator[Complaint]:
    names = [
        name
        for section in models
        for name in unwrapped(section).values()
        if not average_prefix([name])  # a copy of another submodule
    ]
    paths = wrapped_submodules(filter(is_wrappable, names))[:_MOST_PARTS]
    if not paths:
        return
    before = tuple(f"{path}.module." for path in paths)
    own = [name for name in names if name.startswith(before)]
    rules = (rf"^{escaped(path)}\.module\.=>{literal(path)}." for path in paths)
    is_simple = len(paths) == 1 and not any(section.wrappers for section in models)
    yield Complaint(
        "submodule-wrapper",
        f'every key below {listed(map(printable, paths), most=3)} starts with "module.": '
        "DataParallel wrapped part of the model",
        names_of(own),
        quote=quote("unexpected-key", printable(own[0]), call=_UNWRAPPED),
        effect="a model that has a layer of that name loads it (--like REFERENCE knows)",
        fix=(Strip(at=paths[0]) if is_simple else Rename(tuple(rules)),),
    )


def _adapters(section: Section) -> Iterator[Complaint]:
    """Yield a complaint about the prefix `base_model.model.` and `base_layer` of PEFT."""
    every = [name for name in list_wrappable_keys(section.node) if is_wrappable(name)]
    names = [name for name in every if name.startswith(PEFT)]
    named = {name: found[2] for name in every if (found := NAMED_ADAPTER.search(name))}
    adapted = [
        name for name in every if name in named or (name.startswith(PEFT) and ADAPTER.search(name))
    ]
    wrapped = [name for name in every if _BASE_LAYER in name]
    if len(named) == len(every) and len(adapters := {*named.values()}) == 1:
        yield _named_adapter(adapters.pop(), [*named])
    if not names and not wrapped:
        return
    own = bool(adapted or wrapped) or len(names) < len(every)
    alone = len(adapted) == len(every)
    kind, remedy = "a merged model", ""
    if own:
        kind = "adapters without their base model" if alone else "a model with its adapters"
        remedy = (
            "ckptool merge-lora BASE FILE -o OUT merges it into its base model; "
            "PeftModel.from_pretrained loads it on top of that"
        )
    if adapted and wrapped and not alone:
        remedy = (
            "ckptool merge-lora FILE -o OUT --alpha N merges them, where N is the lora_alpha; "
            "its PeftModel loads it as is"
        )
    shown = wrapped or adapted or names
    yield Complaint(
        "adapter",
        f"the keys are those of PEFT: {kind}",
        names_of(shown),
        hint=remedy,
        severity="note" if own and not wrapped else "fails",
        quote=quote("unexpected-key", printable(shown[0])),
        effect="with strict=False no adapter is applied, without an error",
        fix=None if own else (Rename((f"^{escaped(PEFT)}=>",)),),
    )


def _named_adapter(adapter: str, names: list[str]) -> Complaint:
    """Return the note about keys with an adapter name, which PEFT itself would not write."""
    rule = rf"\.{escaped(adapter)}(?=(\.weight|\.bias)?$)=>"
    return Complaint(
        "adapter-name",
        f'the keys contain the adapter name "{printable(adapter)}", as in the state dict of a '
        "PeftModel",
        names_of(names),
        severity="note",
        effect="The PeftModel loads them with strict=False; PeftModel.from_pretrained adds the "
        "name itself and finds none of these keys.",
        choices=(Choice((Rename((rule,)),)),),
    )


def _lightning(subject: Subject) -> Iterator[Complaint]:
    """Yield a note if every key starts with one attribute of a LightningModule."""
    root, model = subject.checkpoint.root, subject.model
    if not isinstance(root, dict) or _LIGHTNING not in root or model is None:
        return
    names = list(unwrapped(model).values())
    parts = {name.partition(".")[0] for name in names}
    if len(parts) != 1 or not all("." in name for name in names) or subject.is_compared(model):
        return
    prefix = f"{parts.pop()}."
    yield Complaint(
        "lightning",
        f'every key starts with "{printable(prefix)}", the attribute of the LightningModule that '
        "has the model",
        names_of(names),
        severity="note",
        quote=quote(
            "unexpected-key", printable(names[0]), call="load_state_dict on the inner model"
        ),
        effect="the LightningModule loads it",
        choices=(Choice((Rename((f"^{escaped(prefix)}=>",)),), "renamed"),),
    )


def versions(subject: Subject) -> Iterator[Complaint]:
    """Yield complaints about cast buffers and lost `_metadata`."""
    for section in subject.models:
        tensors = get_named_tensors(section.node)
        cast = [
            name
            for name, one in tensors.items()
            if name.rpartition(".")[2] in INTEGERS and is_floating(one.dtype)
        ]
        if cast:
            kinds = dict.fromkeys(tensors[name].dtype for name in cast)
            yield Complaint(
                "cast-buffers",
                f"buffers that count or index were cast to {', '.join(kinds)}",
                names_of(cast),
                hint="in code: state[name] = state[name].long(); ckptool cast skips them",
                severity="misleads",
                effect="load_state_dict copies them into the model's integer buffers without an "
                "error: float16 counts to 2048, bfloat16 to 256, and fractions are cut off.",
            )
        if section.kind == "state_dict" and not _has_metadata(section.node):
            yield from _norms(subject, tensors)
    packed = [
        key
        for node in walk_everything(subject.checkpoint.root)
        if isinstance(node, dict) and not _has_metadata(node)
        for key, value in node.items()
        # A key without a dot is an attribute of a pickled module.
        if isinstance(key, str) and key.endswith("._packed_params") and not isinstance(value, dict)
    ]
    if packed:
        why = "a quantized layer reads the state as the oldest version"
        yield _lost("fails", packed, why, quote("packed"))


def _norms(subject: Subject, tensors: dict[str, TensorRef]) -> Iterator[Complaint]:
    """Yield a complaint about BatchNorm without `_metadata`, which skips a missing counter."""
    means = [name for name in tensors if name.rpartition(".")[2] == "running_mean"]
    counter = "num_batches_tracked"
    lack = [n for n in means if f"{n.removesuffix('running_mean')}{counter}" not in tensors]
    why = "BatchNorm reads the state as from torch before 0.4.1"
    if lack:
        yield _lost("misleads", lack, f"{why}: the model silently keeps its own counter")
    elif means and load_format(subject.checkpoint.format).by_torch:
        yield _lost("note", means, f"{why}, which here changes nothing")


def _has_metadata(node: Any) -> bool:
    return isinstance(node, OrderedMap) and bool(node.metadata)


def _lost(
    severity: Severity, names: Iterable[str], why: str, said: Quote | None = None
) -> Complaint:
    return Complaint(
        "metadata",
        "the state dict lost its _metadata, the versions of its modules",
        names_of(names),
        hint="save model.state_dict() unchanged in the process that has the model",
        severity=severity,
        quote=said,
        effect=f"{{k: v for k, v in state.items()}} and safetensors drop it; {why}",
    )
