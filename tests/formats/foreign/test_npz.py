import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays_of

import ckptool
from ckptool.cli import main
from ckptool.errors import CorruptFile, LimitExceeded, NotACheckpoint, UnreadableFile
from ckptool.files import InflatedSource
from ckptool.formats.foreign.npz import NPZ
from tests.formats.contract import FormatContract


class TestContract(FormatContract):
    name = "npz"
    sample = "numpy/jax.npz"
    is_covered = True


TYPES = ["?", "i1", "<i2", ">i4", "<i8", "u1", ">u2", "<u4", "<f2", "<f4", ">f8", "<c8", ">c16"]
FLOATS = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"


def npy(text, data=bytes(24), version=1):
    """One array, its header as told."""
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + data


@pytest.fixture
def archive(tmp_path):
    """Writes records as a zip, and gives its path."""

    def write(records, method=zipfile.ZIP_STORED):
        path = tmp_path / "arrays.npz"
        with zipfile.ZipFile(path, "w", method) as target:
            for name, data in records.items():
                target.writestr(name, data)
        return path

    return write


@given(
    array=arrays_of.arrays(
        st.sampled_from(TYPES),
        arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
    ),
    fortran=st.booleans(),
    packed=st.booleans(),
)
def test_an_array_is_what_numpy_reads(tmp_path_factory, array, fortran, packed):
    path = tmp_path_factory.mktemp("arrays") / "one.npz"
    save = np.savez_compressed if packed else np.savez
    save(path, **{"a/b.c": np.asfortranarray(array) if fortran else array})
    with np.load(path) as file:
        wanted = file["a/b.c"]
    tensor = ckptool.load(path)["a/b.c"]
    assert tensor.shape == wanted.shape
    assert tensor.numpy().tobytes() == wanted.astype(wanted.dtype.newbyteorder("<")).tobytes()


def test_it_becomes_what_torch_and_safetensors_load(tmp_path):
    wanted = {"layer/kernel": np.arange(6, dtype="f4").reshape(2, 3), "layer/bias": np.ones(3)}
    np.savez(tmp_path / "jax.npz", **wanted)
    for name in ("jax.pth", "jax.safetensors"):
        ckptool.convert(tmp_path / "jax.npz", tmp_path / name)
        state = ckptool.load_state_dict(tmp_path / name)
        assert {key: value.tolist() for key, value in state.items()} == {
            key: value.tolist() for key, value in wanted.items()
        }
    torch.load(tmp_path / "jax.pth", weights_only=True)
    assert ckptool.diff(tmp_path / "jax.npz", tmp_path / "jax.pth").identical


def test_names_are_told_apart_by_case_and_have_no_folder(archive):
    path = archive({f"{name}.npy": npy(FLOATS) for name in ("a/w", "a/W", "b/w", "top")})
    with ckptool.open(path) as checkpoint:
        assert list(checkpoint) == ["a/w", "a/W", "b/w", "top"]
        assert checkpoint.format == NPZ.name


def test_two_arrays_of_one_name_are_refused(tmp_path):
    path = tmp_path / "twice.npz"
    with zipfile.ZipFile(path, "w") as target:
        target.writestr("w.npy", npy(FLOATS))
        with pytest.warns(UserWarning, match="Duplicate"):
            target.writestr("w.npy", npy(FLOATS))
    with pytest.raises(CorruptFile, match="two records with the same name"):
        ckptool.open(path)


def test_what_torch_has_no_type_for_is_named(tmp_path, capsys):
    path = tmp_path / "some.npz"
    np.savez(path, w=np.ones(2, "f4"), names=np.array(["a", "bc"]), long=np.ones(2, "V2"))
    with ckptool.open(path) as checkpoint:
        assert list(checkpoint) == ["w"]
        assert [text.split(" is not a tensor")[0] for text in checkpoint.details.left_behind] == [
            "'names' of type <U2",
            "'long' of type |V2",
        ]
    assert main(["convert", str(path), str(tmp_path / "some.pth")]) == 0
    assert "left out: 'names'" in capsys.readouterr().err


class Runs:
    def __reduce__(self):
        return exec, ("raise SystemExit('it ran')",)


def test_objects_are_read_and_never_made(tmp_path):
    path = tmp_path / "objects.npz"
    np.savez(path, o=np.array([Runs(), torch.ones(2)], object), w=np.ones(2))
    with ckptool.open(path) as checkpoint:
        assert checkpoint["o"].class_name == "numpy.ndarray"
        assert "builtins.exec" in checkpoint.details.globals
        assert checkpoint["w"].shape == (2,)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("w", "file in archive is not in a subdirectory"),
        ("layer/w", r'Expected hasRecord\("version"\) to be true'),
    ],
)
def test_doctor_and_info_lead_to_a_file_that_loads(tmp_path, capsys, name, says):
    path = tmp_path / "w.npz"
    np.savez_compressed(path, **{name: np.ones(2)})
    with pytest.raises(RuntimeError, match=says):
        torch.load(path)
    assert main(["info", str(path)]) == 0
    assert "numpy.load reads it as is" in capsys.readouterr().out
    report = ckptool.doctor(path)
    assert [complaint.kind for complaint in report.complaints] == ["numpy"]
    assert report.commands


HEADERS = {
    "code in the place of the dict": b"__import__('os').getcwd()",
    "code in the place of a value": FLOATS.replace(b"(2, 3)", b"exit()"),
    "a key twice": FLOATS.replace(b"'shape'", b"'descr': '<f8', 'shape'"),
    "a key more": FLOATS.replace(b"}", b"'more': 1}"),
    "a key too few": FLOATS.replace(b"'fortran_order': False, ", b""),
    "no end": FLOATS[:-1],
    "something behind it": FLOATS + b", 1",
    "a negative size": FLOATS.replace(b"2", b"-2"),
    "a size of twenty digits": FLOATS.replace(b"2,", b"20000000000000000000,"),
    "nothing": b"",
}


def test_a_header_says_type_order_and_shape_and_nothing_else(archive):
    for case in HEADERS:
        with pytest.raises(CorruptFile, match="has the header"):
            ckptool.open(archive({"w.npy": npy(HEADERS[case])}))


@pytest.mark.parametrize("version", [1, 2, 3])
def test_headers_of_every_version_are_read(archive, version):
    path = archive({"w.npy": npy(FLOATS, version=version)})
    with ckptool.open(path) as checkpoint:
        assert checkpoint["w"].shape == (2, 3)


@pytest.mark.parametrize("data", [b"", b"\x93NUMPY", npy(FLOATS)[:9], npy(FLOATS, version=4)])
def test_a_record_that_is_no_array_is_told(archive, data):
    with pytest.raises(CorruptFile, match=r"array 'w\.npy' does not begin like a numpy array"):
        ckptool.open(archive({"w.npy": data}))


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_array_that_ends_too_early_or_too_late_is_told(archive, method):
    with pytest.raises(CorruptFile, match="ends within its header"):
        ckptool.open(archive({"w.npy": npy(FLOATS)[:40]}, method))
    for length in (23, 25):
        with pytest.raises(CorruptFile, match=f"needs 24 bytes, but there are {length}"):
            ckptool.open(archive({"w.npy": npy(FLOATS, bytes(length))}, method))
    shape = FLOATS.replace(b"2, 3", b", ".join([b"9" * 19] * 300))
    with pytest.raises(LimitExceeded, match="300 dimensions"):
        ckptool.open(archive({"w.npy": npy(shape)}, method))
    shape = FLOATS.replace(b"2", b"4611686018427387904")
    with pytest.raises(CorruptFile, match=r"needs [0-9,]+ bytes, but there are"):
        ckptool.open(archive({"w.npy": npy(shape)}, method))


def test_a_long_header_is_read_and_an_endless_one_is_not(archive):
    long = FLOATS + b" " * 5000
    with ckptool.open(archive({"w.npy": npy(long, version=2)})) as checkpoint:
        assert checkpoint["w"].shape == (2, 3)
    with pytest.raises(LimitExceeded, match="a header of 70,"):
        ckptool.open(archive({"w.npy": npy(FLOATS + b" " * 70_000, version=2)}))


def test_headers_of_compressed_arrays_are_read_without_the_arrays(archive):
    path = archive({"w.npy": npy(FLOATS)}, zipfile.ZIP_DEFLATED)
    with ckptool.open(path) as checkpoint:
        source = checkpoint["w"].storage.data.source
        assert isinstance(source, InflatedSource)
        assert source._inflater is None
        assert source.read_head(6) == b"\x93NUMPY"
        assert source._inflater is None
    damaged = bytearray(path.read_bytes())
    damaged[35] ^= 0xFF
    path.write_bytes(damaged)
    with pytest.raises(CorruptFile):
        ckptool.open(path)


def test_archives_that_are_not_numpys_are_named(archive, tmp_path):
    with pytest.raises(NotACheckpoint, match="a zip archive with other files"):
        ckptool.open(archive({"w.npy": npy(FLOATS), "notes.txt": b""}))
    empty = tmp_path / "empty.npz"
    np.savez(empty)
    with pytest.raises(UnreadableFile, match="other files: nothing"):
        ckptool.open(empty)


def test_verify_finds_a_flipped_bit_by_the_checksum(archive, capsys):
    path = archive({"w.npy": npy(FLOATS)})
    assert main(["verify", str(path)]) == 0
    data = bytearray(path.read_bytes())
    data[data.index(FLOATS) + len(FLOATS) + 3] ^= 1
    path.write_bytes(data)
    assert main(["verify", str(path)]) == 1
    assert "w.npy" in capsys.readouterr().out
