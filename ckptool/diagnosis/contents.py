"""Complaints about bytes, values and devices: damage, waste, shared storages, saved devices.

The devices of this machine are found without importing torch. NVIDIA's driver creates a file in
/dev for every GPU. CUDA_VISIBLE_DEVICES hides some of them. A torch built without CUDA has none;
its `version.py` is read, not run, to detect that.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import NamedTuple

from ckptool.core.finding import Finding, Severity
from ckptool.core.sections import get_named_tensors
from ckptool.core.tree import find_ties, name_of
from ckptool.diagnosis.complaint import Choice, Complaint, Subject, summarize_names
from ckptool.errors import UsageError
from ckptool.files.source import Progress
from ckptool.formats import load_format
from ckptool.formats.safetensors import find_overlapping_keys
from ckptool.formats.transfers import salvage_command
from ckptool.inspection.blockers import ANYWHERE, list_restored_devices
from ckptool.inspection.quantization import quantizations
from ckptool.limits import Limits
from ckptool.quotes import Quote, quote
from ckptool.transforms import Cast, Compact, Remap, Take, Untie
from ckptool.transforms.compacting import measure_storages
from ckptool.transforms.devices import CARRIED
from ckptool.words import are, counted, listed, printable


class _ByteComplaint(NamedTuple):
    """A complaint about problems that `verify` finds in the bytes."""

    kind: str
    severity: Severity
    problem_kinds: frozenset[str]
    effect: str
    hint: str
    """{} is the advice to salvage the file. Empty: rewriting the file fixes it."""


_BYTE_COMPLAINTS = (
    _ByteComplaint(
        "damaged",
        "fails",
        frozenset({"checksum", "corrupt", "truncated", "missing", "limit"}),
        "torch.load does not verify checksums: it loads wrong numbers or fails.",
        "download or copy it again{}; ckptool verify FILE lists all damaged records",
    ),
    _ByteComplaint(
        "offsets",
        "misleads",
        frozenset({"offsets"}),
        "torch.load(map_location='meta') and FakeTensorMode read the wrong bytes without an error.",
        "",
    ),
    _ByteComplaint(
        "container",
        "misleads",
        frozenset({"header", "end"}),
        "torch.load ignores it; another program may reject the file or read other bytes.",
        "",
    ),
    _ByteComplaint(
        "remains",
        "note",
        frozenset({"trailing", "padding", "total-size"}),
        "torch.load ignores it, and rewriting the file drops it.",
        "",
    ),
)
_MASK_KEY = re.compile(r"mask[^./]*$", re.IGNORECASE)
"""A key that ends in "mask": masks of -inf are added to attention scores."""
_NEVER_INFINITE_NAMES = frozenset({"weight", "bias", "running_mean", "running_var"})
_OBSERVER_BUFFERS = frozenset({"min_val", "max_val"})
"""Buffers of quantization observers, which are infinite before the first data."""
_MIN_UNUSED_BYTES = 1 << 10
_MIN_DEAD_BYTES = 1 << 16
"""Fewer bytes are not reported: every in-place edit leaves a dead header."""
_MIN_WASTE_SHARE = 1 / 20
"""The smallest part of the file, or of its tensor data, that is reported as wasted."""
_WORDED_AS_CUDA = ("hpu", "xpu", "mtia")
"""Device types for which torch has the error of cuda, with their name."""
_FULL_DEVICE_NAMES = {"cuda": "cuda:0"}
"""The device onto which torch loads a tensor that was saved on a device without an index."""
_NO_GPU_LIMIT = 1 << 16
"""More GPUs than a machine has."""


def check_damage(
    subject: Subject, limits: Limits, progress: Progress | None
) -> Iterator[Complaint]:
    """Read all bytes, and yield complaints about damage, missing data, NaN and infinite values.

    NaN and infinite values are only reported in models and optimizers, and not in tensors in which
    infinity is valid, such as masks.
    """
    from ckptool.inspection.unwritten import find_unwritten
    from ckptool.inspection.verify import verify  # only needed to read the tensor data

    problems = verify(
        subject.checkpoint.path, values=True, progress=progress, limits=limits
    ).problems
    for rule in _BYTE_COMPLAINTS:
        matching = [problem for problem in problems if problem.kind in rule.problem_kinds]
        if matching:
            yield _complain_of_bytes(rule, matching, subject)
    text = find_unwritten(subject.checkpoint)
    if text is not None:
        effect = "It loads without an error, but these weights are zero."
        yield Complaint(
            "unwritten", text, hint="download or copy it again", severity="misleads", effect=effect
        )
    in_weights = [
        problem for problem in problems if _is_of_model_or_optimizer(subject, problem.place)
    ]
    nans = [problem for problem in in_weights if problem.kind == "nan"]
    infinities = [problem for problem in in_weights if problem.kind == "inf"]
    valid_places = _find_valid_infinities({problem.place for problem in infinities}, subject)
    infinities = [problem for problem in infinities if problem.place not in valid_places]
    if nans:
        yield _complain_of_values("nan", "NaN", nans)
    if infinities:
        yield _complain_of_values("infinite", "infinite values", infinities)


def _complain_of_bytes(
    rule: _ByteComplaint, problems: Sequence[Finding], subject: Subject
) -> Complaint:
    """Return the complaint about problems in the bytes, with the text of the first one."""
    prefix = "it is damaged: " if rule.kind == "damaged" else ""
    others = len(problems) - 1
    suffix = f", and {counted(others, 'problem')} more" if others else ""
    return Complaint(
        rule.kind,
        f"{prefix}{problems[0].text}{suffix}",
        _summarize_places(problems),
        hint=rule.hint.format(_salvage_hint(subject)) if rule.hint else "",
        severity=rule.severity,
        effect=rule.effect,
        fix=None if rule.hint else (),  # no steps: rewriting the file is enough
    )


def _complain_of_values(kind: str, word: str, problems: Sequence[Finding]) -> Complaint:
    """Return the complaint about tensors that contain NaN or infinity, with the first one."""
    verb = "has" if len(problems) == 1 else "have"
    return Complaint(
        kind,
        f"{counted(len(problems), 'tensor')} {verb} {word}: {problems[0].text}",
        _summarize_places(problems),
        hint="no command restores the values; use an earlier checkpoint",
        severity="misleads",
        effect="It loads without an error, and the model computes NaN.",
    )


def _salvage_hint(subject: Subject) -> str:
    """Return the end of a hint with the command that salvages the file; "" if none can."""
    checkpoint = subject.checkpoint
    if not load_format(checkpoint.format).can_salvage:
        return ""
    return f"; or run {salvage_command(checkpoint.path, checkpoint.root)}"


def _find_valid_infinities(infinite: Collection[str], subject: Subject) -> set[str]:
    """Return the tensors among `infinite` in which infinity is valid, by their names.

    They are masks, observers of quantization that saw no data yet, and tensors that have only
    infinities and zeros. A weight or a running mean is never among them.
    """
    from ckptool.tensors.bytewise import is_infinity_or_zero

    valid = set()
    for section in subject.models if infinite else ():
        for path, tensor in section.tensors():
            name, component = name_of(path), str(path[-1]).rpartition(".")[2]
            if name not in infinite or component in _NEVER_INFINITE_NAMES:
                continue
            # A single infinity is valid in an observer; a parameter of one element has diverged.
            may_be_all_infinite = tensor.numel > 1 or component in _OBSERVER_BUFFERS
            if _MASK_KEY.search(name) or (may_be_all_infinite and is_infinity_or_zero(tensor)):
                valid.add(name)
    return valid


def _is_of_model_or_optimizer(subject: Subject, name: str) -> bool:
    """Return True for a tensor of a model or optimizer. Others (best loss) may be infinite.

    In a file without a model and optimizer, it is true for every tensor.
    """
    section_names = {section.name for section in (*subject.models, *subject.optimizers)}
    if not section_names or "" in section_names:  # "" is a flat state dict at the root
        return True
    return name.startswith(tuple(f"{section_name}/" for section_name in section_names))


def _summarize_places(problems: Iterable[Finding]) -> tuple[str, ...]:
    """Return the places of problems, with repeated layers folded."""
    return summarize_names(dict.fromkeys(problem.place for problem in problems if problem.place))


def check_memory(subject: Subject) -> Iterator[Complaint]:
    """Yield complaints about wasted and shared bytes."""
    if load_format(subject.checkpoint.format).tensors_only:
        yield from _check_aliases(subject)
        return
    yield from _check_waste(subject)
    yield from _check_save_file(subject)


def check_quantization(subject: Subject) -> Iterator[Complaint]:
    """Yield a note for each kind of quantization, with a command if ckptool can dequantize it."""
    for quantization in quantizations(subject.checkpoint):
        yield Complaint(
            "quantized",
            str(quantization),
            summarize_names(quantization.names),
            severity="note",
            effect="load_state_dict into plain layers rejects the keys and shapes, or copies codes "
            "as weights.",
            choices=(Choice((Cast(dequantize="bfloat16"),), word="plain"),),
        )


def _check_waste(subject: Subject) -> Iterator[Complaint]:
    """Yield a complaint about bytes that no tensor uses, or that edits left behind.

    Nothing for a few bytes, or a small part of the file.
    """
    details = subject.checkpoint.details
    total, used = measure_storages(subject.checkpoint.root)
    unused, dead = total - used, details.dead_bytes
    facts = []
    if unused >= _MIN_UNUSED_BYTES and unused >= _MIN_WASTE_SHARE * total:
        facts.append(f"no tensor uses {unused:,} of the {total:,} bytes of tensor data")
    if dead >= _MIN_DEAD_BYTES and dead >= _MIN_WASTE_SHARE * details.size:
        facts.append(f"{dead:,} of the {details.size:,} bytes of the file are dead")
    if facts:
        views = (
            name_of(path)
            for path, tensor in subject.checkpoint.tensors()
            if tensor.storage is not None
            and tensor.storage.nbytes - tensor.nbytes >= _MIN_UNUSED_BYTES
        )
        yield Complaint(
            "bloat",
            " and ".join(facts),
            summarize_names(views),
            severity="misleads",
            effect="torch.save writes the whole storage of a view (big[:10] takes as much space as "
            "big), and torch.load reads all of it into memory.",
            fix=(Compact(),),
        )


def _check_aliases(subject: Subject) -> Iterator[Complaint]:
    """Yield a complaint about tied keys that a safetensors file has only in its metadata."""
    target_by_alias = {
        name: str(tensor.storage.key)
        for section in subject.models
        for name, tensor in get_named_tensors(section.node).items()
        # The storage of a safetensors file has the key of the tensor that is stored.
        if tensor.storage is not None and tensor.storage.key != name
    }
    if target_by_alias:
        aliases = [*target_by_alias]
        yield Complaint(
            "aliases",
            f"{counted(len(aliases), 'tied key')} {are(len(aliases))} only in the metadata of the "
            "file",
            summarize_names(
                f"{printable(alias)} = {printable(target)}"
                for alias, target in target_by_alias.items()
            ),
            quote=quote("missing-key", printable(aliases[0])),
            effect="safetensors.torch.load_model restores them",
            fix=(),  # the format is sufficient: it stores tied keys
            format="torch-zip",
            choices=(Choice((Untie(),)),),
        )


def _check_save_file(subject: Subject) -> Iterator[Complaint]:
    """Yield notes about tied and overlapping weights, which `safetensors.torch.save_file` rejects.

    The choice is a safetensors file with a copy for each tied key.
    """
    model = subject.model
    if model is None:
        return
    tensors = {
        name: tensor for name, tensor in get_named_tensors(model.node).items() if tensor.has_content
    }
    tied_groups = find_ties(((name,), tensor) for name, tensor in tensors.items())
    # Without a key, the conversion finds the state dict itself.
    is_one_of_several = bool(model.path) and subject.key is not None
    take = (Take(model.name),) if is_one_of_several else ()
    choices = (Choice((*take, *([Untie()] if tied_groups else []))),)
    if tied_groups:
        yield Complaint(
            "ties",
            "some keys are tied: they share one tensor",
            summarize_names(" = ".join(map(printable, names)) for names in tied_groups),
            severity="note",
            quote=quote("shared"),
            effect="torch.load keeps the keys tied",
            choices=choices,
        )
    # Tied tensors overlap too, but they have a complaint of their own.
    tied_names = {name for names in tied_groups for name in names}
    noncontiguous = [name for name, tensor in tensors.items() if not tensor.is_contiguous]
    overlapping = [name for name in find_overlapping_keys(tensors) if name not in tied_names]
    if noncontiguous or overlapping:
        yield Complaint(
            "views",
            "some tensors are views: they are not contiguous or share bytes with others",
            summarize_names(dict.fromkeys((*noncontiguous, *overlapping))),
            severity="note",
            effect="torch.load keeps the views; safetensors.torch.save_file rejects them.",
            choices=choices,
        )


def check_devices(subject: Subject) -> Iterator[Complaint]:
    """Yield complaints about the devices onto which `torch.load` restores the tensors.

    Devices that this machine lacks, float64 on mps, and one GPU onto which every rank would load.
    """
    if load_format(subject.checkpoint.format).tensors_only:  # which stores no devices
        return
    saved_devices = [
        device
        for device in list_restored_devices(subject.checkpoint.root)
        if device not in ANYWHERE
    ]
    missing = [
        device
        for device in saved_devices
        if _FULL_DEVICE_NAMES.get(device, device) not in subject.devices
    ]
    if missing:
        yield _complain_of_missing_devices(subject, missing)
    float64_names = [
        name_of(path)
        for path, tensor in subject.checkpoint.tensors()
        if tensor.dtype in ("float64", "complex128")
    ]
    if float64_names and "mps" in subject.devices:
        yield Complaint(
            "device",
            f"{counted(len(float64_names), 'tensor')} {are(len(float64_names))} float64, which mps "
            "does not support",
            summarize_names(float64_names),
            hint="ckptool cast FILE --dtype float32",
            severity="note",
            quote=quote("mps-float64"),
        )
    if len(saved_devices) == 1 and saved_devices[0].partition(":")[0] == "cuda":
        yield _complain_of_one_gpu(subject, saved_devices[0])


def _complain_of_missing_devices(subject: Subject, missing: list[str]) -> Complaint:
    """Return the complaint about tensors on devices that this machine does not have."""
    names = _list_tensors_on(subject, missing)
    # torch pickles these tensors without a storage, which a function would get.
    is_carried = missing[0].partition(":")[0] in CARRIED
    gpu_count = sum(device.startswith("cuda:") for device in subject.devices)
    return Complaint(
        "device",
        f"{counted(len(names), 'tensor')} {are(len(names))} on {listed(missing)}, but this "
        f"machine only has {listed(subject.devices)}",
        summarize_names(names),
        quote=_quote_device_error(missing[0], gpu_count),
        effect="map_location='cpu' or a dict works, a function does not" if is_carried else "",
        fix=(Remap("cpu"),),
    )


def _complain_of_one_gpu(subject: Subject, device: str) -> Complaint:
    """Return the complaint about a file of which all tensors on a GPU are on one GPU."""
    gpu, names = printable(device), _list_tensors_on(subject, [device])
    # numpy arrays are on no device.
    total = sum(1 for _, tensor in subject.checkpoint.tensors() if tensor.kind != "numpy")
    has_all = len(names) == total
    subject_text = "every tensor is" if has_all else f"{len(names):,} of {total:,} tensors are"
    return Complaint(
        "one-gpu",
        f"{subject_text} on {gpu}",
        summarize_names(names),
        severity="misleads",
        effect=f"Without map_location, every rank of a DDP run loads it onto {gpu}, which runs "
        "out of memory (CUDA out of memory after a resume).",
        fix=(Remap("cpu"),),
    )


def _list_tensors_on(subject: Subject, devices: list[str]) -> list[str]:
    """Return the names of the tensors on these devices."""
    return [
        name_of(path) for path, tensor in subject.checkpoint.tensors() if tensor.device in devices
    ]


def _quote_device_error(device: str, gpu_count: int) -> Quote:
    """Return torch's error for a device that a machine with this many GPUs lacks."""
    kind, _, index = device.partition(":")
    word = kind.upper()
    if kind == "cuda" and gpu_count:
        return quote("no-cuda", index or 0, gpu_count)
    if kind == "cuda" or kind in _WORDED_AS_CUDA:
        return quote("no-device", word, kind)
    if kind == "mps":
        return quote("no-mps")
    return quote("no-backend", word) if kind in CARRIED else quote("no-location", printable(device))


_DEVICE_PATTERN = re.compile(r"([a-z][a-z0-9_]*)(:\d+)?", re.ASCII)
_DEVICE_TYPES = frozenset({
    "cpu", "cuda", "hip", "xpu", "mps", "mtia", "hpu", "xla", "maia", "ort", "ipu", "ve", "vulkan",
    "metal", "opengl", "opencl", "ideep", "mkldnn", "fpga", "lazy", "meta", "privateuseone",
    "npu", "mlu", "musa", "gcu", "sdaa", "supa", "dml", "openreg", "rbln", "neuron",
})  # fmt: skip
"""Device types of torch.device (c10/core/DeviceType.h), and back ends that register their own."""
_NVIDIA_DEVICE_FILE = re.compile(r"nvidia\d+")
_AMD_GPU = re.compile(r"^simd_count [1-9]", re.MULTILINE)
_AMD_NODES = "sys/class/kfd/kfd/topology/nodes"


def parse_devices(devices: str | Iterable[object]) -> tuple[str, ...]:
    """Return the devices of the target machine, for example of `cuda:0,cuda:1`, and always `cpu`.

    Args:
        devices: Text with commas, or a list of texts or `torch.device` objects.

    Raises:
        UsageError: an item is not a device.
    """
    given: object = devices.split(",") if isinstance(devices, str) else devices
    items = given if isinstance(given, Iterable) else (given,)  # a single torch.device
    words = [str(item).strip() for item in items]
    for word in words:
        match = _DEVICE_PATTERN.fullmatch(word)
        if match is None or match[1] not in _DEVICE_TYPES:
            raise UsageError(f"{word!r} is not a device", hint="--devices cpu or --devices cuda:0")
    return tuple(dict.fromkeys(("cpu", *("cuda:0" if word == "cuda" else word for word in words))))


def detect_devices(
    root: str = os.sep, environment: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Return the devices that torch would find on this machine; `root` is for tests."""
    count = min(_count_gpus(root), _count_visible_gpus(environment))
    devices = ["cpu", *(f"cuda:{index}" for index in range(count))]
    if sys.platform == "darwin" and platform.machine() == "arm64":
        devices.append("mps")
    return tuple(devices)


def _count_gpus(root: str) -> int:
    """Return the number of GPUs that the installed torch can use, from files of the drivers.

    A torch for AMD (`hip`) names its GPUs `cuda:0`, ... too. Without torch, all GPUs count.
    """
    nodes = os.path.join(root, _AMD_NODES)
    amd_count = sum(_is_amd_gpu(os.path.join(nodes, name)) for name in _list_folder(nodes))
    if amd_count and not _is_torch_without("hip"):
        return amd_count
    if _is_torch_without("cuda"):
        return 0
    device_files = _list_folder(os.path.join(root, "dev"))
    nvidia_count = sum(1 for name in device_files if _NVIDIA_DEVICE_FILE.fullmatch(name))
    # On Windows only the driver knows the number, so any driver counts as one GPU.
    return nvidia_count or int(_has_windows_driver(root))


def _is_torch_without(kind: str) -> bool:
    """Return True if the installed torch was built without `cuda` or `hip`; False without torch.

    Its `version.py` has a line such as `hip: Optional[str] = None`.
    """
    return re.search(rf"^{kind}\b[^=\n]*=\s*None", _read_torch_version(), re.MULTILINE) is not None


def _count_visible_gpus(environment: Mapping[str, str]) -> int:
    """Return how many GPUs CUDA_VISIBLE_DEVICES allows: items before the first invalid one.

    CUDA hides all devices after an empty or negative item.
    """
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return _NO_GPU_LIMIT
    words = [word.strip() for word in setting.split(",")]
    return sum(1 for _ in takewhile(lambda word: word and not word.startswith("-"), words))


def _read_torch_version() -> str:
    """Return the text of the installed torch's `version.py`; "" without torch."""
    with suppress(ImportError, ValueError, OSError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin is not None:
            path = os.path.join(os.path.dirname(spec.origin), "version.py")
            with open(path, encoding="utf-8") as file:
                return file.read(1 << 16)
    return ""


def _has_windows_driver(root: str) -> bool:
    """Return True if NVIDIA's Windows library is installed, also under WSL."""
    windows = os.environ.get("SYSTEMROOT", "C:\\Windows")
    if sys.platform == "win32":
        return os.path.exists(os.path.join(windows, "System32", "nvcuda.dll"))
    return os.path.exists(os.path.join(root, "usr/lib/wsl/lib/libcuda.so"))


def _is_amd_gpu(node: str) -> bool:
    """Return True if a node of the driver's topology is a GPU."""
    try:
        with open(os.path.join(node, "properties"), encoding="ascii") as file:
            return _AMD_GPU.search(file.read(1 << 16)) is not None
    except (OSError, UnicodeDecodeError):
        return False


def _list_folder(folder: str) -> Iterable[str]:
    """Return the names in a folder; empty if it cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return ()
