"""One at a time: locks that are held, released by a death, missing on a file system, in the way."""

import errno
import os
import subprocess
import sys

import pytest

from ckptool.errors import FileBusy, FileMissing, UnreadableFile
from ckptool.files import journal, system
from ckptool.files.journal import Journal, is_path_of, open_locked, write_journal
from ckptool.files.temporary import journal_path

pytestmark = pytest.mark.skipif(os.name != "posix", reason="there are no such locks")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.pth"
    path.write_bytes(b"content")
    return str(path)


@pytest.fixture
def without_locks(monkeypatch):
    def refuse(fd, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(system.fcntl, "flock", refuse)


def test_the_file_itself_is_open_to_write(path):
    with open_locked(path) as fd:
        os.pwrite(fd, b"C", 0)
        assert is_path_of(path, fd)
    with open(path, "rb") as file:
        assert file.read() == b"Content"
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)


def test_one_at_a_time(path):
    with open_locked(path):
        with pytest.raises(FileBusy, match="is being edited by ") as caught, open_locked(path):
            pass
        assert caught.value.file == path
    with open_locked(path):
        pass


def test_a_link_leads_to_the_same_lock(path, tmp_path):
    (tmp_path / "link.pth").symlink_to(path)
    with open_locked(path), pytest.raises(FileBusy), open_locked(tmp_path / "link.pth"):
        pass


def test_a_killed_process_holds_nothing(path):
    code = (
        "import sys\n"
        "from ckptool.files.journal import open_locked\n"
        "with open_locked(sys.argv[1]):\n"
        "    print('locked', flush=True)\n"
        "    input()\n"
    )
    command = [sys.executable, "-c", code, path]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as holder:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(FileBusy, match=f"(?m)by process {holder.pid}$"), open_locked(path):
            pass
        holder.kill()
        holder.wait()
        with open_locked(path):
            pass


def test_who_holds_it_where_the_system_does_not_say(path, monkeypatch):
    monkeypatch.setattr(journal, "lock_holder", lambda fd: None)
    with open_locked(path):
        with pytest.raises(FileBusy, match=r"(?m)by another process$"), open_locked(path):
            pass
        write_journal(path, Journal("edit", {}, pid=4711))
        with pytest.raises(FileBusy, match=r"(?m)by process 4711$"), open_locked(path):
            pass


def test_a_holder_that_has_just_gone(path, monkeypatch):
    monkeypatch.setattr(journal, "lock_holder", lambda fd: None)
    answers = [False]
    monkeypatch.setattr(
        journal, "try_lock", lambda fd: answers.pop() if answers else system.try_lock(fd)
    )
    with open_locked(path):
        assert not answers


def test_a_file_that_is_replaced_before_it_is_locked(path, monkeypatch):
    taken = []

    def replaces(fd):
        if not taken:
            os.rename(path, path + ".old")
            with open(path, "wb") as file:
                file.write(b"another")
        taken.append(fd)
        return system.try_lock(fd)

    monkeypatch.setattr(journal, "try_lock", replaces)
    with open_locked(path) as fd:
        assert os.pread(fd, 100, 0) == b"another"
    assert len(taken) == 2


def test_a_file_that_may_only_be_read(path, monkeypatch):
    real = os.open

    def refuse(name, flags, *mode):
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return real(name, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    with open_locked(path) as fd:
        assert os.pread(fd, 100, 0) == b"content"
        with pytest.raises(OSError, match="descriptor"):
            os.pwrite(fd, b"C", 0)


def test_no_file_and_no_way_to_one(path):
    with pytest.raises(FileMissing), open_locked(path + ".missing"):
        pass
    with pytest.raises(UnreadableFile), open_locked(path + "/model.pth"):
        pass


@pytest.mark.usefixtures("without_locks")
def test_a_file_system_without_locks(path):
    with open_locked(path), open_locked(path):
        pass


@pytest.mark.usefixtures("without_locks")
def test_without_locks_the_journal_of_a_living_process_counts(path):
    write_journal(path, Journal("edit", {}, pid=os.getppid()))
    with pytest.raises(FileBusy, match=f"(?m)by process {os.getppid()}$"), open_locked(path):
        pass


@pytest.mark.usefixtures("without_locks")
@pytest.mark.parametrize("journal", ["own", "dead", "restarted", "damaged"])
def test_without_locks_no_other_journal_counts(path, journal):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    journals = {
        "own": Journal("edit", {}),
        "dead": Journal("edit", {}, pid=ended.pid),
        "restarted": Journal("edit", {}, pid=os.getppid(), boot="another"),
        "damaged": Journal("edit", {}, pid=os.getppid()),
    }
    write_journal(path, journals[journal])
    if journal == "damaged":
        with open(journal_path(path), "r+b") as file:
            file.truncate(40)
    with open_locked(path):
        pass


@pytest.mark.parametrize("pid", [1 << 80, 1 << 22])
def test_a_process_that_cannot_be(pid):
    assert not system.is_running(pid)


def test_processes_that_are():
    assert system.is_running(os.getpid())
    assert system.is_running(1)


def test_a_run_of_the_system_has_one_name():
    assert system.boot_id() == system.boot_id()
    if sys.platform == "linux":
        assert len(system.boot_id()) == 36
