"""Every target fuzzed for a while, from the corpus that is kept and from the fixtures."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.soak.targets import TARGETS
from tests.soak.thinning import without_keys
from tests.sources import PROJECT

CORPUS = Path(__file__).with_name("corpus")
"""A zip for each target: inputs that took a way of their own, small ones, found by former runs."""
KEPT = 4096
"""Bytes of an input that is kept, at most."""


@dataclass
class Fuzzed:
    """What came of fuzzing one target."""

    kind: str
    inputs: int
    crashes: int
    hangs: int
    slowest: float
    peak: int
    corpus: int
    failures: list[str]
    """Each reason once."""


def kept(name):
    """The inputs of a target that are kept."""
    path = CORPUS / f"{name}.zip"
    if not path.exists():
        return []
    with zipfile.ZipFile(path) as archive:
        return [archive.read(one) for one in archive.namelist()]


def keep(name, inputs):
    """Keep these and no others, the same file for the same inputs."""
    CORPUS.mkdir(exist_ok=True)
    with zipfile.ZipFile(CORPUS / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for data in sorted(inputs, key=lambda data: (len(data), data)):
            archive.writestr(zipfile.ZipInfo(hashlib.sha256(data).hexdigest()[:16]), data)


def put(inputs, folder):
    """Each input as a file, named as libFuzzer names it."""
    folder.mkdir(parents=True, exist_ok=True)
    for data in inputs:
        (folder / hashlib.sha1(data, usedforsecurity=False).hexdigest()).write_bytes(data)
    return folder


def fuzz(name, seconds, above):
    """Fuzz one target, and keep what is worth it."""
    folder = above / name
    grown = put([*TARGETS[name].seeds(), *kept(name)], folder / "grown")
    tally = folder / "tally.json"
    _worker(name, tally, grown, f"-max_total_time={seconds}")
    told = json.loads(tally.read_text(encoding="utf-8"))
    wrong = list(folder.glob("tally-*"))
    inputs = [path.read_bytes() for path in grown.iterdir()]
    with ProcessPoolExecutor(1, get_context("spawn")) as alone:
        small = [data for data in inputs if len(data) <= KEPT]
        keep(name, alone.submit(without_keys, name, small).result())
    for path in wrong:
        print(f"{name}: {path} went wrong", file=sys.stderr)
    counts = (told[one] for one in ("inputs", "crashes", "hangs", "slowest", "peak"))
    return Fuzzed(name, *counts, len(kept(name)), list(told["reasons"].values()))


def _worker(name, tally, corpus, *options):
    words = [sys.executable, "-m", "tests.soak.fuzz_worker", name, str(tally), str(corpus)]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    log = tally.with_suffix(".log")
    with log.open("w") as said, TemporaryDirectory(prefix="fuzz-", dir="/dev/shm") as folder:
        done = subprocess.run(
            [*words, *options], cwd=folder, env=environment, stdout=said, stderr=said, check=False
        )
    if done.returncode:
        raise RuntimeError(f"{name}: {log.read_text(errors='replace')[-2000:]}")


def fuzz_all(seconds, jobs, above):
    """Every target, some at a time, in about so many seconds together."""
    each = max(1, seconds * jobs // len(TARGETS))
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda name: fuzz(name, each, above), TARGETS))
