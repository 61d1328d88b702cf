"""A worker of `convert --workers` ends with its launcher, whatever ended that."""

import os
import select
import signal
import subprocess
import sys

WORKER = """if True:
    from ckptool.cli.changing import end_with_parent
    end_with_parent(0.05)
    import os, threading
    os.write(WRITE, b"ready")
    threading.Event().wait(300)
"""
LAUNCHER = """if True:
    import subprocess, sys
    subprocess.run([sys.executable, "-c", sys.argv[1]], pass_fds=[WRITE])
"""


def test_a_worker_ends_after_its_launcher_was_killed():
    read, write = os.pipe()
    words = [text.replace("WRITE", str(write)) for text in (LAUNCHER, WORKER)]
    launcher = subprocess.Popen([sys.executable, "-c", *words], pass_fds=[write])
    os.close(write)
    try:
        assert select.select([read], [], [], 60)[0]
        assert os.read(read, 9) == b"ready"
        launcher.send_signal(signal.SIGKILL)
        launcher.wait(60)
        assert select.select([read], [], [], 60)[0]
        assert os.read(read, 9) == b""  # the worker has gone, and with it the other end
    finally:
        launcher.kill()
        launcher.wait(60)
        os.close(read)
