"""`python -m ckptool`."""

import os
import signal
import sys

if __name__ == "__main__":
    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # a worker that starts has nothing to clean up
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ckptool.cli import main

    sys.exit(main())
