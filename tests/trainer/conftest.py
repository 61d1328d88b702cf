"""The number of threads in the tests of the trainer."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Models as small as these are faster with one thread, most of all beside other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
