"""A launcher as the command line is one."""

import sys

from ckptool.trainer.launching import launch

sys.exit(launch(sys.argv[1:3], nproc=2, program=("-m", "tests.trainer.launched")))
