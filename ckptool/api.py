"""The library's verbs: what `ckptool` does on a command line, as functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, overload

from ckptool import inspection, transforms
from ckptool.checkpoint import Checkpoint
from ckptool.conversion import convert
from ckptool.errors import UsageError
from ckptool.files.recovery import recover
from ckptool.formats import open_checkpoint, opened
from ckptool.inspection import Diff, Info, Listing, Stats, Verdict
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.transforms import Rule, regex_rule
from ckptool.writing import Receipt, save

if TYPE_CHECKING:
    from ckptool.diagnosis import Diagnosis
    from ckptool.render.page import PageReceipt

__all__ = [
    "add_module",
    "average",
    "convert",
    "diff",
    "doctor",
    "info",
    "list_tensors",
    "open",
    "recover",
    "remap",
    "rename",
    "report",
    "stats",
    "strip_module",
    "verify",
]

Source = str | os.PathLike[str] | Checkpoint
StateDict = Mapping[Any, Any]


def open(path: str | os.PathLike[str], *, limits: Limits = DEFAULT_LIMITS) -> Checkpoint:
    """The checkpoint in a file or folder; only its header is read, nothing of it is run.

    Close it, or use it as a context manager.

    Args:
        path: A file, an index of shards, or the folder of a model in several files.
        limits: How much a header may ask for.

    Raises:
        FileMissing: there is no such file.
        NotACheckpoint: it is something else; the message says what.
        UnsupportedFormat: a checkpoint of a kind that is not read.
        CorruptFile: it breaks a rule of its format (`TruncatedFile`: it ends too early).
        LimitExceeded: it asks for more than `limits` allows.
    """
    return open_checkpoint(path, limits=limits)


def info(source: Source) -> Info:
    """What a checkpoint is, in one look: sections, wrappers, devices, what blocks weights_only.

    Raises:
        UnreadableFile: `source` is a path that cannot be opened as a checkpoint.
    """
    with opened(source) as checkpoint:
        return inspection.info(checkpoint)


def doctor(path: str | os.PathLike[str], **options: Any) -> Diagnosis:
    """Every reason why a plain `torch.load` and `load_state_dict` fail or mislead, and the cures.

    A file that does not open as a checkpoint has a diagnosis too. Torch is not imported.

    Args:
        path: The file or folder.
        options: `like`, a checkpoint of the architecture that it is to load into; `key`, the state
            dict that is meant; `quick`, look at the header alone; `devices`, what the machine has,
            if not this one (`"cuda:0,cuda:1"`, or a list of words or of `torch.device`);
            `progress`, `limits`.

    Raises:
        FileMissing: there is no such file.
        UnreadableFile: the system refuses it, or the reference cannot be read.
        UsageError: the reference holds no state dict, or several; or a word is no device.
        NotFound: nothing answers to `key`.
    """
    from ckptool.diagnosis import diagnose

    return diagnose(path, **options)


def list_tensors(source: Source, *, hash: bool = False) -> Listing:
    """Every tensor, value and object of a checkpoint; with `hash`, the sha256 of each content.

    Raises:
        UnreadableFile: `source` is a path that cannot be opened as a checkpoint.
    """
    with opened(source) as checkpoint:
        return inspection.list_tensors(checkpoint, hash=hash)


def diff(
    a: Source,
    b: Source,
    *,
    rules: Iterable[str | Rule] = (),
    key: Any = None,
    strict_names: bool = False,
    **options: Any,
) -> Diff:
    """Two checkpoints of any formats compared: what only one has, what changed, and how much.

    Names are compared without wrapper components, tensors by their bytes, and where those differ by
    value. Device tags and requires_grad are told of, and count with `strict` only.

    Args:
        a: A path, or a checkpoint that is open.
        b: The other.
        rules: `REGEX=>REPL` each: what makes of the names of `a` those of `b`.
        key: An address: only what stands there in either.
        strict_names: Compare names with their wrapper components.
        options: As `inspection.diffing.diff`: `structure`, `quick`, `strict`, `atol`, `rtol`,
            `equal_nan`, `max_diffs`, `progress`.

    Raises:
        UnreadableFile: a path cannot be opened as a checkpoint, or bytes cannot be read.
        NameCollision: two entries of one file would be compared under one name.
        NotFound: there is nothing at `key`.
        UsageError: a rule that is none, or options that do not fit together.
    """
    if isinstance(rules, str):
        raise UsageError(f"a list of rules is wanted, not {rules!r}", hint=f"[{rules!r}]")
    made = [regex_rule(rule) if isinstance(rule, str) else rule for rule in rules]
    with opened(a) as one, opened(b) as other:
        return inspection.diff(
            one, other, rules=made, key=key, strict_names=strict_names, **options
        )


def stats(source: Source, **options: Any) -> Stats:
    """What the numbers of each tensor are like, and over all: range, mean, zeros, NaN, histogram.

    Args:
        source: A path, or a checkpoint that is open.
        options: As `inspection.stats.stats`: `include`, `exclude` (globs), `key` (an address),
            `bins` (of each histogram), `progress`.

    Raises:
        UnreadableFile: `source` cannot be opened as a checkpoint, or bytes cannot be read.
        NotFound: there is no tensor at `key`.
        TorchMissing: torch is not installed.
    """
    from ckptool.inspection.stats import stats as measured

    with opened(source) as checkpoint:
        return measured(checkpoint, **options)


def report(
    source: Source,
    target: str | os.PathLike[str],
    *,
    other: Source | None = None,
    key: str | None = None,
    values: bool = True,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> PageReceipt:
    """Write a page about a checkpoint: one HTML file that needs nothing but itself.

    Args:
        source: A path, or a checkpoint that is open.
        target: The page to write.
        other: What to compare it with.
        key: The address of the only part whose tensors are told of.
        values: Read the tensors, for figures and histograms.
        overwrite: Replace a page that is there.
        progress: Told bytes done and bytes in all.

    Raises:
        UnreadableFile: a source cannot be read.
        NotFound: there is nothing at `key`.
        TargetExists: the target is there, or is a source.
        WriteError: nothing was written.
    """
    from ckptool.render.page import check_page_target, write_page  # a list needs no page

    with ExitStack() as stack:
        sources = [source] if other is None else [source, other]
        files = [stack.enter_context(opened(one)) for one in sources]
        check_page_target(files, target, overwrite=overwrite)
        found = inspection.report(*files, key=key, values=values, progress=progress)
        return write_page(found, target, files, overwrite=overwrite)


def average(
    sources: Iterable[Source],
    target: str | os.PathLike[str],
    *,
    ints: str = "same",
    key: str | None = None,
    **options: Any,
) -> Receipt:
    """Write the mean of several checkpoints' weights; the rest is that of the first.

    Args:
        sources: Paths, or checkpoints that are open; two or more.
        target: The file to write.
        ints: `same`: integer tensors must be equal in all; `first`: those of the first are taken.
        key: The address of the one state dict to average, alone.
        options: As `writing.save` (`format`, `overwrite`, `dry_run`, `progress`, ...).

    Raises:
        UnreadableFile: a source cannot be read.
        NotFound: a name that not every source has.
        UsageError: tensors of different shapes, integers that differ, fewer than two sources.
        WriteError: nothing was written.
    """
    if isinstance(sources, (str, os.PathLike)):
        raise UsageError(
            "average takes a list of files, and this is one",
            file=sources,
            hint='ckptool.average(["a.pth", "b.pth"], "mean.pth")',
        )
    with ExitStack() as stack:
        files = [stack.enter_context(opened(source)) for source in sources]
        return save(transforms.average(files, ints=ints, key=key), target, **options)


def _mapping(state: Any) -> StateDict:
    if not isinstance(state, Mapping):
        raise UsageError(
            f"a state dict or an open checkpoint is wanted, not a {type(state).__name__}",
            hint="a file: ckptool.open(path); a model: model.state_dict()",
        )
    return state


@overload
def strip_module(state: Checkpoint, **options: Any) -> Checkpoint: ...
@overload
def strip_module(state: StateDict, **options: Any) -> dict[Any, Any]: ...
def strip_module(state: Checkpoint | StateDict, **options: Any) -> Checkpoint | dict[Any, Any]:
    """Wrapper components (`module.`, `_orig_mod.`, ...) taken off every name; a new dict.

    Every state dict inside is treated, `_metadata` and optimizer names follow, the tensors are
    the same objects, and the argument is not touched.

    Args:
        state: A state dict, a dict that holds some, or an open checkpoint.
        options: `only` (one wrapper kind), `levels` (stop after so many), `at` (the path of a
            submodule whose wrapper goes).

    Raises:
        NameCollision: two names would become one.
    """
    if isinstance(state, Checkpoint):
        return transforms.strip_module(state, **options)
    return transforms.strip_module_dict(_mapping(state), **options)


@overload
def add_module(state: Checkpoint, **options: Any) -> Checkpoint: ...
@overload
def add_module(state: StateDict, **options: Any) -> dict[Any, Any]: ...
def add_module(state: Checkpoint | StateDict, **options: Any) -> Checkpoint | dict[Any, Any]:
    """`module.` put before every name, as a DataParallel model wants them; a new dict.

    Args:
        state: A state dict, a dict that holds some, or an open checkpoint.
        options: `wrapper`, another component than `module`.
    """
    if isinstance(state, Checkpoint):
        return transforms.add_module(state, **options)
    return transforms.add_module_dict(_mapping(state), **options)


@overload
def remap(state: Checkpoint, rules: Mapping[str, str]) -> Checkpoint: ...
@overload
def remap(state: StateDict, rules: Mapping[str, str]) -> dict[Any, Any]: ...
def remap(state: Checkpoint | StateDict, rules: Mapping[str, str]) -> Checkpoint | dict[Any, Any]:
    """Devices by `rules`, all at once: `{"cuda:1": "cuda:0"}`, `{"cuda:*": "cpu"}`, `{"*": "cpu"}`.

    In a checkpoint the tags are rewritten; the tensors of a dict in memory are moved.

    Args:
        state: A state dict, a dict that holds some, or an open checkpoint.
        rules: A device or a pattern, and the device in its place.

    Raises:
        DeviceError: a device word that is none, or something that cannot be moved.
    """
    if isinstance(state, Checkpoint):
        return transforms.remap(state, rules)
    return transforms.remap_dict(_mapping(state), rules)


@overload
def rename(state: Checkpoint, rules: Iterable[str | Rule] = (), **options: Any) -> Checkpoint: ...
@overload
def rename(
    state: StateDict, rules: Iterable[str | Rule] = (), **options: Any
) -> dict[Any, Any]: ...
def rename(
    state: Checkpoint | StateDict, rules: Iterable[str | Rule] = (), **options: Any
) -> Checkpoint | dict[Any, Any]:
    r"""Names by `rules`, in order: `["^backbone\.=>encoder.", ...]`; a new dict.

    A rule that matches nothing is a `CheckpointWarning` (of a checkpoint: among its changes).

    Args:
        state: A state dict, a dict that holds some, or an open checkpoint.
        rules: `REGEX=>REPL` each, or what `transforms.table_rule` and its like give.
        options: `prefixes`, rules `OLD=NEW` for whole components at the front of a name, applied
            after the others; `key`, the only state dict to treat.

    Raises:
        NameCollision: two names would become one.
        UsageError: a rule that is none, or one that leaves nothing of a name.
    """
    if isinstance(state, Checkpoint):
        return transforms.rename(state, rules, **options)
    return transforms.rename_dict(_mapping(state), rules, **options)


def verify(
    path: str | os.PathLike[str],
    *,
    values: bool = False,
    manifest: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Verdict:
    """Whether a checkpoint is intact: checksums, structure, and whatever else torch does not check.

    A file that does not open as a checkpoint has a verdict too. Torch is not imported.

    Args:
        path: The file, or the folder of an unzipped one or of shards.
        values: Look for NaN and infinite values too.
        manifest: A file with the SHA-256 of every tensor's content: held against the checkpoint
            where it is there, else written, unless a problem was found.
        options: `progress`, told bytes done and in all of each part of the work; `limits`.

    Raises:
        FileMissing: there is no such file.
        FileDenied: the system does not let us read it.
        UnsupportedFormat: a checkpoint of a kind that is not read.
        UnreadableFile: it changed meanwhile.
        UsageError: `manifest` is a file of another kind.
        WriteError: the manifest could not be written.
    """
    return inspection.verify(path, values=values, manifest=manifest, **options)
