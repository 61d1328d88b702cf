"""`python -m tests.trainer.stepping {OUT: OPTIONS, ...} [STEP]`: runs that print their steps.

At STEP it waits to be killed.
"""

import json
import os
import signal
import sys

import torch.distributed as dist

from tests.trainer.runs import BytesDone, run


def told(event):
    if type(event).__name__ == "Stepped":
        print(event.step, flush=True)
        if [str(event.step)] == sys.argv[2:]:
            signal.pause()


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")  # one for all runs
    for out, options in json.loads(sys.argv[1]).items():
        run(out, BytesDone(told), **options)
    if dist.is_initialized():
        dist.destroy_process_group()
