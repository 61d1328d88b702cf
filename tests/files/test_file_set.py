"""The files of a set are all new or all as they were: refusals, errors, kills, two writers."""

import os
import shutil
import stat

import pytest

from ckptool.errors import NoSpace, TargetExists, UsageError, WriteDenied
from ckptool.files.atomic import atomic_set
from tests.files.sets import FEWER, INDEX, NEW, OLD, content, needs_posix, needs_refusals, write


def test_a_set_appears_whole(tmp_path):
    write(tmp_path, NEW)
    assert content(tmp_path) == NEW


@pytest.mark.parametrize("new", [NEW, FEWER])
def test_a_set_takes_the_place_of_another(old, new):
    write(old, new, overwrite=True)
    assert content(old) == OLD | new


def test_nothing_has_its_name_before_all_are_there(old):
    def check():
        names = os.listdir(old)
        assert sum(name.endswith(".part") for name in names) == len(NEW)
        assert all(name.startswith(f".{INDEX}.ckptool-") for name in set(names) - set(OLD))
        assert {name: (old / name).read_bytes() for name in OLD} == OLD

    write(old, NEW, overwrite=True, check=check)
    assert content(old) == OLD | NEW


def test_what_is_being_written_can_be_read_by_the_check(tmp_path):
    outputs, sizes = {}, {str(tmp_path / name): len(data) for name, data in NEW.items()}

    def check():
        for name, data in NEW.items():
            with open(outputs[name].name, "rb") as file:
                assert file.read() == data

    with atomic_set(tmp_path / INDEX, sizes, check=check) as output_of:
        for name, data in NEW.items():
            with output_of(tmp_path / name) as outputs[name]:
                outputs[name].write(data)
    assert content(tmp_path) == NEW


def test_progress_goes_over_the_whole_set(tmp_path):
    told, total = [], sum(map(len, NEW.values()))
    write(tmp_path, NEW, progress=lambda *now: told.append(now))
    assert told == [(5, total), (10, total), (10, total), (15, total)]


def test_folders_are_made_and_removed_again_after_an_error(tmp_path):
    folder = tmp_path / "a" / "b"
    with pytest.raises(ValueError, match="stop"):
        write(folder, NEW, check=fail)
    assert os.listdir(tmp_path) == []
    write(folder, NEW)
    assert content(folder) == NEW


def fail(*_, **__):
    raise ValueError("stop")


def test_no_more_descriptors_than_for_one_file(tmp_path):
    resource = pytest.importorskip("resource")
    many = {f"model-{number}.bin": b"%d" % number for number in range(100)} | {INDEX: b"{}"}
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, limits[1]))
    try:
        write(tmp_path, many)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert content(tmp_path) == many


@pytest.mark.parametrize("name", ["m" * 255, "é" * 127])
def test_names_as_long_as_a_name_can_be(tmp_path, name):
    contents = {name[:-1]: b"shard", name: b"index"}
    write(tmp_path, contents)
    assert content(tmp_path) == contents


@needs_posix
def test_modes(old):
    (old / "model-1.bin").chmod(0o640)
    (old / INDEX).chmod(0o604)
    write(old, NEW, overwrite=True, mode=0o660)
    modes = {name: stat.S_IMODE((old / name).stat().st_mode) for name in NEW}
    assert modes["model-1.bin"] == 0o640
    assert modes["model-3.bin"] == 0o660
    assert modes[INDEX] == 0o604


@needs_posix
def test_nobody_else_can_read_it_before_it_is_finished(tmp_path):
    def check():
        assert {stat.S_IMODE(entry.stat().st_mode) for entry in os.scandir(tmp_path)} == {0o600}

    sizes = {str(tmp_path / INDEX): 0}
    before = os.umask(0o077)
    try:
        with atomic_set(tmp_path / INDEX, sizes, mode=0o644) as output_of:
            check()
            with output_of(tmp_path / INDEX):
                check()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / INDEX).stat().st_mode) == 0o644


# Refusals: before anything is written, naming the file.


def test_an_existing_file_is_refused(tmp_path):
    for name in OLD:
        (tmp_path / name).write_bytes(b"here")
        with pytest.raises(TargetExists, match="exists already") as caught:
            write(tmp_path, NEW)
        assert caught.value.file == str(tmp_path / name)
        assert content(tmp_path) == {name: b"here"}
        (tmp_path / name).unlink()


def test_a_folder_is_no_target(tmp_path):
    for name in NEW:
        (tmp_path / name).mkdir()
        with pytest.raises(TargetExists, match="is a folder") as caught:
            write(tmp_path, NEW, overwrite=True)
        assert caught.value.file == str(tmp_path / name)
        assert os.listdir(tmp_path) == [name]
        (tmp_path / name).rmdir()


def test_a_file_that_appears_meanwhile_is_left_alone(tmp_path):
    with pytest.raises(TargetExists) as caught:
        write(tmp_path, NEW, progress=lambda *_: (tmp_path / "model-2.bin").write_bytes(b"other"))
    assert caught.value.file == str(tmp_path / "model-2.bin")
    assert content(tmp_path) == {"model-2.bin": b"other"}


def test_more_than_the_disk_has_is_refused_first(old):
    share = shutil.disk_usage(old).free // 2
    sizes = {str(old / name): share for name in NEW}
    with pytest.raises(NoSpace, match="bytes, and the disk has"):
        write(old, NEW, sizes, overwrite=True)
    assert content(old) == OLD


def test_files_that_are_no_set(old):
    for names, match in [
        (["elsewhere/model-1.bin", INDEX], "must be in the folder of the index"),
        (["model-1.bin", "./model-1.bin", INDEX], "the same"),
        ([INDEX, "model-1.bin"], "must be the last"),
        (["model-1.bin"], "must be the last"),
    ]:
        sizes = {f"{old}/{name}": 1 for name in names}
        with pytest.raises(UsageError, match=match):
            atomic_set(old / INDEX, sizes, overwrite=True).__enter__()
        assert content(old) == OLD


@needs_posix
def test_a_link_that_leads_to_another_folder(old, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "blob"
    elsewhere.write_bytes(b"blob")
    (old / "model-2.bin").unlink()
    (old / "model-2.bin").symlink_to(elsewhere)
    with pytest.raises(UsageError, match="must be in the folder") as caught:
        write(old, NEW, overwrite=True)
    assert caught.value.file == str(old / "model-2.bin")
    assert elsewhere.read_bytes() == b"blob"


@needs_posix
def test_links_inside_the_folder_stay(old):
    (old / "model-1.bin").rename(old / "blob")
    (old / "model-1.bin").symlink_to("blob")
    write(old, NEW, overwrite=True)
    assert (old / "model-1.bin").is_symlink()
    assert (old / "blob").read_bytes() == NEW["model-1.bin"]


@needs_posix
@needs_refusals
def test_a_folder_that_refuses(old):
    old.chmod(0o555)
    try:
        with pytest.raises(WriteDenied, match="Permission denied"):
            write(old, NEW, overwrite=True)
    finally:
        old.chmod(0o755)
    assert content(old) == OLD
