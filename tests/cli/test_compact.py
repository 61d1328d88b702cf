"""compact, with torch reading what it writes."""

import os
import zipfile

import pytest
import torch


@pytest.fixture
def views(tmp_path):
    """4.0 MB on disk for 8 KB of views."""
    path = tmp_path / "views.pth"
    big = torch.randn(1000, 1000)
    torch.save({"rows": big[:2], "first": big[0], "step": 3}, path)
    return path


def test_the_views_take_what_they_are(ckptool, views, tmp_path):
    done = ckptool("compact", views)
    target = tmp_path / "views.compact.pth"
    assert done.code == 0
    assert "the storage of rows, first goes from 4,000,000 to 8,000 bytes" in done.err
    assert "saves 3,992,000 of the 4,000,000 bytes of its storages" in done.err
    assert "views.pth 3.8 MiB, views.compact.pth 9." in done.err
    assert target.stat().st_size < 12_000
    before, after = (torch.load(path, weights_only=True) for path in (views, target))
    assert torch.equal(after["rows"], before["rows"])
    assert after["first"].data_ptr() == after["rows"].data_ptr()
    assert after["step"] == 3


def test_the_result_is_mapped_and_read_without_its_bytes(ckptool, views, tmp_path):
    assert ckptool("compact", views).code == 0
    target = tmp_path / "views.compact.pth"
    mapped = torch.load(target, weights_only=True, mmap=True)
    assert torch.equal(mapped["first"], torch.load(views, weights_only=True)["first"])
    assert torch.load(target, map_location="meta", weights_only=True)["rows"].shape == (2, 1000)


def test_in_place_the_file_itself_gets_smaller(ckptool, views):
    before = torch.load(views, weights_only=True)
    assert ckptool("compact", "--in-place", views).code == 0
    assert views.stat().st_size < 12_000
    assert torch.equal(torch.load(views, weights_only=True)["rows"], before["rows"])
    assert os.listdir(views.parent) == [views.name]


def test_what_an_edit_in_place_left_goes(ckptool, tmp_path):
    path = tmp_path / "model.pth"
    torch.save({f"module.layer{at}.weight": torch.ones(3) for at in range(50)}, path)
    first = path.stat().st_size
    assert ckptool("strip-module", "--in-place", path).code == 0
    assert ckptool("compact", "--in-place", path).code == 0
    assert path.stat().st_size < first
    assert ckptool("info", "--json", path).document["dead_bytes"] == 0
    assert len(torch.load(path, weights_only=True)) == 50


def test_records_that_nothing_refers_to_go_in_place_too(ckptool, tmp_path):
    path = tmp_path / "model.pth"
    torch.save({"a": torch.ones(3)}, path)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("model/data/7", b"x" * 9000)
    done = ckptool("compact", "--in-place", path)
    assert done.code == 0
    assert "dead bytes are left behind" in done.err
    with zipfile.ZipFile(path) as file:
        assert "archive/data/7" not in file.namelist()
    assert path.stat().st_size < 9000


def test_nothing_to_compact_is_said_and_written_all_the_same(ckptool, tmp_path):
    path = tmp_path / "model.pth"
    torch.save({"a": torch.ones(3)}, path)
    done = ckptool("compact", path)
    assert done.code == 0
    assert "nothing to compact" in done.err
    assert torch.equal(torch.load(tmp_path / "model.compact.pth")["a"], torch.ones(3))


def test_dry_run_says_the_size_and_writes_nothing(ckptool, views):
    done = ckptool("compact", "--dry-run", "--json", views)
    assert done.code == 0
    assert done.document["size"] < 12_000
    assert [change["kind"] for change in done.document["changes"]] == ["compact", "compact"]
    assert "views.pth 3.8 MiB, views.compact.pth 9." in done.err
    assert os.listdir(views.parent) == [views.name]


def test_info_tells_what_compact_would_leave_out(ckptool, views):
    done = ckptool("info", views)
    assert "3.8 MiB in storages, 7.8 KiB of it reachable" in done.out
    assert f"ckptool compact {views}" in done.out
    assert "ckptool compact" not in ckptool("info", views.with_name("views.compact.pth")).out
