"""What every format must do: a class that the tests of each format inherit.

    class TestContract(FormatContract):
        name = "npz"
        sample = "numpy/jax.npz"

A sample is a fixture that the format's own writer made; the values in it are judged elsewhere
(`tests/test_fixtures.py`). Here it is cut, extended, damaged, moved and read with small limits. The
answer must be an error of ours, or the same tensors as before; no other answer, and no other
exception. Damage that nothing covers may give other values (`tests/damage.py`).
"""

import random
import shutil
import tracemalloc
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.cli import main
from ckptool.errors import CheckpointError
from ckptool.files.source import FileSource
from ckptool.formats import open_checkpoint, registry
from ckptool.inspection.listing import list_tensors
from ckptool.limits import DEFAULT_LIMITS
from tests.servers import serving
from tests.sources import PROJECT

PLACES = 48
"""Cuts and damages of a sample, its files together."""
LARGE = 1 << 23
"""Elements of the tensor that only the header is read of."""


def tensors_of(path, limits=DEFAULT_LIMITS):
    """Return what a reader sees: each tensor by its path, with its type, shape and digest."""
    with open_checkpoint(path, limits=limits) as checkpoint:
        rows = list_tensors(checkpoint, hash=True).tensors
        return {row.path: (row.dtype, row.shape, row.device, row.sha256) for row in rows}


class FormatContract:
    """The tests. A subclass says which format, and where a sample of it is."""

    name = ""
    """As the registry has it."""
    sample = ""
    """A fixture: a file or a folder."""
    opened = ""
    """What is opened below the sample, where that is not the sample itself."""
    by_extension = False
    """The content does not say what it is."""
    is_covered = False
    """Every bit of a tensor has a checksum in the file."""
    reads_all = False
    """Tensors are inside a pickle or another stream that is read as a whole."""

    def files(self, folder):
        """Make a sample in a folder, and return the path that is opened."""
        source = PROJECT / "fixtures" / self.sample
        target = folder / source.name
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)
        beside = Path(f"{source}.tensors")
        if beside.is_dir():
            shutil.copytree(beside, folder / beside.name)
        return target / self.opened if self.opened else target

    def large(self, folder):
        """Write a tensor of `LARGE` elements; None where nothing here writes the format."""
        entry = next(entry for entry in registry.REGISTRY if entry.name == self.name)
        if not entry.writable:
            return None
        torch.save({"w": torch.ones(LARGE)}, folder / "large.pth")
        ckptool.convert(folder / "large.pth", folder / "made", format=self.name)
        (folder / "large.pth").unlink()
        made = folder / "made"
        return made if made.exists() else next(folder.glob("made*.json"))

    @pytest.fixture
    def path(self, tmp_path):
        (tmp_path / "in").mkdir()
        return self.files(tmp_path / "in")

    @cached_property
    def chance(self):
        return random.Random(self.name)

    def parts(self, path):
        """Return the files of a sample that have bytes, each with its content."""
        top = path.parent if self.opened or not path.is_dir() else path
        every = [path] if not path.is_dir() and not self.opened else sorted(top.rglob("*"))
        every += sorted(Path(f"{path}.tensors").rglob("*"))
        return {file: file.read_bytes() for file in every if file.is_file()}

    def places(self, size, files):
        """Return the first and last bytes of one of some files, and some between."""
        some = 1 + PLACES // files
        ends = {0, size // 2, size - 1, *range(min(size, some // 4))} if size else {0}
        return sorted(ends | {self.chance.randrange(size) for _ in range(some if size else 0)})

    def answer(self, path, limits=DEFAULT_LIMITS):
        """Return the tensors, or None for an error of ours; any other exception fails the test."""
        try:
            return tensors_of(path, limits)
        except CheckpointError:
            return None

    def test_the_sample_is_of_the_format_and_whole(self, path):
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.format == self.name
        assert tensors_of(path)
        assert ckptool.verify(path).ok

    def test_it_is_known_by_its_content_whatever_it_is_called(self, path):
        if self.by_extension or self.opened:
            return
        for name in ("x", "model.bin", "model.zip", "model.safetensors", "model.h5", "a b.txt"):
            moved = path.with_name(name)
            path.rename(moved)
            if (beside := Path(f"{path}.tensors")).is_dir():
                beside.rename(f"{moved}.tensors")
            path = moved
            with open_checkpoint(path) as checkpoint:
                assert checkpoint.format == self.name, name

    def test_a_file_that_was_cut_never_gives_other_tensors(self, path):
        whole = tensors_of(path)
        parts = self.parts(path)
        for file, content in parts.items():
            for length in self.places(len(content), len(parts)):
                file.write_bytes(content[:length])
                found = self.answer(path)
                assert found is None or found == whole or not ckptool.verify(path).ok, length
            file.write_bytes(content)

    def test_bytes_after_the_end_are_refused_or_change_nothing(self, path):
        whole = tensors_of(path)
        for file, content in self.parts(path).items():
            for tail in (b"\0", b"\n", b"x" * 100, bytes(5000), content[:1000]):
                file.write_bytes(content + tail)
                assert self.answer(path) in (None, whole), (file, tail[:3])
            file.write_bytes(content)

    def test_damage_is_an_error_of_ours_or_is_found_where_something_covers_it(self, path):
        whole = tensors_of(path)
        parts = self.parts(path)
        for file, content in parts.items():
            for at in self.places(len(content), len(parts)):
                if not content:
                    continue
                damaged = bytearray(content)
                damaged[at] ^= 1 << self.chance.randrange(8)
                file.write_bytes(damaged)
                found = self.answer(path)
                if self.is_covered and found not in (None, whole):
                    assert not ckptool.verify(path).ok, (file, at)
            file.write_bytes(content)

    def test_hostile_sizes_cost_no_memory(self, path):
        parts, lies = self.parts(path), (b"\xff" * 8, b"\xff" * 3 + b"\x7f", b"9" * 8)
        for file, content in parts.items():
            for number, at in enumerate(self.places(max(len(content) - 8, 0), len(parts))):
                lie = lies[number % len(lies)]
                file.write_bytes(content[:at] + lie + content[at + len(lie) :])
                tracemalloc.start()
                try:
                    self.answer(path)
                    _, most = tracemalloc.get_traced_memory()
                finally:
                    tracemalloc.stop()
                assert most < (64 << 20) + 8 * len(content), (file, at, lie)
            file.write_bytes(content)

    def test_every_limit_is_an_error_of_ours(self, path):
        whole = tensors_of(path)
        for field in fields(DEFAULT_LIMITS):
            for value in (0, 1):
                found = self.answer(path, replace(DEFAULT_LIMITS, **{field.name: value}))
                assert found in (None, whole), field.name
        none = {field.name: 0 for field in fields(DEFAULT_LIMITS)}
        with pytest.raises(CheckpointError):
            tensors_of(path, replace(DEFAULT_LIMITS, **none))

    def test_it_reads_the_same_from_an_address(self, path):
        if path.is_dir() or self.opened or len(self.parts(path)) > 1:
            return  # a server of files lists no folders
        with serving(path.parent) as served:
            assert tensors_of(f"{served.url}/{path.name}") == tensors_of(path)

    def test_what_it_holds_goes_into_a_file_of_torch_and_back(self, path, tmp_path):
        out = tmp_path / "out.pth"
        assert main(["convert", str(path), str(out), "-q"]) == 0
        before, after = tensors_of(path), tensors_of(out)
        digests = {digest for *_, digest in after.values()}
        assert {digest for *_, digest in before.values()} == digests
        entry = next(entry for entry in registry.REGISTRY if entry.name == self.name)
        if entry.writable:
            back = tmp_path / f"back{entry.endings[0] if entry.endings else ''}"
            ckptool.convert(out, back, ckptool.Take(model_only=None), format=self.name)
            kept = {digest for *_, digest in tensors_of(self.made(back)).values()}
            assert kept <= digests
            assert kept

    @staticmethod
    def made(path):
        """Return what a conversion wrote that was asked for this path."""
        return path if path.exists() else next(path.parent.glob(f"{path.name}*.json"))

    def test_the_bytes_of_a_tensor_are_not_read_for_the_header(self, tmp_path, monkeypatch):
        path = self.large(tmp_path)
        if path is None or self.reads_all:
            return
        seen, system = [], FileSource._call_system

        def counted(source, call, wanted, at):
            seen.append(wanted if isinstance(wanted, int) else len(wanted))
            return system(source, call, wanted, at)

        monkeypatch.setattr(FileSource, "_call_system", counted)
        with open_checkpoint(path) as checkpoint:
            assert any(row.numel == LARGE for row in list_tensors(checkpoint).tensors)
        assert sum(seen) < LARGE / 2, seen  # of four bytes an element
