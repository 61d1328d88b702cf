"""`ckptool recover`, and what the other verbs say of an edit that was cut short."""

import os

import pytest

from ckptool.files.editing import Edit, Patch
from ckptool.files.journal import write_journal
from ckptool.files.temporary import journal_path

NEW = bytes(range(256)) * 4


@pytest.fixture
def cut(model):
    """A checkpoint to which half of an edit was appended before its process was killed."""
    old = model.read_bytes()
    with open(model, "r+b") as file:
        edit = Edit.from_patch(file.fileno(), Patch(len(old), NEW))
        write_journal(str(model), edit.to_journal())
        file.seek(len(old))
        file.write(NEW[:700])
    return model, old


def clean(model, content):
    return model.read_bytes() == content and os.listdir(model.parent) == [model.name]


def test_it_rolls_back_and_says_so(ckptool, cut):
    model, old = cut
    done = ckptool("recover", model)
    assert (done.code, done.out) == (0, "")
    assert done.err == (
        f"{model}: rolled back to its {len(old):,} bytes from before the interrupted edit of "
        "process "
        f"{os.getpid()}\n"
    )
    assert clean(model, old)
    done = ckptool("recover", model)
    assert (done.code, done.err) == (0, f"{model}: nothing to recover\n")


def test_as_json_and_quiet(ckptool, cut):
    model, old = cut
    done = ckptool("recover", "--json", "-q", model)
    assert (done.code, done.err) == (0, "")
    assert done.document == {
        "schema": "ckptool.recover/1",
        "file": str(model),
        "action": "rolled-back",
        "text": f"rolled back to its {len(old):,} bytes from before the interrupted edit of "
        "process "
        f"{os.getpid()}",
    }


def test_an_edit_that_is_all_there_is_kept(ckptool, cut):
    model, old = cut
    model.write_bytes(old + NEW)
    done = ckptool("recover", "--json", model)
    assert (done.code, done.document["action"]) == (0, "completed")
    assert clean(model, old + NEW)


@pytest.mark.parametrize("verb", [["list"], ["info"], ["strip-module", "--dry-run"]])
def test_whoever_opens_the_file_says_it_in_a_sentence(ckptool, cut, verb):
    model, old = cut
    done = ckptool(*verb, model)
    assert done.code == 0
    first = done.err.splitlines()[0]
    assert first.startswith(f"warning: {model}: rolled back to its {len(old):,} bytes from before")
    assert "CheckpointWarning" not in done.err
    assert clean(model, old)


def test_quiet_silences_the_warning(ckptool, cut):
    model, old = cut
    done = ckptool("list", "-q", model)
    assert (done.code, done.err) == (0, "")
    assert clean(model, old)


def test_the_same_again_is_said_again(ckptool, cut):
    model, old = cut
    for _ in range(2):
        with open(model, "r+b") as file:
            file.truncate(len(old))
            write_journal(str(model), Edit.from_patch(file.fileno(), Patch(0, NEW)).to_journal())
            file.write(NEW[:512])
        assert "warning: " in ckptool("info", model).err
        assert clean(model, old)


@pytest.mark.parametrize("verb", ["recover", "list"])
def test_another_file_in_its_place_is_an_error_and_stays(ckptool, cut, verb):
    model, _ = cut
    model.write_bytes(NEW * 50)
    done = ckptool(verb, model)
    assert done.code == 2
    assert f"{model}: the journal next to it belongs to other content" in done.err
    assert f"ckptool recover --discard {model}" in done.err
    assert model.read_bytes() == NEW * 50
    done = ckptool("recover", "--discard", "--json", model)
    assert (done.code, done.document["action"]) == (0, "discarded")
    assert clean(model, NEW * 50)
    assert ckptool("recover", "--discard", "--json", model).document["action"] == "nothing"


def test_a_damaged_journal(ckptool, cut):
    model, _ = cut
    before = model.read_bytes()
    with open(journal_path(str(model)), "wb") as file:
        file.write(b"{}")
    done = ckptool("recover", model)
    assert done.code == 2
    assert "the journal of an in-place edit cannot be used" in done.err
    assert ckptool("recover", "--discard", model).code == 0
    assert clean(model, before)


def test_no_such_file(ckptool, tmp_path):
    done = ckptool("recover", tmp_path / "nothing.pth")
    assert done.code == 2
    assert "nothing.pth: no such file" in done.err
