"""One target, fuzzed by atheris until its time is over; what came of it goes into a JSON file.

    python -m tests.soak.fuzz_worker TARGET TALLY CORPUS [libFuzzer's options]

An input that raises what it must not, or that takes too long, is kept beside the tally. The
current folder is for what targets write; the other paths are absolute.
"""

import hashlib
import json
import os
import pkgutil
import resource
import signal
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

import atheris

import ckptool

PATIENCE = 10
"""Seconds of the processor for one input."""
MEMORY = 4 << 30
"""Bytes of address space beyond what is taken at the start."""
OFTEN = 500
"""Inputs between two writes of the tally."""


def instrument():
    """Import the library such that atheris sees which way an input takes."""
    with atheris.instrument_imports(include=["ckptool"]):
        for module in pkgutil.walk_packages(ckptool.__path__, "ckptool."):
            if ".trainer" not in module.name and "__main__" not in module.name:
                import_module(module.name)


class Hang(BaseException):
    """An input that takes too long."""


class Tally:
    """What came of the inputs so far."""

    def __init__(self, path):
        self.path = path
        self.inputs = self.crashes = self.hangs = 0
        self.slowest = 0.0
        self.reasons = {}

    def add(self, seconds):
        self.inputs += 1
        self.slowest = max(self.slowest, seconds)
        if self.inputs % OFTEN == 0:
            self.write()

    def keep(self, data, error):
        """One that went wrong; of each reason the first."""
        self.hangs += isinstance(error, Hang)
        self.crashes += not isinstance(error, Hang)
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        if self.reasons.setdefault(f"{type(error).__name__} {place[:2]}", reason) == reason:
            name = hashlib.sha256(data).hexdigest()[:16]
            self.path.with_name(f"{self.path.stem}-{name}").write_bytes(data)
        self.write()

    def write(self):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        told = {**vars(self), "path": None, "peak": peak}
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(told), encoding="utf-8")
        part.replace(self.path)


def main():
    name, tally_path, corpus, *options = sys.argv[1:]
    instrument()
    from tests.soak.targets import LONGEST, TARGETS, prepare, watch

    target, tally = TARGETS[name], Tally(Path(tally_path))

    def hang(*_):
        raise Hang(f"more than {PATIENCE} s")

    def one(data):
        begin = time.perf_counter()
        signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE)
        try:
            target.check(data)
        except (Exception, Hang) as error:
            tally.keep(data, error)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            tally.add(time.perf_counter() - begin)

    signal.signal(signal.SIGVTALRM, hang)
    own = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (own + MEMORY, own + MEMORY))
    prepare()
    watch()
    flags = [f"-max_len={LONGEST}", "-timeout=0", "-rss_limit_mb=0", "-len_control=0"]
    flags.append(f"-artifact_prefix={tally.path.with_name('tally-')}")
    atheris.Setup([sys.argv[0], corpus, *flags, *options], one, enable_python_coverage=True)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
