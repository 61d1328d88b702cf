"""`python -m tests.trainer.little_room OUT`: a run whose files may have 20,000 bytes."""

import resource
import sys

from ckptool.errors import NoSpace
from tests.trainer.runs import net, run

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    try:
        run(sys.argv[1], model=net(width=1000))
    except NoSpace as error:
        print(error)
