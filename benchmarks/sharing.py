"""`python -m benchmarks.sharing [BYTES]`: new files on a file system that shares blocks.

Makes an XFS in a file, mounts it (which root alone may), and writes what is changed in a large
checkpoint to new files there. Each must end within 0.25 s and take less than 10 MB of the disk.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.timing import Command, run

__all__ = ["main"]

MOST_SECONDS, MOST_BYTES = 0.25, 10 * 10**6
WORKS = {
    "cp --reflink": (),
    "strip-module": ("strip-module",),
    "remap": ("remap", "--to", "cpu"),
    "rename": ("rename", "--prefix", "module=net"),
    "add-module": ("add-module",),
    "extract --model-only": ("extract", "--model-only"),
}

RUN = """
import sys, torch
from pathlib import Path
from benchmarks.inputs import save_tagged, views

size = int(sys.argv[2])
moments = [views(torch.float16, size // 3, bytes(range(256)) * 4096) for _ in range(2)]
state = {
    number: {"step": torch.tensor(1.0), "exp_avg": one, "exp_avg_sq": two}
    for number, (one, two) in enumerate(zip(*(moment.values() for moment in moments)))
}
groups = [{"lr": 0.1, "params": list(state)}]
model = views(torch.float16, size // 3, bytes(range(256)) * 4096)
whole = {"model": model, "optimizer": {"state": state, "param_groups": groups}, "epoch": 1}
save_tagged(whole, Path(sys.argv[1]))
"""


@contextmanager
def mounted(size: int) -> Iterator[Path]:
    """Give an empty XFS of `size` bytes, which takes no more room than what is written to it."""
    with tempfile.TemporaryDirectory() as folder:
        image, place = Path(folder, "xfs.img"), Path(folder, "xfs")
        image.touch()
        place.mkdir()
        for command in (
            ["truncate", "-s", str(size), str(image)],
            ["mkfs.xfs", "-q", "-m", "reflink=1", str(image)],
            ["mount", "-o", "loop", str(image), str(place)],
        ):
            subprocess.run(command, check=True)
        try:
            yield place
        finally:
            subprocess.run(["umount", str(place)], check=True)


def main() -> int:
    """Measure every work five times, and print medians; 1 if one takes too much."""
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 5 * 10**9
    if shutil.which("mkfs.xfs") is None:
        print("skipped: mkfs.xfs is not installed")
        return 0
    missed = False
    with mounted(3 * size + 10**9) as place:
        source, run_file = place / "large.pth", place / "run.pth"
        made = "-m", "benchmarks.inputs", "large"
        subprocess.run([sys.executable, *made, str(source), str(size)], check=True)
        subprocess.run([sys.executable, "-c", RUN, str(run_file), str(size)], check=True)
        for name, words in WORKS.items():
            seconds, taken = [], []
            for number in range(5):
                target = place / f"{name}-{number}.pth"
                subprocess.run(["sync"], check=True)
                before = shutil.disk_usage(place).free
                command = Command.system(name, *name.split(), source, target)
                if words:
                    read = run_file if words[0] == "extract" else source
                    command = Command.ckptool(words[0], read, *words[1:], "-o", target)
                seconds.append(run(command).seconds)
                subprocess.run(["sync"], check=True)
                taken.append(before - shutil.disk_usage(place).free)
            median, most = statistics.median(seconds), max(taken)
            print(f"{name:24}{median:8.3f} s {most:12,} bytes of {source.stat().st_size:,}")
            missed |= median > MOST_SECONDS or most > MOST_BYTES
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
