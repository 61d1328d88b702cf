"""Files damaged at random, held against what `verify` says of them."""

import random
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from tests.damage import SAMPLES, Damaged


@dataclass
class Damages:
    """What came of damaging files of one kind."""

    kind: str
    count: int
    """Of each way."""
    found: int = 0
    """Of all of them, those that `verify` does not call fine."""
    uncovered: int = 0
    """Bits that were turned over where nothing covers them, and are called fine."""
    failures: list[str] = field(default_factory=list)

    def columns(self):
        return self.found, self.uncovered


def damage(kind, count, folder, seed):
    """Turn bits over, cut and splice files of one kind, `count` times each."""
    chance = random.Random(f"{kind} {seed}")
    done = Damages(kind, count)
    with tempfile.TemporaryDirectory(dir=folder) as below, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about what it reads
        damaged = Damaged(kind, Path(below))
        others = list(everything(Path(below) / "others"))
        ways = (damaged.flip, damaged.cut, lambda chance: damaged.splice(chance, others))
        for _ in range(count):
            for way in ways:
                fault = way(chance)
                done.found += damaged.code != 0
                done.uncovered += damaged.code == 0 and way == damaged.flip
                if fault is not None:
                    done.failures.append(fault)
    return done


def everything(folder):
    """The bytes of every file of every sample."""
    for number, kind in enumerate(SAMPLES):
        (folder / f"{number}").mkdir(parents=True)
        yield from Damaged(kind, folder / f"{number}").whole.values()
