"""What every command that reads a checkpoint does: exit codes, JSON, streams, files untouched."""

import json
import shutil

import pytest
import torch

from ckptool.cli.group import VERBS
from ckptool.files import source as files_source
from tests.cli.conftest import unheard
from tests.files.faults import needs_fork

READERS = {
    "list": "list FILE",
    "info": "info FILE",
    "show": "show FILE epoch",
    "stats": "stats FILE",
    "diff": "diff FILE FILE",
    "verify": "verify FILE",
    "scan": "scan FILE",
    "doctor": "doctor FILE",
    "match": "match FILE --like reference.pth",
    "report": "report FILE -o page.html --force",
}
SILENT = ("report",)
"""What writes a page in place of lines."""
FINDS = {"doctor": 1}
"""The exit codes of those that have something to say about the file."""
NAMES = ["a b.pth", 'it\'s "it".pth', "modèle 层.pth", "a$b;c&d.pth", "model"]
every = pytest.mark.parametrize("verb", READERS)


def words(verb, file="model.pth", *more):
    return [file if word == "FILE" else word for word in READERS[verb].split()] + [*more]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder: a DataParallel checkpoint and the same weights without wrappers."""
    monkeypatch.chdir(tmp_path)
    state = {"fc.weight": torch.arange(600.0).view(30, 20), "fc.bias": torch.ones(30)}
    wrapped = {f"module.{name}": tensor for name, tensor in state.items()}
    torch.save({"epoch": 7, "state_dict": wrapped}, "model.pth")
    torch.save(state, "reference.pth")
    return tmp_path


@pytest.fixture
def untouched(folder):
    """Check after the test that no file was changed."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    yield
    (folder / "page.html").unlink(missing_ok=True)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name: after[name] for name in before} == before


def test_the_table_has_every_command_that_reads():
    assert READERS.keys() | {"recipes"} == VERBS["Inspect"].keys()


@every
def test_what_is_asked_for_is_on_stdout(ckptool, untouched, verb):
    done = ckptool(*words(verb))
    assert done.code == FINDS.get(verb, 0)
    assert bool(done.out) == (verb not in SILENT)
    assert "unexpected" not in done.err
    assert "Traceback" not in done.err


@every
def test_json_is_one_document_that_names_its_schema(ckptool, untouched, verb):
    done = ckptool(*words(verb), "--json")
    assert done.code == FINDS.get(verb, 0)
    document = json.loads(done.out, parse_constant=pytest.fail)
    assert document["schema"].startswith(f"ckptool.{verb}/")
    assert ckptool(*words(verb), "--json").document == document


@every
def test_quiet_says_nothing_but_what_is_asked_for(ckptool, untouched, verb):
    loud, quiet = ckptool(*words(verb)), ckptool(*words(verb), "-q")
    assert (quiet.code, quiet.out, quiet.err) == (loud.code, loud.out, "")


@every
def test_a_file_that_cannot_be_read_is_named(ckptool, folder, forbidden, verb):
    for more in ((), ("--json",), ("-q",)):
        missing = ckptool(*words(verb, "none.pth"), *more)
        assert missing.code == (2 if verb not in ("verify", "scan", "doctor") else missing.code)
        assert missing.code in (1, 2)
        assert "none.pth" in missing.err + missing.out
    forbidden("model.pth")
    denied = ckptool(*words(verb))
    assert denied.code in (1, 2)
    assert "model.pth" in denied.err + denied.out
    assert "unexpected" not in denied.err


@every
@pytest.mark.parametrize("size", [0, 3, 700, -1], ids=["empty", "mark", "half", "end"])
def test_a_file_that_was_cut_is_named(ckptool, folder, verb, size):
    whole = (folder / "model.pth").read_bytes()
    (folder / "model.pth").write_bytes(whole[:size])
    done = ckptool(*words(verb))
    assert done.code in ((0, 1) if verb == "scan" else (1, 2))  # scan judges pickles alone
    assert "model.pth" in done.err + done.out
    assert "unexpected" not in done.err + done.out


@every
def test_a_flipped_bit_ends_in_a_sentence(ckptool, folder, verb):
    """Not every command reads every byte; verify does, and finds each."""
    whole = (folder / "model.pth").read_bytes()
    step = 5 if verb == "verify" else 97
    for at in range(0, len(whole), step):
        (folder / "model.pth").write_bytes(
            whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :]
        )
        done = ckptool(*words(verb), "-q")
        assert done.code in (0, 1, 2), at
        assert "unexpected" not in done.err, at


@every
def test_ctrl_c_is_130(ckptool, untouched, monkeypatch, verb):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(files_source.FileSource, "__init__", interrupted)
    done = ckptool(*words(verb))
    assert (done.code, done.out) == (130, "")


@needs_fork
@pytest.mark.parametrize("shell", ["EACH >&- 2>&- </dev/null", "EACH | true"])
def test_a_closed_stdout_is_no_error(untouched, shell):
    codes, said = unheard([words(verb) for verb in READERS], shell)
    assert dict(zip(READERS, codes, strict=True)) == {verb: FINDS.get(verb, 0) for verb in READERS}
    assert "Error" not in said


@every
@pytest.mark.parametrize("name", NAMES)
def test_any_name_of_a_file_will_do(ckptool, folder, verb, name):
    shutil.copy("model.pth", name)
    assert ckptool(*words(verb, name)).code == FINDS.get(verb, 0)
    assert ckptool(*words(verb, name), "--json").code == FINDS.get(verb, 0)


@every
def test_a_name_with_a_leading_dash(ckptool, folder, verb):
    shutil.copy("model.pth", "-x.pth")
    assert ckptool(*words(verb, "./-x.pth")).code == FINDS.get(verb, 0)
    given = words(verb, "-x.pth")
    assert ckptool(*given).code == 2
    files = [word for word in given if word == "-x.pth" or word == "epoch"]
    others = [word for word in given[1:] if word not in files]
    assert ckptool(verb, *others, "--", *files).code == FINDS.get(verb, 0)
