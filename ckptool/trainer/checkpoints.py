"""The checkpoints of a run: their folder, their content, and how a run resumes from one."""

from __future__ import annotations

import math
import os
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import nn

import ckptool
from ckptool.errors import CheckpointError, MatchError, NotFound, TargetExists, TrainingError
from ckptool.files.atomic import open_atomic_output
from ckptool.files.folders import recover_folders, remove_folder
from ckptool.files.journal import hold_folder_lock
from ckptool.files.system import convert_os_errors
from ckptool.trainer import sharded
from ckptool.trainer.config import TrainConfig
from ckptool.trainer.data import Batches
from ckptool.trainer.events import Note, Observer, Resumed, Saved
from ckptool.trainer.metrics import Metrics
from ckptool.trainer.strategies.base import DIVERGED, StepResult, Strategy
from ckptool.trainer.tuning import get_random_state, restore_random_state, seed_all
from ckptool.words import listed

_CHECKPOINT_NAME = re.compile(r"(last|best|step-(?P<step>\d{8,}))(\.pth)?")


@dataclass
class TrainingProgress:
    """The progress of a run.

    Attributes:
        epoch: Epochs that are finished, validation included.
        step: Steps of the optimizer so far.
        skipped: Steps without a change of weights, because their gradients overflowed.
        position: Steps of the current epoch (the sampler's position).
        loss_sum: The sum of the losses of the samples in the current epoch.
        samples: The number of these samples.
        skipped_here: Steps of the current epoch that were skipped.
        seconds: The time of the current epoch.
        rate: The learning rate of the last step.
        best: The lowest loss of an epoch; infinite before the first.
        since_best: Epochs since the best one.
    """

    epoch: int = 0
    step: int = 0
    skipped: int = 0
    position: int = 0
    loss_sum: float = 0.0
    samples: int = 0
    skipped_here: int = 0
    seconds: float = 0.0
    rate: float = 0.0
    best: float = math.inf
    since_best: int = 0

    def count_step(self, result: StepResult) -> None:
        """Count a finished step."""
        self.step += 1
        self.position += 1
        self.skipped += result.is_skipped
        self.skipped_here += result.is_skipped
        self.loss_sum += result.loss_sum
        self.samples += result.samples

    def end_epoch(self, loss: float) -> bool:
        """Count a finished epoch; return True if its loss is the lowest so far."""
        self.epoch += 1
        self.begin_epoch()
        is_best = loss < self.best
        if is_best:
            self.best = loss
        self.since_best = 0 if is_best else self.since_best + 1
        return is_best

    def begin_epoch(self) -> None:
        """Reset the counters of the current epoch."""
        self.position, self.loss_sum, self.samples, self.seconds = 0, 0.0, 0, 0.0
        self.skipped_here = 0


class _FoundCheckpoint(NamedTuple):
    """A checkpoint in a folder; of those with the same step, a higher priority is newer."""

    path: str
    step: int | None
    modified: int
    priority: int


def list_checkpoints(folder: str) -> list[tuple[str, int | None]]:
    """Return the checkpoints of a folder with their steps, newest first.

    They are ordered by step, or by time if one has no step; checkpoints of the same step come in
    the order `last`, `step-*`, `best`.
    """
    checkpoints = []
    for entry in os.scandir(folder) if os.path.isdir(folder) else ():
        match = _CHECKPOINT_NAME.fullmatch(entry.name)
        if match is not None:
            step = int(match["step"]) if match["step"] else _read_counter(entry.path, "step")
            kind = entry.name[:4]
            priority = ("best", "step", "last").index(kind)
            modified = entry.stat().st_mtime_ns
            checkpoints.append(_FoundCheckpoint(entry.path, step, modified, priority))
    has_all_steps = all(found.step is not None for found in checkpoints)
    main_order = "step" if has_all_steps else "modified"
    checkpoints.sort(key=attrgetter(main_order, "priority"), reverse=True)
    return [(found.path, found.step) for found in checkpoints]


def _read_counter(path: str, key: str) -> int | None:
    """Return the count at the top of a checkpoint under a key, for example `step`.

    None if there is none, or the checkpoint cannot be read.
    """
    values = os.path.join(path, sharded.VALUES)  # in a sharded checkpoint, which is a folder
    try:
        with ckptool.open(values if os.path.exists(values) else path) as checkpoint:
            number = checkpoint.root.get(key) if isinstance(checkpoint.root, dict) else None
    except CheckpointError:
        return None
    is_count = type(number) is int and number >= 0  # a bool is not one
    return number if is_count else None


@contextmanager
def hold_run_folder(folder: str) -> Iterator[None]:
    """Make the folder of a run and lock out other runs; remove it at the end if it is empty.

    A write that a kill interrupted in the folder is finished or removed.

    Raises:
        TargetExists: a file has this name.
        FileBusy: another run uses the folder; its process is named.
        WriteError: the system refuses.
    """
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise TargetExists("is a file, not a folder", file=folder, hint="give a folder as --out")
    with hold_folder_lock(folder):
        recover_folders(folder, _CHECKPOINT_NAME, last_file=sharded.VALUES)
        yield


class _TrialEnded(Exception):
    """Ends the block of an atomic write, which then removes its file."""


def require_writable(folder: str, size: int = 1) -> None:
    """Check by a trial that a file of `size` bytes can be written in the folder.

    The file is removed before it gets its name, so that an existing checkpoint is unchanged.

    Raises:
        WriteError: it cannot be written.
        FileBusy: another process is changing the file.
    """
    target = os.path.join(folder, "last.pth")
    with suppress(_TrialEnded), open_atomic_output(target, size, overwrite=True):
        raise _TrialEnded  # the space is reserved at the beginning of the block


def require_one_run(folder: str, *, origin: str | None, step: int, overwrite: bool = False) -> None:
    """Refuse to mix runs in a folder, or remove the checkpoints of another run.

    A new run, or one that resumes from a checkpoint elsewhere, needs a folder without checkpoints
    and figures; a run that resumes from a checkpoint of the folder needs one without later steps.

    Args:
        folder: The folder of the run.
        origin: The checkpoint that the run resumes from; None for a new run.
        step: The step after which the run begins.
        overwrite: Remove the other checkpoints.

    Raises:
        TrainingError: there are other checkpoints, which are named.
    """
    origin_path = origin_folder = None
    if origin is not None:
        origin_path = os.path.realpath(origin)
        origin_folder = os.path.realpath(os.path.dirname(os.path.abspath(origin)))
    is_within = origin_folder == os.path.realpath(folder)
    others = [
        path
        for path, saved_step in list_checkpoints(folder)
        if os.path.realpath(path) != origin_path
        and not (is_within and saved_step is not None and saved_step <= step)
    ]
    if overwrite:
        for path in others:
            remove_checkpoint(path)
        return
    names = list(map(os.path.basename, others))
    if not names and not is_within and any(Metrics(folder).read_lines()):
        names = ["metrics.jsonl"]
    if names:
        content = f"checkpoints after step {step}" if is_within else "an earlier run"
        raise TrainingError(
            f"{folder} already has {content}: {listed(names, 3)}",
            hint="continue with --resume auto, start over with --force, or choose another --out",
        )


def remove_numbered(folder: str, keep: int) -> None:
    """Remove all but the last `keep` checkpoints `step-*`; `keep` is at least 1."""
    step_by_name = {
        name: int(match["step"])
        for name in os.listdir(folder)
        if (match := _CHECKPOINT_NAME.fullmatch(name)) is not None and match["step"]
    }
    for name in sorted(step_by_name, key=step_by_name.__getitem__)[:-keep]:
        remove_checkpoint(os.path.join(folder, name))


def remove_checkpoint(path: str) -> None:
    """Remove a checkpoint, a file or a folder, if there is one."""
    with convert_os_errors(path), suppress(FileNotFoundError):
        if os.path.isdir(path) and not os.path.islink(path):
            remove_folder(path)
        else:
            os.unlink(path)


def estimate_size(strategy: Strategy) -> int:
    """Return the approximate size of a checkpoint, with the future state of the optimizer.

    That state has a tensor of the parameter's size for each moment: two with Adam and AdamW.
    """
    config = strategy.config
    moments = int(config.momentum > 0) if config.optimizer == "sgd" else 2
    models = 1 if config.ema is None else 2  # the moving average is a second one
    parameters_size = sharded.count_bytes(list(strategy.module.parameters()))
    buffers_size = sharded.count_bytes(list(strategy.module.buffers()))
    return parameters_size * (models + moments) + buffers_size * models


def _make_script_contents(save: str, strategy: Strategy, epoch: int) -> Any:
    """Return the object that a user's script would pass to `torch.save`, by the option `save`.

    `module`: the model in its wrapper; `wrapped`: state dicts with the wrapper's keys; `unwrapped`:
    only the model's state dict, without "module.".
    """
    if save == "module":
        return strategy.gather_module()
    model, optimizer = strategy.gather_state()
    if save == "wrapped":
        return {"epoch": epoch, "state_dict": model, "optim_dict": optimizer}
    if strategy.model is not strategy.module:  # it has a wrapper
        nn.modules.utils.consume_prefix_in_state_dict_if_present(model, "module.")
    return {"state_dict_model": model}


def _pickle(contents: Any, write: Callable[[bytes], object]) -> None:
    """Pass the bytes of `torch.save`, with torch's device tags, to `write`.

    Raises:
        OSError: `write` raised it.
        TrainingError: an object cannot be pickled.
    """
    output = SimpleNamespace(write=write, flush=lambda: None)  # torch needs only these methods
    try:
        torch.save(contents, output)
    except Exception as error:  # pickling raises errors of any class
        # After an error of `write` torch raises another one: that it cannot end the file.
        os_error = error if isinstance(error, OSError) else error.__context__
        if isinstance(os_error, OSError):
            raise os_error from error
        raise TrainingError(
            f"the module cannot be pickled: {error}",
            hint="use --save full, which does not pickle the class",
        ) from error


_WEIGHT_OPTIONS = (
    *("data", "target", "model", "loss", "sync_batchnorm", "dtype", "seed", "batch_size"),
    *("accumulate", "optimizer", "lr", "momentum", "weight_decay", "schedule", "step_size"),
    *("gamma", "warmup", "amp", "clip", "ema"),
)
"""The options that change the weights of a run, not its place or length."""


class _ChangedOption(NamedTuple):
    """An option that differs between the saved run and this one."""

    name: str
    saved: Any
    current: Any


class Checkpoints:
    """Writes `last.pth`, `best.pth` and `step-%08d.pth` in the folder of a run; resumes a run.

    All processes make the same calls; an error in rank 0 is raised in all of them.
    """

    def __init__(
        self,
        config: TrainConfig,
        strategy: Strategy,
        batches: Batches,
        observer: Observer,
        extra_values: dict[str, Any],
    ) -> None:
        """Store the parts of the run; every `full` checkpoint gets the `extra_values` by key."""
        self._config, self._strategy, self._observer = config, strategy, observer
        self._batches, self._extra_values = batches, extra_values
        self._ranks = strategy.world.ranks
        self._numbered_at = time.monotonic()  # the last `step-*`, or the start

    @contextmanager
    def begin_run(self) -> Iterator[TrainingProgress]:
        """Make the folder of the run and lock out other runs; resume the run of `resume`.

        The folder must not contain another run; with `overwrite` that is removed. A file with the
        size of a checkpoint is written and removed.

        Raises:
            FileBusy: another run uses the folder.
            WriteError: the folder cannot be made or written, or is a file.
            TrainingError: there is another run, all checkpoints of a folder are damaged, or
                `save="module"` cannot pickle the module.
            FileMissing: no such file.
            UnreadableFile: it is damaged, or not a checkpoint.
            MatchError: it is of another architecture; model and optimizer are unchanged.
        """
        with ExitStack() as stack:  # of rank 0, which locks the folder until the end of the run
            self._ranks.run_on_first(lambda: stack.enter_context(hold_run_folder(self._config.out)))
            if self._config.save == "module":
                module = self._strategy.gather_module()
                # A trial: `len` takes the bytes and drops them.
                self._ranks.run_on_first(lambda: _pickle(module, write=len))
            size = estimate_size(self._strategy)
            self._ranks.run_on_first(lambda: require_writable(self._config.out, size))
            yield self._start_or_resume()

    def _start_or_resume(self) -> TrainingProgress:
        """Resume from the checkpoint of `resume`, if any, and return the progress of the run.

        Checkpoints of other runs in the folder are refused, or removed with `overwrite`.
        """
        origin = self._choose_origin()
        progress = TrainingProgress() if origin is None else self._restore(origin)
        out, overwrite = self._config.out, self._config.overwrite
        is_auto = self._config.resume == "auto"  # all checkpoints in `out` are of this run
        if is_auto and (origin is not None or not overwrite):
            return progress
        self._ranks.run_on_first(
            lambda: require_one_run(out, origin=origin, step=progress.step, overwrite=overwrite)
        )
        return progress

    @property
    def is_due(self) -> bool:
        """True if `save_seconds` have passed since the last numbered checkpoint."""
        seconds = self._config.save_seconds
        return seconds is not None and time.monotonic() - self._numbered_at >= seconds

    def write_numbered(self, progress: TrainingProgress) -> None:
        """Write the checkpoint of this step, and remove the oldest ones beyond `keep`."""
        self.write(f"step-{progress.step:08d}", progress)
        self._numbered_at = time.monotonic()
        self._ranks.run_on_first(lambda: remove_numbered(self._config.out, self._config.keep))

    def path(self, name: str) -> str:
        """Return the path of `last`, `best` or a numbered checkpoint; with `sharded` a folder."""
        return os.path.join(self._config.out, name if self._config.sharded else f"{name}.pth")

    def write(self, name: str, progress: TrainingProgress) -> None:
        """Write `last`, `best` or a numbered checkpoint, by the options `sharded` and `save`.

        A file `last.pth` replaces a folder `last` of earlier steps, and the reverse.

        Raises:
            TrainingError: a weight is infinite or NaN.
        """
        path = self.path(name)
        if not all(self._ranks.collect(self._strategy.tuning.has_finite_weights)):
            raise TrainingError(
                f"a weight is not finite after step {progress.step}: {name} was not written",
                hint=DIVERGED,
            )
        strategy = self._strategy
        # One process trains in a script that connected several: then only the first is saved.
        random_states = self._ranks.collect(get_random_state())[: strategy.world.size]
        values = {
            "epoch": progress.epoch,
            "step": progress.step,
            **strategy.tuning.state(),
            "rng": random_states,
            "sampler": {**asdict(self._batches), "position": progress.position},
            "progress": asdict(progress),
            **self._extra_values,
        }
        if self._config.sharded:
            optimizer = strategy.tuning.optimizer
            sharded.write_folder(path, strategy.module, optimizer, values, self._ranks)
        elif self._config.save == "full":
            ckptool.save(path, model=strategy.model, optimizer=strategy.tuning.optimizer, **values)
        else:
            contents = _make_script_contents(self._config.save, strategy, progress.epoch)

            def write() -> None:
                """Write a file of `torch.save`, atomically."""
                with open_atomic_output(path, None, overwrite=True) as output:
                    _pickle(contents, output.write)

            self._ranks.run_on_first(write)
        other_form = os.path.join(self._config.out, f"{name}.pth" if self._config.sharded else name)
        self._ranks.run_on_first(lambda: remove_checkpoint(other_form))
        self._observer.tell(Saved(path, progress.epoch, progress.step))

    def _choose_origin(self) -> str | None:
        """Return the checkpoint to resume from, in a folder the newest undamaged one; or None."""
        resume = self._config.resume
        if resume is None:
            return None
        path, notes = self._ranks.run_on_first(lambda: self._find_newest(resume))
        for note in notes:
            self._observer.tell(Note(note))
        return path

    def _find_newest(self, resume: str) -> tuple[str | None, list[str]]:
        """Return the newest undamaged checkpoint that `resume` names, and notes for the user.

        `resume` is a folder of checkpoints, or "auto" for that of this run, which may have none:
        then the checkpoint is None. Any other path is a checkpoint itself, and returned unchecked.
        """
        is_auto = resume == "auto"
        folder = self._config.out if is_auto else resume
        problems: list[str] = []
        for path, _ in list_checkpoints(folder):
            problem = sharded.find_damage(path)
            if problem is None:
                return path, [f"skipped {text}" for text in problems]
            problems.append(problem)
        if not (problems or is_auto):
            return resume, []
        starts_over = is_auto and self._config.overwrite
        if problems and not starts_over:
            raise TrainingError(
                f"no checkpoint in {folder} is readable: {problems[0]}",
                hint="salvage a file with ckptool convert --salvage, or start over with --force",
            )
        note = f"{folder} has no checkpoint to resume from: training starts from the beginning"
        return None, [note]

    def _restore(self, path: str) -> TrainingProgress:
        """Fill the model and the tuning from `path`, and return the progress of the saved run.

        A file that is not a `full` checkpoint has only the weights, and the optimizer state if it
        fits; training resumes at the start of an epoch.
        """
        with self._ranks.raise_on_all_ranks("training was not started"):
            values = self._read_values(path)
            missing = self._fill_model(path, values)
            progress = self._read_progress(values, path)
        missing += self._strategy.tuning.restore(values, step=progress.step)
        missing += self._reseed(values, progress)
        if "progress" not in values:
            missing.append("progress")
        self._observer.tell(Resumed(path, progress.epoch, progress.step, tuple(missing)))
        self._report_differences(values, progress)
        return progress

    def _read_values(self, path: str) -> dict[str, Any]:
        """Return the values that `write` added to model and optimizer; {} for another file."""
        if sharded.is_sharded(path):
            average = self._strategy.tuning.average
            return sharded.load_values(path, {} if average is None else average.state())
        with ckptool.open(path) as checkpoint:
            is_full = isinstance(checkpoint.root, dict) and "progress" in checkpoint.root
            if not is_full:  # written by a script, or with another option `save`
                return {}
            values = {
                key: value
                for key, value in checkpoint.root.items()
                if key not in ("state_dict", "optimizer")
            }
            return cast("dict[str, Any]", ckptool.load(checkpoint.with_root(values)))

    def _load_weights(self, path: str, optimizer: torch.optim.Optimizer | None) -> None:
        """Fill model and optimizer; note parameters that were matched by position, not by name."""
        module = self._strategy.module
        if not sharded.is_sharded(path):
            report = ckptool.load_into(module, path, optimizer=optimizer).optimizer
            if report is not None and report.by == "position":
                self._observer.tell(
                    Note(f"{path} has no parameter names for the optimizer: matched by position")
                )
            return
        sharded.load_model(path, module)
        if optimizer is not None:
            sharded.load_optimizer(path, module, optimizer)

    def _read_progress(self, values: Mapping[str, Any], path: str) -> TrainingProgress:
        """Return the saved progress; for a file without it, the start of its `epoch` (default 0).

        Counters that only another version of ckptool has are left out.
        """
        if "progress" in values:
            known = {field.name for field in fields(TrainingProgress)}
            return TrainingProgress(
                **{key: value for key, value in values["progress"].items() if key in known}
            )
        epoch = _read_counter(path, "epoch") or 0
        return TrainingProgress(epoch=epoch, step=epoch * self._batches.steps)

    def _fill_model(self, path: str, values: Mapping[str, Any]) -> list[str]:
        """Fill model and optimizer; return `["optimizer"]` if the file lacks a state that fits.

        Raises:
            MatchError: the weights do not fit; the hint names the options of the saved run.
        """
        try:
            self._load_weights(path, self._strategy.tuning.optimizer)
            return []
        except (MatchError, NotFound):  # it may be the optimizer's: try again without it
            pass
        try:
            self._load_weights(path, None)
        except MatchError as error:
            self._explain_misfit(error, path, values)
            raise
        return ["optimizer"]

    def _explain_misfit(self, error: MatchError, path: str, values: Mapping[str, Any]) -> None:
        """Write the message of an error in one line, and give it a hint.

        The hint names the options of the saved run that decide whether its weights fit.
        """
        changed = self._find_changed_options(values, ("model", "data", "dtype"))
        arguments = [f"--{option.name} {shlex.quote(option.saved)}" for option in changed]
        report = error.report
        if report and not (report.missing_keys or report.unexpected_keys or report.mismatched):
            arguments = ["--dtype float64"]  # the weights fit, but would be rounded
        match = f"compare them with ckptool match {shlex.quote(path)} --like module:factory"
        error.advise(f"use {' '.join(arguments)}, as in the checkpoint" if arguments else match)
        error.message = "; ".join(error.message.splitlines())
        error.args = (error.message,)

    def _find_changed_options(
        self, values: Mapping[str, Any], names: Iterable[str]
    ) -> Iterator[_ChangedOption]:
        """Yield those of the named options that differ from the saved run.

        An option that the saved run does not have is not yielded.
        """
        saved = values.get("config", {})
        for name in names:
            current = getattr(self._config, name)
            if saved.get(name, current) != current:
                yield _ChangedOption(name, saved[name], current)

    def _reseed(self, values: Mapping[str, Any], progress: TrainingProgress) -> list[str]:
        """Restore the random state of each process; return `["rng"]` if that is not possible.

        It is not possible if another number of processes saved theirs. Then each process gets a
        new seed, which depends on the step: with the seed of the start it would draw the same
        numbers again.
        """
        world = self._strategy.world
        states = values.get("rng", [])
        if len(states) == world.size:
            restore_random_state(states[world.rank])
            return []
        seed_all(self._config.seed + world.rank + world.size * progress.step)
        return ["rng"]

    def _report_differences(self, values: Mapping[str, Any], progress: TrainingProgress) -> None:
        """Report changed options; restart the epoch if its batches differ from the saved run."""
        names = [*_WEIGHT_OPTIONS]
        if self._config.schedule in ("linear", "cosine"):  # the rate is 0 at the end of the run
            names += ["epochs", "max_steps"]
        changes = [
            f"{option.name} {option.saved} -> {option.current}"
            for option in self._find_changed_options(values, names)
        ]
        if changes:
            self._observer.tell(Note(f"options differ from the saved run: {', '.join(changes)}"))
        saved_batches = values.get("sampler", {})
        has_same_batches = asdict(self._batches).items() <= saved_batches.items()
        if progress.position and not has_same_batches:
            progress.begin_epoch()
            self._observer.tell(
                Note(f"epoch {progress.epoch + 1} is restarted, because its batches have changed")
            )
