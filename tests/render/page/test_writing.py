"""A page on the disk."""

import os
import shutil

import pytest

from ckptool.comparison.report import report
from ckptool.errors import TargetExists, UnreadableFile, WriteDenied
from ckptool.formats import open_checkpoint
from ckptool.render.page import page, write_page
from tests.sources import PROJECT

MODEL = PROJECT / "fixtures" / "torch-2.13.0" / "dp_full.pth"


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.pth"
    shutil.copy(MODEL, path)
    return path


@pytest.fixture
def opened(model):
    with open_checkpoint(model) as checkpoint:
        yield checkpoint


@pytest.fixture
def made(opened):
    return report(opened, values=False)


def test_the_file_is_the_page_and_the_receipt_says_so(opened, made, tmp_path):
    target = tmp_path / "new" / "folder" / "page.html"
    receipt = write_page(made, target, [opened])
    assert target.read_bytes() == page(made)
    assert receipt.size == target.stat().st_size
    assert receipt.tensors == len(list(opened.tensors()))
    assert receipt.measured == 0
    assert receipt.identical is None


def test_a_file_that_is_there_is_replaced_only_when_asked(opened, made, tmp_path):
    target = tmp_path / "page.html"
    target.write_text("old")
    with pytest.raises(TargetExists, match="exists already"):
        write_page(made, target, [opened])
    assert target.read_text() == "old"
    write_page(made, target, [opened], overwrite=True)
    assert target.read_bytes() == page(made)


@pytest.mark.parametrize("make", [None, os.symlink, os.link], ids=["itself", "symlink", "link"])
def test_a_source_is_never_written_over(opened, made, model, tmp_path, make):
    target = model
    if make is not None:
        target = tmp_path / "page.html"
        make(model, target)
    before = model.read_bytes()
    with pytest.raises(TargetExists, match="is the source itself"):
        write_page(made, target, [opened], overwrite=True)
    assert model.read_bytes() == before


def test_the_second_source_is_never_written_over_either(opened, made, tmp_path):
    other = tmp_path / "other.pth"
    shutil.copy(MODEL, other)
    with open_checkpoint(other) as second, pytest.raises(TargetExists, match="source itself"):
        write_page(made, other, [opened, second], overwrite=True)


def test_a_folder_and_a_device_are_no_page(opened, made, tmp_path):
    with pytest.raises(TargetExists, match="is a folder"):
        write_page(made, tmp_path, [opened], overwrite=True)
    with pytest.raises(WriteDenied, match="not a regular file"):
        write_page(made, os.devnull, [opened], overwrite=True)


def test_a_source_that_changes_meanwhile_leaves_the_old_page(opened, made, model, tmp_path):
    target = tmp_path / "page.html"
    target.write_text("old")
    with model.open("ab") as file:
        file.write(b"more")
    with pytest.raises(UnreadableFile):
        write_page(made, target, [opened], overwrite=True)
    assert target.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pth", "page.html"]
