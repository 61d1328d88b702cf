"""A record of one fixture, and what counts as a difference of two records."""

import json
import subprocess
import sys

import pytest

from tests.compat.golden import CALLS, compare
from tests.conftest import FIXTURES
from tests.sources import PROJECT

FILE = "some/dp_full.pth"


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    folder = tmp_path_factory.mktemp("record")
    (folder / "some").mkdir()
    source = FIXTURES / "torch-2.13.0" / "dp_full.pth"
    (folder / FILE).write_bytes(source.read_bytes())
    target = folder / "record.json"
    words = ["-m", "tests.compat.golden", "record", str(target), str(folder / "some")]
    subprocess.run([sys.executable, *words], cwd=PROJECT, check=True, timeout=300)
    return target


@pytest.fixture
def changed(record, tmp_path):
    """Change one call's result in a copy of the record."""

    def change(call, edit):
        document = json.loads(record.read_text())
        edit(document["files"][FILE][call])
        target = tmp_path / "changed.json"
        target.write_text(json.dumps(document))
        return target

    return change


def test_a_record_holds_every_call(record):
    calls = json.loads(record.read_text())["files"][FILE]
    assert set(CALLS) - set(calls) == {"diff next"}
    assert [call for call in CALLS if calls.get(call, {}).get("code") == 2] == [
        "convert --like renamed"
    ]
    assert calls["strip-module"]["sha256"] != calls["add-module"]["sha256"]
    assert calls["report"]["data"]
    assert calls["load_into itself"]["code"] == 0
    assert calls["load_into itself"]["sha256"] == calls["load_into assign"]["sha256"]
    assert calls["load_into other"]["code"] == "MatchError"


def test_a_record_equals_itself(record, capsys):
    assert compare(record, record) == 0
    assert "differences: 0" in capsys.readouterr().out


def test_a_sentence_is_listed_and_not_counted(record, changed, capsys):
    def edit(result):
        result["json"]["complaints"][0]["what"] = "said in other words"
        result["err"] = "other words"

    assert compare(record, changed("doctor", edit)) == 0
    assert capsys.readouterr().out.count("other words") == 2


@pytest.mark.parametrize(
    ("call", "edit"),
    [
        ("list", lambda result: result["json"]["tensors"].pop()),
        ("info", lambda result: result.update(code=2)),
        ("doctor", lambda result: result["json"]["complaints"][0].update(kind="other")),
        ("remap", lambda result: result.pop("sha256")),
        ("load_into meta", lambda result: result["json"]["missing_keys"].append("fc.bias")),
    ],
)
def test_a_difference_of_data_is_counted(call, edit, record, changed, capsys):
    assert compare(record, changed(call, edit)) == 1
    assert f"{FILE}  {call}: " in capsys.readouterr().out


def test_a_file_that_is_gone_is_counted(record, tmp_path):
    document = json.loads(record.read_text())
    document["files"].clear()
    (tmp_path / "empty.json").write_text(json.dumps(document))
    assert compare(record, tmp_path / "empty.json") == 1
    assert compare(tmp_path / "empty.json", record) == 0
