"""The files of a set are all new or all as they were: refusals, errors, kills, two writers."""

import errno
import os
import shutil
import stat
import subprocess
import sys
import textwrap

import pytest

from ckptool.errors import (
    CheckpointWarning,
    FileBusy,
    NoSpace,
    TargetExists,
    UsageError,
    WriteDenied,
    WriteError,
)
from ckptool.files import journal, local, recovery, renames, system
from ckptool.files.atomic import open_atomic_set
from ckptool.files.editing import Edit, Patch
from ckptool.files.journal import read_journal, write_journal
from ckptool.files.renames import recover_set
from ckptool.files.temporary import has_journal, journal_path
from tests.files.sets import (
    FEWER,
    INDEX,
    NEW,
    OLD,
    content,
    lay,
    needs_posix,
    needs_refusals,
    run_child,
    write,
)


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

    with open_atomic_set(tmp_path / INDEX, sizes, check=check) as output_of:
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
        with open_atomic_set(tmp_path / INDEX, sizes, mode=0o644) as output_of:
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
        with pytest.raises(TargetExists, match="already exists") as caught:
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
    with pytest.raises(NoSpace, match="bytes, but the disk has"):
        write(old, NEW, sizes, overwrite=True)
    assert content(old) == OLD


def test_files_that_are_no_set(old):
    for names, match in [
        (["elsewhere/model-1.bin", INDEX], "must be in the same folder as the index"),
        (["model-1.bin", "./model-1.bin", INDEX], "the same"),
        ([INDEX, "model-1.bin"], "must be the last"),
        (["model-1.bin"], "must be the last"),
    ]:
        sizes = {f"{old}/{name}": 1 for name in names}
        with pytest.raises(UsageError, match=match):
            open_atomic_set(old / INDEX, sizes, overwrite=True).__enter__()
        assert content(old) == OLD


@needs_posix
def test_a_link_that_leads_to_another_folder(old, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "blob"
    elsewhere.write_bytes(b"blob")
    (old / "model-2.bin").unlink()
    (old / "model-2.bin").symlink_to(elsewhere)
    with pytest.raises(UsageError, match="must be in the same folder as the index") as caught:
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


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError, OSError])
def test_an_error_leaves_the_old_set(old, error):
    def stop(*_):
        raise error("stop")

    def interrupted(at):
        sizes = {str(old / name): len(data) for name, data in NEW.items()}
        with open_atomic_set(old / INDEX, sizes, overwrite=True, check=stop) as output_of:
            for name, data in NEW.items():
                with output_of(old / name) as output:
                    output.write(data)
                    if at == "inside":
                        stop()
                if at == "between":
                    stop()

    for at in ("between", "inside", "check"):
        with pytest.raises(WriteError if error is OSError else error):
            interrupted(at)
        assert content(old) == OLD, at


def test_more_or_fewer_bytes_than_announced(old):
    for change in (-1, 1):
        sizes = {str(old / name): len(data) for name, data in NEW.items()}
        sizes[str(old / "model-2.bin")] += change
        with pytest.raises(WriteError, match="expected") as caught:
            write(old, NEW, sizes, overwrite=True)
        assert caught.value.file == str(old / "model-2.bin")
        assert content(old) == OLD, change


def test_a_file_that_was_announced_and_not_written(old):
    sizes = {str(old / name): len(data) for name, data in NEW.items()}
    with pytest.raises(WriteError, match="was planned but not written") as caught:
        write(old, {name: NEW[name] for name in list(NEW)[1:]}, sizes, overwrite=True)
    assert caught.value.file == str(old / "model-1.bin")
    assert content(old) == OLD


@needs_posix
@pytest.mark.parametrize("when", ["before", "while"])
def test_a_full_disk(old, when):
    """What is full before is found before a byte is written."""
    done = run_child(
        """
        import resource
        def fill(*_):
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        folder, when = sys.argv[1:]
        new = NEW | {"model-2.bin": bytes(5000)}
        progress = fill
        if when == "before":
            fill()
            progress = print
        try:
            write(folder, new, overwrite=True, progress=progress)
        except NoSpace as error:
            print(error)
        """,
        old,
        when,
    )
    assert done.stdout == f"{old / 'model-2.bin'}: cannot be written (File too large)\n", (
        done.stderr
    )
    assert content(old) == OLD


@needs_posix
@pytest.mark.parametrize("number", range(len(NEW)))
@pytest.mark.parametrize("error", [KeyboardInterrupt, PermissionError])
def test_a_rename_that_is_refused_or_interrupted(old, monkeypatch, number, error):
    """Taken back while no old file is gone; afterwards, finished if the system lets us."""
    replace, calls = os.replace, []

    def interrupted(source, target):
        if source.endswith(".part"):
            calls.append(target)
            if len(calls) == number + 1:
                raise error(errno.EPERM, "Operation not permitted")
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(WriteDenied if error is PermissionError else error):
        write(old, NEW, overwrite=True)
    assert content(old) == (OLD if number == 0 else OLD | NEW)


@needs_posix
@pytest.mark.parametrize("number", range(len(NEW)))
def test_a_first_write_that_is_refused_leaves_nothing(tmp_path, monkeypatch, number):
    replace, refused = os.replace, os.path.join(tmp_path, list(NEW)[number])

    def refuse(source, target):
        if target == refused:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(WriteDenied):
        write(tmp_path, NEW)
    assert content(tmp_path) == {}


@needs_posix
def test_a_rename_that_is_refused_for_good_leaves_the_journal(old, monkeypatch):
    replace = os.replace

    def refuse(source, target):
        if target == str(old / "model-2.bin"):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(WriteDenied):
            write(old, NEW, overwrite=True)
    assert has_journal(str(old / INDEX))
    recover_set(old / INDEX, read_journal(str(old / INDEX)))
    assert content(old) == OLD | NEW


@pytest.mark.parametrize("call", ["write_journal", "sync_folder"])
def test_a_journal_that_cannot_be_written(old, monkeypatch, call):
    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(renames, call, refuse)
    with pytest.raises(WriteError, match="Input/output error"):
        write(old, NEW, overwrite=True)
    assert content(old) == OLD


def test_a_journal_that_cannot_be_removed_is_removed_by_the_next(old, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(renames, "remove_journal", refuse)
        write(old, NEW, overwrite=True)
    assert has_journal(str(old / INDEX))
    recover_set(str(old / INDEX), read_journal(str(old / INDEX)))
    assert content(old) == OLD | NEW


def test_a_journal_goes_after_the_renames_are_on_the_disk(old, monkeypatch):
    """The system may keep an unlink and lose the rename before it, if nothing comes between."""
    calls = []

    def noted(name, call):
        def wrapped(*arguments):
            calls.append(name)
            return call(*arguments)

        return wrapped

    monkeypatch.setattr(os, "replace", noted("replace", os.replace))
    for name in ("sync_folder", "write_journal", "remove_journal"):
        monkeypatch.setattr(renames, name, noted(name, getattr(renames, name)))
    write(old, FEWER, overwrite=True)
    assert calls == [
        "sync_folder",
        *("write_journal", "replace"),
        *("replace", "replace", "sync_folder"),
        "remove_journal",
    ]


# What a kill leaves.


@needs_posix
def test_an_edit_of_a_shard_that_was_cut_short_is_forgotten(old):
    """Its journal would be about a file that is there no more."""
    shard = str(old / "model-1.bin")
    with open(shard, "rb") as file:
        edit = Edit.from_patch(file.fileno(), Patch(len(OLD["model-1.bin"]), b" and more"))
    write_journal(shard, edit.to_journal())
    with pytest.warns(CheckpointWarning, match=r"model-1\.bin: rolled back"):
        write(old, NEW, overwrite=True)
    assert content(old) == OLD | NEW


@needs_posix
def test_the_debris_of_a_killed_run_is_removed_by_the_next(old):
    done = run_child(
        """
        import signal
        write(sys.argv[1], NEW, overwrite=True, check=lambda: os.kill(os.getpid(), signal.SIGKILL))
        """,
        old,
    )
    assert done.returncode == -9
    assert len(os.listdir(old)) == len(OLD) + len(NEW) + 1
    with open(journal_path(str(old / INDEX)) + ".tmp", "wb") as file:
        file.write(b"the beginning of one")
    write(old, FEWER, overwrite=True)
    assert content(old) == OLD | FEWER


def test_a_file_of_any_other_name_is_no_debris(old):
    mine = dict.fromkeys(
        (
            f".{INDEX}.ckptool-0123456789ab.part",
            f".{INDEX}.ckptool-0123456789ab-00001.part.bak",
            ".other.index.json.ckptool-0123456789ab-00001.part",
            f".{INDEX}.ckptool-0123456789ab-00001.tmp",
        ),
        b"mine",
    )
    lay(old, mine)
    write(old, NEW, overwrite=True)
    assert content(old) == OLD | NEW | mine


# Two at once.


@needs_posix
def test_the_second_writer_is_refused(old):
    sizes = {str(old / name): len(data) for name, data in NEW.items()}
    with open_atomic_set(old / INDEX, sizes, overwrite=True) as output_of:
        with pytest.raises(FileBusy, match=rf"(?m)process {os.getpid()} \(this one\)$") as caught:
            write(old, FEWER, overwrite=True)
        assert caught.value.file == str(old / INDEX)
        done = run_child("write(sys.argv[1], FEWER, overwrite=True)", old)
        assert f"FileBusy: {old / INDEX}: is being written" in done.stderr
        for name, data in NEW.items():
            with output_of(old / name) as output:
                output.write(data)
    assert content(old) == OLD | NEW


@needs_posix
def test_a_reader_does_not_take_a_living_writer_for_dead(old, monkeypatch):
    replace, refused = os.replace, []

    def read_meanwhile(source, target):
        if source.endswith(".part"):
            with pytest.raises(FileBusy, match=f"process {os.getpid()}") as caught:
                recover_set(old / INDEX, read_journal(str(old / INDEX)))
            refused.append(caught)
        replace(source, target)

    monkeypatch.setattr(os, "replace", read_meanwhile)
    write(old, NEW, overwrite=True)
    assert len(refused) == len(NEW)
    assert content(old) == OLD | NEW


@needs_posix
def test_many_writers_leave_one_set(tmp_path):
    code = """
        which = sys.argv[2]
        for turn in range(15):
            data = f"{which} {turn}".encode()
            contents = {name: data for name in NEW}
            try:
                write(sys.argv[1], contents, overwrite=True)
            except FileBusy:
                pass
        """
    head = "import os, sys\nfrom ckptool.errors import *\nfrom tests.files.sets import *\n"
    command = [sys.executable, "-c", head + textwrap.dedent(code), str(tmp_path)]
    running = [subprocess.Popen([*command, which]) for which in "ab"]
    assert [process.wait() for process in running] == [0, 0]
    assert content(tmp_path).keys() == NEW.keys()
    assert len(set(content(tmp_path).values())) == 1


@needs_posix
@pytest.mark.parametrize("taken", [False, True])
def test_a_lock_that_is_removed_before_it_is_taken(old, monkeypatch, taken):
    """It is worth nothing: another one may have been made, and taken, meanwhile."""
    lock, late, others = old / f".{INDEX}.ckptool-lock", [os.unlink], []

    def try_lock(fd):
        if late:
            late.pop()(lock)
            if taken:
                others.append(open(lock, "wb"))  # noqa: SIM115
                system.lock(others[0].fileno())
        return system.try_lock(fd)

    monkeypatch.setattr(journal, "try_lock", try_lock)
    if taken:
        with pytest.raises(FileBusy):
            write(old, NEW, overwrite=True)
        others[0].close()
        assert content(old) == OLD | {lock.name: b""}
    else:
        write(old, NEW, overwrite=True)
        assert content(old) == OLD | NEW


@needs_posix
def test_a_reader_leaves_the_journal_that_is_being_written(old, monkeypatch):
    """Half written, it looks like what a kill leaves; the lock on the index tells."""
    monkeypatch.setattr(recovery, "_PAUSES", ())
    replace, readers = os.replace, [local.open_source]

    def read_meanwhile(source, target):
        if target == journal_path(str(old / INDEX)):
            with pytest.raises(FileBusy):
                readers.pop()(old / INDEX)
        replace(source, target)

    monkeypatch.setattr(os, "replace", read_meanwhile)
    write(old, NEW, overwrite=True)
    assert not readers
    assert content(old) == OLD | NEW


def test_a_system_without_locks_keeps_what_may_be_anothers(old, monkeypatch):
    monkeypatch.setattr(journal, "try_lock", lambda _: None)
    debris = f".{INDEX}.ckptool-0123456789ab-00001.part"
    (old / debris).write_bytes(b"whose?")
    write(old, NEW, overwrite=True)
    assert content(old) == OLD | NEW | {debris: b"whose?"}


@needs_posix
def test_the_lock_of_another_user_is_still_seen(old, monkeypatch):
    lock, system_open = str(old / f".{INDEX}.ckptool-lock"), os.open

    def opened(path, flags, *mode):
        if path == lock and flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied")
        return system_open(path, flags, *mode)

    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(WriteDenied):
        write(old, NEW, overwrite=True)
    with open(lock, "wb") as file:
        system.lock(file.fileno())
        with pytest.raises(FileBusy):
            write(old, NEW, overwrite=True)
    assert content(old) == OLD | {f".{INDEX}.ckptool-lock": b""}
    write(old, NEW, overwrite=True)
    assert content(old) == OLD | NEW
