"""Which of many inputs are worth keeping: those with a way of their own through the library."""

import contextlib
import os
import sys
import tempfile

from tests.soak.targets import TARGETS, prepare
from tests.sources import PACKAGE


def without_keys(name, inputs):
    """The inputs, smaller ones first, that go where neither a seed nor one before them went."""
    target = TARGETS[name]
    with tempfile.TemporaryDirectory() as folder:
        before = os.getcwd()
        os.chdir(folder)
        try:
            prepare()
            for data in target.seeds():
                target.check(data)  # what is done once in a process is no input's own way
            seen = set().union(*(ways(target.check, data) for data in target.seeds()))
            found = []
            for data in sorted(inputs, key=lambda data: (len(data), data)):
                own = ways(target.check, data)
                if not own <= seen:
                    found.append(data)
                    seen |= own
            return found
        finally:
            os.chdir(before)


def ways(check, data):
    """Every step from line to line that the library takes over an input."""
    taken = set()
    package = str(PACKAGE)

    def enter(frame, event, _):
        if not frame.f_code.co_filename.startswith(package):
            return None
        last = [0]

        def step(frame, event, _):
            if event == "line":
                taken.add((frame.f_code.co_filename, last[0], frame.f_lineno))
                last[0] = frame.f_lineno
            return step

        return step

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        with contextlib.suppress(Exception):  # kept as well: the tests fail until it is mended
            check(data)
    finally:
        sys.settrace(before)
    return taken
