"""Commands that are killed at random times, and what they leave."""

import hashlib
import os
import random
import shutil
import subprocess
import sys
import time
import warnings
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from ckptool.errors import CheckpointWarning, FileMissing
from ckptool.files.editing import Edit
from ckptool.files.journal import write_journal
from ckptool.formats import load_format, open_checkpoint
from ckptool.inspection.listing import list_tensors
from ckptool.transforms import Strip
from tests.soak.works import MIXED, MIXTURE, TENSORS, WORKS

PROJECT = Path(__file__).parent.parent.parent
WHILE_IT_WRITES = 0.75
"""Of all kills, those while files of its own are there; the others come at any time at all."""
REFUSALS = ("is being edited by process ", "is being written by process ", " meanwhile", "changed ")


@dataclass
class Tally:
    """What came of the kills of one kind."""

    kind: str
    seconds: float = 0.0
    """Of a run that is not killed."""
    found: Counter = field(default_factory=Counter)
    """`kills`, `cut` (it had begun to write), `old`, `new`, `settled` (by who opened it next)."""
    failures: list[str] = field(default_factory=list)


def command(arguments, folder):
    """Start `ckptool` as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "ckptool", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def hidden(folder):
    """The files of ckptool's own."""
    return {entry.name for entry in os.scandir(folder) if ".ckptool-" in entry.name}


def digest(path):
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def digests(folder):
    """The contents of all other files, by name."""
    return {
        entry.name: digest(entry.path)
        for entry in os.scandir(folder)
        if ".ckptool-" not in entry.name
    }


def torch_reads(path):
    """Refuse what torch, or the library of safetensors, does not load."""
    if path.suffix == ".safetensors":
        load_file(path)
    elif path.suffix == ".pth":
        torch.load(path, map_location="cpu", weights_only=True)


class Killed:
    """One kind of work in a folder of its own."""

    def __init__(self, kind, work, sources, folder, seed):
        self.work, self.sources, self.folder = work, sources, folder
        self.chance = random.Random(seed)
        self.tally = Tally(kind)
        self.loaded = set()
        self.patch = None
        self.there = {}
        folder.mkdir()
        self.old = {name: digest(sources / source) for name, source in work.before}
        self.new, self.writing = self.measure()

    def measure(self):
        """What it leaves when it is not killed; the seconds in which it writes."""
        times = []
        for _ in range(3):
            self.lay()
            before, begin = hidden(self.folder), time.perf_counter()
            process = command(self.work.arguments, self.folder)
            first = self.wait_for_files(process, before)
            while process.poll() is None and hidden(self.folder) > before:
                time.sleep(0.0002)
            last = time.perf_counter()
            _, err = process.communicate()
            assert process.returncode == 0, err
            times.append((time.perf_counter() - begin, last - first))
            self.there = digests(self.folder)
        self.tally.seconds = min(whole for whole, _ in times)
        self.check_loads()
        return self.there, min(writing for _, writing in times)

    def wait_for_files(self, process, before):
        """When the first file of its own appears that was not there before, or it ends."""
        while process.poll() is None and hidden(self.folder) <= before:
            time.sleep(0.0002)
        return time.perf_counter()

    def lay(self):
        """Put the files back that are not as they were before."""
        for name in self.there.keys() - self.old.keys():
            (self.folder / name).unlink()
        for name, source in self.work.before:
            if self.there.get(name) != self.old[name]:
                shutil.copyfile(self.sources / source, self.folder / name)
        self.there = dict(self.old)
        if self.work.cut_short:
            self.cut_short()

    def cut_short(self):
        """Leave the target as a kill in the middle of an edit does."""
        path = self.folder / self.work.target
        if self.patch is None:
            with open_checkpoint(path) as checkpoint:
                self.patch = load_format("torch-zip").plan_edit(Strip()(checkpoint)).patch
        with open(path, "r+b", buffering=0) as file:
            edit = Edit.from_patch(file.fileno(), self.patch)
            write_journal(str(path), edit.to_journal())
            file.seek(edit.offset)
            file.write(self.patch.data[: self.chance.randrange(len(self.patch.data))])

    def run(self, kills):
        """Kill it so many times; a run that ends before counts for nothing."""
        while self.tally.found["kills"] < kills and not self.tally.failures:
            self.lay()
            before = hidden(self.folder)
            process = command(self.work.arguments, self.folder)
            self.kill(process, before)
            _, err = process.communicate()
            if process.returncode == -9:
                self.tally.found["kills"] += 1
                self.tally.found["cut"] += bool(hidden(self.folder) - before)
            elif process.returncode:
                self.tally.failures.append(f"exit code {process.returncode}: {err}")
            self.check(process.returncode == -9)
        self.check_debris()
        return self.tally

    def kill(self, process, before):
        if self.chance.random() < WHILE_IT_WRITES:
            self.wait_for_files(process, before)
            delay = self.chance.uniform(0, 1.3 * self.writing)
        else:
            delay = self.chance.uniform(0, self.tally.seconds)
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            process.kill()

    def check(self, killed):
        """The files are the old ones or the new ones, once ckptool has opened the target."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", CheckpointWarning)
            try:
                open_checkpoint(self.folder / self.work.target).close()
            except FileMissing:
                pass
            except Exception as error:
                self.tally.failures.append(f"{type(error).__name__}: {error}")
                return
        self.there = digests(self.folder)
        state = "old" if self.there == self.old else "new" if self.there == self.new else ""
        if not state or (state == "old" and not killed and self.old != self.new):
            self.tally.failures.append(f"neither old nor new: {self.there}")
        elif killed:
            self.tally.found[state] += 1
            self.tally.found["settled"] += bool(said)
        self.check_loads()

    def check_loads(self):
        """Torch reads every file, once for each content."""
        for name, content in self.there.items():
            if content not in self.loaded:
                torch_reads(self.folder / name)
                self.loaded.add(content)

    def check_debris(self):
        """After a run that is not killed, nothing lies beside the files."""
        self.lay()
        process = command(self.work.arguments, self.folder)
        process.communicate()
        if left := hidden(self.folder):
            self.tally.failures.append(f"left: {sorted(left)}")


class Mixed:
    """Two commands at a time on one file; one of them, or both, may be killed."""

    def __init__(self, kind, sources, folder, seed):
        self.source, self.folder = sources / "model.pth", folder
        self.path = folder / "model.pth"
        self.chance = random.Random(seed)
        self.tally = Tally(kind)
        self.loaded = set()
        folder.mkdir()
        self.lay()
        self.contents = self.listing()[1]

    def lay(self):
        shutil.copyfile(self.source, self.path)

    def listing(self):
        """The wrappers before the names (of all, or several), and the rest with hashes."""
        with open_checkpoint(self.path) as checkpoint:
            tensors = list_tensors(checkpoint, hash=True).tensors
        names = [str(tensor.path[-1]) for tensor in tensors]
        bare = [name[name.index("layer") :] for name in names]
        wrappers = {name[: name.index("layer")] for name in names}
        return wrappers, {name: tensor.sha256 for name, tensor in zip(bare, tensors, strict=True)}

    def run(self, kills):
        while self.tally.found["kills"] < kills and not self.tally.failures:
            before = hidden(self.folder)
            commands = self.chance.sample(MIXTURE, 2)
            first = command(commands[0], self.folder)
            time.sleep(self.chance.uniform(0, 0.1))
            processes = [first, command(commands[1], self.folder)]
            self.kill(processes, before)
            for process in processes:
                self.check_end(process)
            self.tally.found["cut"] += bool(hidden(self.folder) - before)
            self.check()
        return self.tally

    def kill(self, processes, before):
        """Two of three, at any time at all, or soon after a file of their own appeared."""
        if self.chance.random() < WHILE_IT_WRITES:
            while None in [process.poll() for process in processes]:
                if hidden(self.folder) - before:
                    break
                time.sleep(0.0002)
            most = 0.01
        else:
            most = 0.5
        for process in processes:
            if self.chance.random() < 2 / 3:
                try:
                    process.wait(self.chance.uniform(0, most))
                except subprocess.TimeoutExpired:
                    process.kill()

    def check_end(self, process):
        _, err = process.communicate()
        self.tally.found["kills"] += process.returncode == -9
        refused = process.returncode == 2 and any(words in err for words in REFUSALS)
        self.tally.found["refused"] += refused
        if process.returncode not in (0, -9) and not refused:
            self.tally.failures.append(f"exit code {process.returncode}: {err}")

    def check(self):
        """Every name has the same wrappers, every tensor its bytes, and torch loads it."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", CheckpointWarning)
            try:
                wrappers, contents = self.listing()
            except Exception as error:
                self.tally.failures.append(f"{type(error).__name__}: {error}")
                return
        self.tally.found["settled"] += bool(said)
        if len(wrappers) != 1 or contents != self.contents or len(contents) != TENSORS:
            self.tally.failures.append(f"mixed: {wrappers}")
        if (content := digest(self.path)) not in self.loaded:
            torch_reads(self.path)
            self.loaded.add(content)
        if self.path.stat().st_size > 2 * self.source.stat().st_size or len(max(wrappers)) > 40:
            self.lay()


def soak(kind, kills, sources, folder, seed):
    """All kills of one kind."""
    seed = zlib.crc32(f"{seed} {kind}".encode())
    if kind == MIXED:
        return Mixed(kind, sources, folder, seed).run(kills)
    return Killed(kind, WORKS[kind], sources, folder, seed).run(kills)
