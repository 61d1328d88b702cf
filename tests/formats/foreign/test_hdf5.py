"""HDF5 of Keras: read as h5py reads it; what leads out of the file, or lies, is refused."""

import sys
import zipfile

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ckptool
from ckptool.cli import main
from ckptool.errors import CheckpointError, LimitExceeded, UnsupportedFormat
from ckptool.formats import open_checkpoint
from ckptool.limits import Limits
from tests.formats.contract import FormatContract


class TestContractOfHdf5(FormatContract):
    name = "hdf5"
    sample = "keras/model.h5"


class TestContractOfKeras(FormatContract):
    name = "keras"
    sample = "keras/model.keras"
    is_covered = True


@pytest.fixture
def made(tmp_path):
    def write(fill):
        with h5py.File(tmp_path / "m.h5", "w") as file:
            fill(file)
        return tmp_path / "m.h5"

    return write


@pytest.mark.parametrize("name", ["plain.weights.h5", "half.weights.h5", "odd.h5"])
def test_weights_are_one_state_dict_that_is_converted(fixtures, tmp_path, name):
    file = fixtures / "keras" / name
    assert main(["convert", str(file), str(tmp_path / "m.safetensors")]) == 0
    assert main(["convert", str(file), str(tmp_path / "m.pth")]) == 0
    assert ckptool.diff(file, tmp_path / "m.safetensors").identical
    one, other = load_file(tmp_path / "m.safetensors"), torch.load(tmp_path / "m.pth")
    assert all(one[key].equal(other[key]) for key in other)


@pytest.mark.parametrize(
    ("name", "key"), [("model.h5", "model_weights"), ("model.keras", "layers")]
)
def test_the_weights_beside_an_optimizer_are_a_state_dict_of_their_own(
    fixtures, tmp_path, name, key
):
    file, out = fixtures / "keras" / name, tmp_path / "m.safetensors"
    assert main(["convert", str(file), str(out), "--key", key]) == 0
    assert any("conv2d" in one for one in load_file(out))


def test_layers_that_are_attributes_are_one_model_beside_an_optimizer(made):
    def fill(file):
        for name in ("conv/vars/0", "layers/dense/vars/0", "optimizer/vars/0"):
            file[name] = np.ones(2, "f4")

    path = made(fill)
    with open_checkpoint(path) as checkpoint:
        assert {key: list(one) for key, one in checkpoint.root.items()} == {
            "state_dict": ["conv/vars/0", "layers/dense/vars/0"],
            "optimizer": ["vars/0"],
        }
    assert len(ckptool.load_state_dict(path)) == 2


def test_bytes_that_lie_in_a_row_are_read_from_where_they_are(fixtures, monkeypatch):
    with open_checkpoint(fixtures / "keras/plain.weights.h5") as checkpoint:
        monkeypatch.setitem(sys.modules, "h5py", None)
        for _, tensor in checkpoint.tensors():
            assert len(tensor.data.read()) == tensor.nbytes


def test_without_h5py_the_extra_is_named(fixtures, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert main(["list", str(fixtures / "keras/model.h5")]) == 2
    assert "pip install h5py" in capfd.readouterr().err


def test_links_are_not_followed(made, tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["secret"] = np.ones(3)

    def fill(file):
        file["a"] = np.ones(2)
        file["soft"] = h5py.SoftLink("/a")
        file["out"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/secret")
        file["again"] = file["/"]  # a group that holds itself

    with open_checkpoint(made(fill)) as checkpoint:
        assert list(checkpoint.root) == ["a"]
        assert len(checkpoint.details.left_behind) == 2


def test_datasets_that_lie_in_other_files_are_refused(made, tmp_path):
    (tmp_path / "raw").write_bytes(bytes(80))
    outside = [(str(tmp_path / "raw"), 0, 80)]
    path = made(lambda file: file.create_dataset("w", (10,), "f8", external=outside))
    with pytest.raises(UnsupportedFormat, match="'w' is in another file"):
        open_checkpoint(path)
    layout = h5py.VirtualLayout((3,), "f8")
    layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "secret", (3,))
    path = made(lambda file: file.create_virtual_dataset("w", layout))
    with pytest.raises(UnsupportedFormat, match="'w' is in another file"):
        open_checkpoint(path)


def test_a_dataset_of_which_nothing_is_stored(made):
    path = made(lambda file: file.create_dataset("w", (1 << 40,), "f4", chunks=(1 << 20,)))
    with pytest.raises(
        LimitExceeded, match="'w' has 4,398,046,511,104 bytes, but only 0 in the file"
    ):
        open_checkpoint(path)


def test_many_groups_and_long_names_cost_little(made):
    def fill(file):
        for number in range(20):
            file = file.create_group(f"{'g' * 100}{number}")

    path = made(fill)
    with pytest.raises(
        LimitExceeded, match="has 11 datasets and groups, more than the limit of 10"
    ):
        open_checkpoint(path, limits=Limits(max_records=500))
    with pytest.raises(LimitExceeded, match="names of its datasets"):
        open_checkpoint(path, limits=Limits(max_header_bytes=10_000))


def test_texts_and_attributes_are_told(made):
    def fill(file):
        file["a"] = np.ones(2)
        file["names"] = ["x", "y"]
        file.attrs["model_config"] = "{}"

    with open_checkpoint(made(fill)) as checkpoint:
        assert list(checkpoint.root) == ["a"]
        assert "'names'" in checkpoint.details.left_behind[0]
        assert "model_config" in checkpoint.details.left_behind[1]


def test_a_zip_with_something_else_for_weights(tmp_path):
    with zipfile.ZipFile(tmp_path / "m.keras", "w") as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("model.weights.h5", b"no HDF5")
    with pytest.raises(CheckpointError, match="h5py cannot read it"):
        open_checkpoint(tmp_path / "m.keras")
