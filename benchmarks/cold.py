"""`python -m benchmarks.cold [BYTES]`: files that are not in the page cache, beside `dd`.

The page cache is dropped before each run, which root alone may do. The measure is what four `dd`,
each of a quarter of the file, read at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.timing import Command, measure, ratio

__all__ = ["main"]

DROP = Path("/proc/sys/vm/drop_caches")
READERS = 4
READ = """
set -e
blocks=$(( $(stat -c %s "$1") / 1048576 / $2 + 1 ))
for part in $(seq 0 $(( $2 - 1 ))); do
    dd if="$1" of=/dev/null bs=1M skip=$(( part * blocks )) count=$blocks status=none &
done
wait
"""

LOAD = """
import sys, time, torch, ckptool
start = time.perf_counter()
state = {call}(sys.argv[1], map_location="cpu")
print(time.perf_counter() - start)
"""
"""The call alone: the import of torch reads files of its own, which are not in the cache either."""


def commands(source: Path, folder: Path) -> Sequence[Command]:
    """What is measured: the readers of the system first, then ours, each beside torch's."""
    target = folder / "cold.safetensors"
    return (
        Command.system("1 dd", "sh", "-c", READ, "sh", source, 1),
        Command.system(f"{READERS} dd", "sh", "-c", READ, "sh", source, READERS),
        *(
            Command.program(call, LOAD.format(call=call), source, tells=True)
            for call in ("ckptool.load_state_dict", "torch.load")
        ),
        Command.ckptool("verify", source),
        Command.ckptool("stats", source),
        Command.copy(source, target),
        Command.ckptool("convert", source, target, "--force"),
    )


def forget() -> None:
    """Drop what the page cache holds, after it is on the disk."""
    os.sync()
    DROP.write_text("3\n")


def main() -> int:
    """Measure every command three times in turn, and print medians and ratios to the `dd`s."""
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 2 * 10**9
    if not os.access(DROP, os.W_OK):
        print("skipped: the page cache can be dropped by root on Linux alone")
        return 0
    with tempfile.TemporaryDirectory(dir=".") as folder:
        source = Path(folder, "large.pth")
        made = "-m", "benchmarks.inputs", "single", str(source), str(size)
        subprocess.run([sys.executable, *made], check=True)
        measured = measure(commands(source, Path(folder)), 3, forget)
    floor = measured[1]
    for one in measured:
        times = ratio(one, floor)
        print(f"{one.command.label:26}{one.seconds:8.2f} s {times:8.2f} of {floor.command.label}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
