"""Copies and pickles of what reads from a file open it again, and read the same bytes."""

import copy
import os
import pickle

import pytest

import ckptool


@pytest.fixture
def model(tmp_path, fixtures):
    path = tmp_path / "model.pth"
    path.write_bytes((fixtures / "torch-2.13.0" / "dp.pth").read_bytes())
    return path


def test_a_pickled_tensor_reads_its_own_file_whatever_has_the_descriptor_now(model, tmp_path):
    with ckptool.open(model) as checkpoint:
        ref = checkpoint["module.conv1.weight"]
        wanted, data = ref.read(), pickle.dumps(ref)
    other = os.open(os.devnull, os.O_RDONLY)  # takes the number that has become free
    assert pickle.loads(data).read() == wanted
    os.close(other)


def test_a_copy_closes_its_own_descriptor(model):
    with ckptool.open(model) as checkpoint:
        again = copy.deepcopy(checkpoint)
        again.close()
        assert checkpoint["module.fc.bias"].read()


def test_a_file_that_has_changed_since_is_refused(model):
    with ckptool.open(model) as checkpoint:
        data = pickle.dumps(checkpoint["module.fc.bias"])
    model.write_bytes(b"something else")
    with pytest.raises(ckptool.UnreadableFile, match="has changed since it was opened"):
        pickle.loads(data)
