"""`python -m tests.trainer.stepping {OUT: OPTIONS, ...}`: runs that print the number of a step."""

import json
import os
import sys

import torch.distributed as dist

from tests.trainer.runs import Told, run


def told(event):
    if type(event).__name__ == "Stepped":
        print(event.step, flush=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")  # one for all runs
    for out, options in json.loads(sys.argv[1]).items():
        run(out, Told(told), **options)
    if dist.is_initialized():
        dist.destroy_process_group()
