"""What the tests of files may ask for."""

import pytest

from tests.files.sets import OLD, lay


@pytest.fixture
def old(tmp_path):
    """A folder with the old set in it, and nothing else."""
    return lay(tmp_path, OLD)
