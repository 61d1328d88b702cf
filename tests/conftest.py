"""What every test may ask for."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

FIXTURES = Path(__file__).parent.parent / "fixtures"

# No deadline: a loaded machine is not a bug, and torch's first call is slow anywhere.
settings.register_profile(
    "ckptool", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("ckptool")


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The folder of real checkpoints, with what each must read as beside it."""
    return FIXTURES


@pytest.fixture
def memory_path(tmp_path: Path):
    """A folder in memory where the system has one: waiting for the disk costs nothing there."""
    memory = Path("/dev/shm")
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(dir=memory))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def folder(memory_path: Path) -> Path:
    """A folder in memory that is not there yet."""
    return memory_path / "files"


@pytest.fixture(scope="module")
def light():
    """Calls a function in a process that has not imported torch, which forks in no time."""
    from tests.writing.kinds import apart

    with apart() as call:
        yield call
