"""`python -m tests.trainer.launching_alone HOW OUT`: a launcher in a session of its own."""

import os
import sys

from ckptool.trainer.launching import launch

os.setsid()
sys.exit(launch(sys.argv[1:3], nproc=2, program=("-m", "tests.trainer.launched")))
