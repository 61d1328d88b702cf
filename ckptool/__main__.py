"""`python -m ckptool`."""

import sys

from ckptool.cli import main

if __name__ == "__main__":
    sys.exit(main())
