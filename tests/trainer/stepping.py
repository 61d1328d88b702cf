"""`python -m tests.trainer.stepping OUT OPTIONS`: a run that prints the number of each step."""

import json
import sys

from tests.trainer.runs import Told, run


def told(event):
    if type(event).__name__ == "Stepped":
        print(event.step, flush=True)


if __name__ == "__main__":
    run(sys.argv[1], Told(told), **json.loads(sys.argv[2]))
