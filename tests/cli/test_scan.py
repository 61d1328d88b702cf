"""`ckptool scan`: lines, exit codes, JSON, folders."""

import os
import pickle

import torch

from tests.attacks.test_pickle_attacks import COMMAND, PAYLOADS


def evil(path):
    path.write_bytes(PAYLOADS["REDUCE of os.system"])
    return path


def test_a_state_dict_is_data(ckptool, tmp_path):
    path = tmp_path / "model.pth"
    torch.save({"w": torch.ones(2)}, path)
    done = ckptool("scan", "--strict", path)
    assert (done.code, done.out, done.err) == (0, f"{path}: data (1 pickle)\n", "")


def test_a_module_needs_code_and_is_a_finding_of_the_strict_alone(ckptool, tmp_path):
    path = tmp_path / "model.pth"
    torch.save(torch.nn.Linear(2, 2), path)
    done = ckptool("scan", path)
    assert done.code == 0
    assert done.out == f"{path}: needs code (imports torch.nn.modules.linear)\n"
    assert ckptool("scan", "--strict", path).code == 1


def test_a_call_is_printed_with_its_arguments(ckptool, tmp_path):
    path = evil(tmp_path / "a.onnx")
    done = ckptool("scan", path)
    assert done.code == 1
    first, second = done.out.splitlines()
    assert first == f"{path}: runs code (imports os)"
    assert second == f"  byte 34, REDUCE: os.system({COMMAND!r})"


def test_a_folder_and_a_pattern_and_what_is_missing(ckptool, tmp_path):
    torch.save({}, tmp_path / "a.pth")
    evil(tmp_path / ".hidden")
    (tmp_path / "b.py").write_text("import os\n")
    (tmp_path / "c.txt").write_text("nothing\n")
    done = ckptool("scan", tmp_path)
    assert done.code == 1
    assert done.out.splitlines()[-1] == (
        "4 files: 1 runs code, 1 data, 2 without a pickle, 1 with Python code, which is not checked"
    )
    done = ckptool("scan", tmp_path / "*.pth", tmp_path / "a.pth")
    assert done.out == f"{tmp_path / 'a.pth'}: data (1 pickle)\n"
    done = ckptool("scan", tmp_path / "no.pth", tmp_path)
    assert done.code == 2
    assert "no such file" in done.err
    assert "1 runs code" in done.out


def test_a_folder_that_cannot_be_listed_is_an_error(ckptool, tmp_path, monkeypatch):
    (tmp_path / "secret").mkdir()
    evil(tmp_path / "a.pkl")
    listing = os.scandir

    def refusing(path):
        if os.fspath(path).endswith("secret"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return listing(path)

    monkeypatch.setattr(os, "scandir", refusing)
    done = ckptool("scan", tmp_path)
    assert done.code == 2
    assert f"{tmp_path / 'secret'}: " in done.err


def test_many_files_have_a_line_where_there_is_something_to_say(ckptool, tmp_path):
    for number in range(30):
        (tmp_path / f"{number}.pkl").write_bytes(pickle.dumps(number))
    evil(tmp_path / "evil.pkl")
    done = ckptool("scan", tmp_path)
    assert len(done.out.splitlines()) == 3
    assert done.out.splitlines()[-1] == "31 files: 1 runs code, 30 data"


def test_the_document(ckptool, tmp_path):
    path = evil(tmp_path / "a.pkl")
    done = ckptool("scan", "--json", path, tmp_path / "no")
    assert done.code == 2
    assert done.document["schema"] == "ckptool.scan/1"
    assert not done.document["ok"]
    (found,) = done.document["files"]
    assert found["verdict"] == "runs"
    assert found["streams"][0]["calls"] == [
        {"text": f"os.system({COMMAND!r})", "offset": 34, "opcode": "REDUCE", "verdict": "runs"}
    ]
    assert [error["file"] for error in done.document["errors"]] == [str(tmp_path / "no")]


def test_what_a_terminal_might_obey_is_spelled_out(ckptool, tmp_path):
    path = tmp_path / "a.pkl"
    path.write_bytes(b"\x80\x02cos\nsystem\nX\x05\x00\x00\x00\x1b[2J\x07\x85R.")
    assert "\x1b" not in ckptool("scan", path).out
