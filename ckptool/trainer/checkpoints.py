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
from types import SimpleNamespace
from typing import Any, cast

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

_NAME = re.compile(r"(last|best|step-(\d{8,}))(\.pth)?")


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


def list_checkpoints(folder: str) -> list[tuple[str, int | None]]:
    """Return the checkpoints of a folder with their steps, newest first.

    They are ordered by step, or by time if one has no step; checkpoints of the same step come in
    the order `last`, `step-*`, `best`.
    """
    entries = []
    for entry in os.scandir(folder) if os.path.isdir(folder) else ():
        if name := _NAME.fullmatch(entry.name):
            step = int(name[2]) if name[2] else _read_counter(entry.path, "step")
            order = ("best", "step", "last").index(entry.name[:4])
            entries.append((step, entry.stat().st_mtime_ns, order, entry.path))
    is_by_time = any(step is None for step, *_ in entries)
    entries.sort(key=lambda row: (row[1] if is_by_time else row[0] or 0, row[2]), reverse=True)
    return [(path, step) for step, *_, path in entries]


def _read_counter(path: str, key: str) -> int | None:
    """Return a count that a checkpoint has under a key, or None."""
    values = os.path.join(path, sharded.VALUES)
    try:
        with ckptool.open(values if os.path.exists(values) else path) as checkpoint:
            number = checkpoint.root.get(key) if isinstance(checkpoint.root, dict) else None
    except CheckpointError:
        return None
    return number if type(number) is int and number >= 0 else None


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
        recover_folders(folder, _NAME, sharded.VALUES)
        yield


class _NotWritten(Exception):
    pass


def require_writable(folder: str, size: int = 1) -> None:
    """Write a file of `size` bytes in the folder and remove it before it gets its name.

    Raises:
        WriteError: it cannot be written.
        FileBusy: another process is changing the file.
    """
    target = os.path.join(folder, "last.pth")
    with suppress(_NotWritten), open_atomic_output(target, size, overwrite=True):
        raise _NotWritten


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
    parent = origin and os.path.realpath(os.path.dirname(os.path.abspath(origin)))
    is_within = origin is not None and parent == os.path.realpath(folder)
    origin = origin and os.path.realpath(origin)
    others = [
        path
        for path, reached_step in list_checkpoints(folder)
        if os.path.realpath(path) != origin
        and not (is_within and reached_step is not None and reached_step <= step)
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
    """Remove all but the last `keep` checkpoints `step-*`."""
    numbered = [
        match
        for match in map(_NAME.fullmatch, os.listdir(folder))
        if match is not None and match[2]
    ]
    for match in sorted(numbered, key=lambda name: int(name[2]))[:-keep]:
        remove_checkpoint(os.path.join(folder, match[0]))


def remove_checkpoint(path: str) -> None:
    """Remove a checkpoint, a file or a folder, if there is one."""
    with convert_os_errors(path), suppress(FileNotFoundError):
        if os.path.isdir(path) and not os.path.islink(path):
            remove_folder(path)
        else:
            os.unlink(path)


def estimate_size(strategy: Strategy) -> int:
    """Return the approximate size of a checkpoint, with the future state of the optimizer."""
    config = strategy.config
    moments = int(config.momentum > 0) if config.optimizer == "sgd" else 2
    copies = 1 + int(config.ema is not None)
    parameters = sum(
        tensor.numel() * tensor.element_size() for tensor in strategy.module.parameters()
    )
    buffers = sum(tensor.numel() * tensor.element_size() for tensor in strategy.module.buffers())
    return parameters * (copies + moments) + buffers * copies


def _make_contents(kind: str, strategy: Strategy, values: Mapping[str, Any]) -> Any:
    """Return the object that user scripts save: the module, or its state dict."""
    if kind == "module":
        return strategy.gather_module()
    model, optimizer = strategy.gather_state()
    if kind == "wrapped":
        return {"epoch": values["epoch"], "state_dict": model, "optim_dict": optimizer}
    if strategy.model is not strategy.module:
        nn.modules.utils.consume_prefix_in_state_dict_if_present(model, "module.")
    return {"state_dict_model": model}


def _pickle(contents: Any, write: Callable[[bytes], object]) -> None:
    """Pass the bytes of `torch.save`, with torch's device tags, to `write`."""
    try:
        torch.save(contents, SimpleNamespace(write=write, flush=lambda: None))
    except Exception as error:  # of any class in the module
        os_error = error if isinstance(error, OSError) else error.__context__
        if isinstance(os_error, OSError):  # torch raises that it cannot end the file
            raise os_error from error
        raise TrainingError(
            f"the module cannot be pickled: {error}",
            hint="use --save full, which does not pickle the class",
        ) from error


_NUMERIC_OPTIONS = (
    *("data", "target", "model", "loss", "sync_batchnorm", "dtype", "seed", "batch_size"),
    *("accumulate", "optimizer", "lr", "momentum", "weight_decay", "schedule", "step_size"),
    *("gamma", "warmup", "amp", "clip", "ema"),
)
"""The options that change the weights of a run, not its place or length."""


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
        belongings: dict[str, Any],
    ) -> None:
        """Store the parts of the run; every `full` checkpoint gets the values in `belongings`."""
        self._config, self._strategy, self._observer = config, strategy, observer
        self._batches, self._belongings = batches, belongings
        self._ranks = strategy.world.ranks
        self._saved_at = time.monotonic()

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
        with ExitStack() as stack:
            self._ranks.run_on_first(lambda: stack.enter_context(hold_run_folder(self._config.out)))
            if self._config.save == "module":
                module = self._strategy.gather_module()
                self._ranks.run_on_first(lambda: _pickle(module, len))
            size = estimate_size(self._strategy)
            self._ranks.run_on_first(lambda: require_writable(self._config.out, size))
            yield self._start_or_resume()

    def _start_or_resume(self) -> TrainingProgress:
        """Resume from the checkpoint of `resume`, if any, and return the progress of the run."""
        origin = self._choose_origin()
        progress = TrainingProgress() if origin is None else self._restore(origin)
        out = self._config.out
        is_auto = self._config.resume == "auto"  # the checkpoints there are of this run
        overwrite = self._config.overwrite and not (is_auto and origin)
        if overwrite or not is_auto:
            self._ranks.run_on_first(
                lambda: require_one_run(out, origin=origin, step=progress.step, overwrite=overwrite)
            )
        return progress

    @property
    def is_due(self) -> bool:
        """True if `save_seconds` have passed since the last numbered checkpoint."""
        seconds = self._config.save_seconds
        return seconds is not None and time.monotonic() - self._saved_at >= seconds

    def write_numbered(self, progress: TrainingProgress) -> None:
        """Write the checkpoint of this step, and remove the oldest ones beyond `keep`."""
        self.write(f"step-{progress.step:08d}", progress)
        self._saved_at = time.monotonic()
        self._ranks.run_on_first(lambda: remove_numbered(self._config.out, self._config.keep))

    def path(self, name: str) -> str:
        """Return the path of `last`, `best` or a numbered checkpoint."""
        return os.path.join(self._config.out, name if self._config.sharded else f"{name}.pth")

    def write(self, name: str, progress: TrainingProgress) -> None:
        """Write `last`, `best` or a numbered checkpoint; a file replaces a folder of that name.

        Raises:
            TrainingError: a weight is infinite or NaN.
        """
        path = self.path(name)
        if not all(self._ranks.collect(self._strategy.tuning.has_finite_weights)):
            raise TrainingError(
                f"a weight is not finite after step {progress.step}: {name} was not written",
                hint=DIVERGED,
            )
        values = {
            "epoch": progress.epoch,
            "step": progress.step,
            **self._strategy.tuning.state(),
            "rng": self._ranks.collect(get_random_state())[: self._strategy.world.size],
            "sampler": {**asdict(self._batches), "position": progress.position},
            "progress": asdict(progress),
            **self._belongings,
        }
        strategy = self._strategy
        if self._config.sharded:
            optimizer = strategy.tuning.optimizer
            sharded.write_folder(path, strategy.module, optimizer, values, self._ranks)
        elif self._config.save == "full":
            ckptool.save(path, model=strategy.model, optimizer=strategy.tuning.optimizer, **values)
        else:
            contents = _make_contents(self._config.save, strategy, values)

            def write() -> None:
                """Write a file of `torch.save`, atomically."""
                with open_atomic_output(path, None, overwrite=True) as output:
                    _pickle(contents, output.write)

            self._ranks.run_on_first(write)
        other = path.removesuffix(".pth") if path.endswith(".pth") else f"{path}.pth"
        self._ranks.run_on_first(lambda: remove_checkpoint(other))
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
        """Return the newest undamaged checkpoint in a folder or `auto`, or None, and notes."""
        is_auto = resume == "auto"
        out = self._config.out if is_auto else resume
        problems: list[str] = []
        for path, _ in list_checkpoints(out):
            problem = sharded.find_damage(path)
            if problem is None:
                return path, [f"skipped {text}" for text in problems]
            problems.append(problem)
        if not (problems or is_auto):
            return resume, []
        if problems and not (self._config.overwrite and is_auto):
            raise TrainingError(
                f"no checkpoint in {out} is readable: {problems[0]}",
                hint="salvage a file with ckptool convert --salvage, or start over with --force",
            )
        return None, [f"{out} has no checkpoint to resume from: training starts from the beginning"]

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
            if not isinstance(checkpoint.root, dict) or "progress" not in checkpoint.root:
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
        """Return the saved progress; of a file without it, the start of its epoch."""
        if "progress" in values:
            known = {field.name for field in fields(TrainingProgress)}
            return TrainingProgress(
                **{key: value for key, value in values["progress"].items() if key in known}
            )
        epoch = _read_counter(path, "epoch") or 0
        return TrainingProgress(epoch=epoch, step=epoch * self._batches.steps)

    def _fill_model(self, path: str, values: Mapping[str, Any]) -> list[str]:
        """Fill model and optimizer; return `["optimizer"]` if the file lacks its state.

        Raises:
            MatchError: the weights do not fit; the hint names the options of the saved run.
        """
        try:
            self._load_weights(path, self._strategy.tuning.optimizer)
            return []
        except (MatchError, NotFound):  # raised again below if it is the model's
            pass
        try:
            self._load_weights(path, None)
        except MatchError as error:
            words = [
                f"--{name} {shlex.quote(then)}"
                for name, then, _ in self._find_changed_options(values, ("model", "data", "dtype"))
            ]
            report = error.report
            if report and not (report.missing_keys or report.unexpected_keys or report.mismatched):
                words = ["--dtype float64"]  # the weights fit, but would be rounded
            match = f"compare them with ckptool match {shlex.quote(path)} --like module:factory"
            error.advise(f"use {' '.join(words)}, as in the checkpoint" if words else match)
            error.message = "; ".join(error.message.splitlines())
            error.args = (error.message,)
            raise
        return ["optimizer"]

    def _find_changed_options(
        self, values: Mapping[str, Any], names: Iterable[str]
    ) -> Iterator[tuple[str, Any, Any]]:
        """Yield the options that differ from the saved run: name, saved and current value."""
        saved = values.get("config", {})
        for name, current in ((name, getattr(self._config, name)) for name in names):
            if saved.get(name, current) != current:
                yield name, saved[name], current

    def _reseed(self, values: Mapping[str, Any], progress: TrainingProgress) -> list[str]:
        """Restore the random state of each process if as many processes saved it.

        Else use new seeds: with the first ones the run would draw the same numbers again.
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
        is_by_length = self._config.schedule in ("linear", "cosine")
        names = (*_NUMERIC_OPTIONS, *(("epochs", "max_steps") if is_by_length else ()))
        changes = [
            f"{name} {saved} -> {current}"
            for name, saved, current in self._find_changed_options(values, names)
        ]
        if changes:
            self._observer.tell(Note(f"options differ from the saved run: {', '.join(changes)}"))
        sampler = values.get("sampler", {})
        if progress.position and not asdict(self._batches).items() <= sampler.items():
            progress.begin_epoch()
            self._observer.tell(
                Note(f"epoch {progress.epoch + 1} is restarted, because its batches have changed")
            )
