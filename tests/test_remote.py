"""Checkpoints at addresses: read as on this disk, by few requests; faults are sentences."""

import io
import json
import os
import re
import shutil
import warnings
import zipfile
from subprocess import CompletedProcess

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckptool
from ckptool.cli import main
from ckptool.errors import (
    CheckpointError,
    FileDenied,
    FileMissing,
    LimitExceeded,
    UnreadableFile,
    UsageError,
)
from ckptool.files import http
from ckptool.files.remote import _look_up_repository
from ckptool.inspection.scan import find_files
from tests.conversions import convert_by_options
from tests.servers import SHA, Handler, serving
from tests.sources import PROJECT


@pytest.fixture
def served(tmp_path):
    (tmp_path / "there").mkdir()
    with serving(tmp_path / "there") as served:
        yield served


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(http.time, "sleep", lambda seconds: None)


@pytest.fixture
def large(served):
    """A file of 60 tensors, 24 MB, at an address."""
    torch.manual_seed(0)
    state = {f"l.{i}.w": torch.randn(100, 1000) for i in range(60)}
    path = os.path.join(served.folder, "large.pth")
    torch.save(state, path)
    return path


def fixtures_of(folder, endings=(".pth", ".pt", ".safetensors", ".npz", ".ckpt", ".gguf")):
    files = (path for path in folder.rglob("*") if path.suffix in endings and path.is_file())
    return sorted(one for one in files if not os.path.isdir(f"{one}.tensors"))


def test_every_file_reads_as_on_this_disk(fixtures):
    with serving(fixtures) as served:
        for path in fixtures_of(fixtures)[::3]:  # of every format and folder
            address = f"{served.url}/{path.relative_to(fixtures)}"
            try:
                here = ckptool.list_tensors(path).to_dict()
            except CheckpointError as error:
                with pytest.raises(type(error)):
                    ckptool.list_tensors(address)
                continue
            there = ckptool.list_tensors(address).to_dict()
            assert there["tensors"] == here["tensors"], path
            assert told(ckptool.info, address) == told(ckptool.info, path), path
            assert told(ckptool.verify, address) == told(ckptool.verify, path), path
            assert told(ckptool.stats, address) == told(ckptool.stats, path), path
            assert told(ckptool.scan, address) == told(ckptool.scan, path), path
            assert ckptool.diff(path, address).identical, path


def told(verb, path):
    """What a verb says of a file, but for its path; the class of its error."""
    try:
        document = verb(path).to_dict()
    except CheckpointError as error:
        return type(error)
    if verb is ckptool.info:  # what is next to a far file is not looked at
        document["notes"] = [one for one in document["notes"] if "next to it" not in one]
    if verb is ckptool.verify:  # where records begin takes a request for each
        document["problems"] = [one for one in document["problems"] if one["kind"] != "offsets"]
        document["ok"] = not document["problems"]
    places = rf"(http://[\d.:]+|{re.escape(str(PROJECT))}/fixtures)/"
    text = re.sub(places, "", json.dumps(document, default=str))
    # What is written of a far file lies where the user stands.
    return re.sub(r"[\w./-]+/([\w.-]+)", r"\1", text)


@pytest.mark.parametrize("name", ["large.safetensors", "large.pth"])
def test_a_list_takes_few_requests(name, large, served):
    if name.endswith(".safetensors"):
        save_file(torch.load(large), os.path.join(served.folder, name))
    assert len(ckptool.list_tensors(f"{served.url}/{name}").tensors) == 60
    assert len(served.asked) == (2 if name.endswith(".pth") else 1)
    assert served.bytes <= 2 << 17


def test_an_index_and_its_shards_take_one_request_each_and_one_to_tell_their_format(large, served):
    index = os.path.join(served.folder, "m.safetensors.index.json")
    ckptool.convert(large, index, max_shard_size="2MB")
    found = ckptool.list_tensors(f"{served.url}/m.safetensors.index.json")
    assert len(found.tensors) == 60
    assert len(served.asked) == 2 + len([x for x in os.listdir(served.folder) if "-of-" in x])


def test_a_conversion_is_that_of_the_file_here(large, served, tmp_path):
    ckptool.convert(f"{served.url}/large.pth", tmp_path / "there.safetensors")
    ckptool.convert(large, tmp_path / "here.safetensors")
    assert (tmp_path / "there.safetensors").read_bytes() == (
        tmp_path / "here.safetensors"
    ).read_bytes()
    assert served.bytes < 1.05 * os.path.getsize(large)


def test_a_chunk_of_a_folder_of_processes_takes_one_request(served, tmp_path):
    state = {f"l{i}.w": torch.randn(300, 500) for i in range(20)}
    folder = os.path.join(served.folder, "run")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(state, checkpoint_id=folder)
    target = tmp_path / "x.safetensors"
    ckptool.convert(f"{served.url}/run/.metadata", target)
    size = sum(os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder))
    assert served.bytes < 1.1 * size + 1_000_000
    assert len(served.asked) <= 20 + 8
    assert ckptool.diff(target, folder).identical


def test_an_extract_fetches_what_it_takes(large, served, tmp_path):
    with ckptool.open(f"{served.url}/large.pth") as checkpoint:
        checkpoint.then(ckptool.Take(include=["l.30.w"])).save(tmp_path / "one.pth")
    assert torch.equal(torch.load(tmp_path / "one.pth")["l.30.w"], torch.load(large)["l.30.w"])
    assert served.bytes < 400_000 + 4 * http_window()


def http_window():
    from ckptool.files.remote import WINDOW

    return WINDOW


def test_what_reads_tensors_takes_an_address(large, served):
    address = f"{served.url}/large.pth"
    assert ckptool.diff(large, address).identical
    assert ckptool.verify(address).ok
    state = ckptool.load_state_dict(address)
    assert torch.equal(state["l.7.w"], torch.load(large)["l.7.w"])
    model = torch.nn.Module()
    model.l = torch.nn.ModuleList(torch.nn.Module() for _ in range(60))
    for one in model.l:
        one.w = torch.nn.Parameter(torch.zeros(100, 1000))
    ckptool.load_into(model, address)
    assert torch.equal(model.l[3].w, state["l.3.w"])


def test_the_query_of_an_address_is_never_shown(ckptool_does, large, served, tmp_path):
    address = f"{served.url}/large.pth?signature=SECRET"
    for words in (
        *(["list", address], ["info", address], ["doctor", address], ["stats", address]),
        *(["verify", address], ["scan", address], ["show", address, "l.1.w"]),
        ["diff", address, address],
        ["match", address, "--like", large],
        ["convert", address, tmp_path / "x.safetensors", "--force"],
        ["report", address, "-o", tmp_path / "x.html", "--force"],
    ):
        for more in ([], ["--json"]):
            done = ckptool_does(*words, *more)
            assert done.returncode in (0, 1), done.stderr
            assert "SECRET" not in done.stdout + done.stderr, words
    for path in tmp_path.glob("x.*"):
        assert b"SECRET" not in path.read_bytes()


@pytest.fixture
def ckptool_does(capsys):
    def does(*words):
        code = main([str(word) for word in words])
        return CompletedProcess(words, code, *capsys.readouterr())

    return does


def test_a_rehearsal_says_what_would_be_fetched(large, served, tmp_path):
    def told(**options):
        before = served.bytes
        target = tmp_path / "x.safetensors"
        notes = convert_by_options(f"{served.url}/large.pth", target, dry_run=True, **options).notes
        assert served.bytes - before < 400_000
        return [note for note in notes if "would fetch" in note]

    one = 400_000
    assert told() == [f"would fetch {60 * one:,} bytes of tensor data"]
    assert told(include=["l.30.w"]) == [f"would fetch {one:,} bytes of tensor data"]
    assert told(dtype="bfloat16") == [f"would fetch {60 * one:,} bytes of tensor data"]


def test_damage_is_noticed_while_it_is_copied(large, served, tmp_path):
    with open(large, "r+b") as file:
        file.seek(5_000_000)
        file.write(b"\xff" * 8)
    with pytest.raises(CheckpointError, match="CRC-32"):
        ckptool.convert(f"{served.url}/large.pth", tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


@pytest.mark.parametrize("misdeed", [503, 429, "cut"])
def test_what_fails_once_is_asked_for_again(misdeed, large, served, tmp_path):
    served.misdeeds = dict.fromkeys(range(2, 12, 3), misdeed)
    ckptool.convert(f"{served.url}/large.pth", tmp_path / "there.safetensors")
    assert ckptool.diff(large, tmp_path / "there.safetensors").identical


@pytest.mark.parametrize(
    ("misdeed", "why"),
    [
        (500, "cannot be downloaded: the server answered 500"),
        ("lie", "other bytes than requested"),
        (418, "the server answered 418"),
    ],
)
def test_what_always_fails_is_a_sentence(misdeed, why, large, served):
    served.misdeeds = dict.fromkeys(range(1, 100), misdeed)
    with pytest.raises(UnreadableFile, match=why):
        ckptool.list_tensors(f"{served.url}/large.pth")


def test_a_file_that_changes_meanwhile_is_refused(large, served, tmp_path):
    with ckptool.open(f"{served.url}/large.pth") as checkpoint:
        torch.save({f"l.{i}.w": torch.zeros(100, 1000) for i in range(60)}, large)
        with pytest.raises(UnreadableFile, match="another version"):
            checkpoint.save(tmp_path / "x.pth")
    assert not (tmp_path / "x.pth").exists()
    assert len(ckptool.list_tensors(f"{served.url}/large.pth").tensors) == 60  # as it is by now


def test_a_server_without_ranges_is_read_from_the_start(large, served, monkeypatch):
    served.ranges = False
    save_file({"a": torch.ones(3)}, os.path.join(served.folder, "small.safetensors"))
    assert torch.equal(
        ckptool.load_state_dict(f"{served.url}/small.safetensors")["a"], torch.ones(3)
    )
    monkeypatch.setattr(http, "FROM_THE_START", 1 << 20)
    with pytest.raises(UnreadableFile, match="the server does not support range requests"):
        ckptool.list_tensors(f"{served.url}/large.pth")


def test_no_redirect_leads_to_a_local_file(large, served):
    served.redirects = {"a.pth": f"file://{large}", "b.pth": f"{served.url}/large.pth"}
    with pytest.raises(UnreadableFile):
        ckptool.list_tensors(f"{served.url}/a.pth")
    assert len(ckptool.list_tensors(f"{served.url}/b.pth").tensors) == 60


def test_of_an_endless_answer_what_was_asked_for_is_read(large, served, tmp_path):
    served.misdeeds = dict.fromkeys(range(1, 100), "endless")
    ckptool.convert(f"{served.url}/large.pth", tmp_path / "x.pth")
    assert ckptool.diff(large, tmp_path / "x.pth").identical


def test_a_size_that_is_a_lie_costs_few_requests(large, served):
    served.misdeeds = dict.fromkeys(range(1, 100), "huge")
    with pytest.raises(UnreadableFile):
        ckptool.list_tensors(f"{served.url}/large.pth")
    assert len(served.asked) <= 1 + http.ATTEMPTS


def test_an_index_of_more_files_than_anyone_has_is_refused(served):
    index = {"weight_map": {f"l.{i}": f"m-{i}.safetensors" for i in range(5000)}}
    with open(os.path.join(served.folder, "m.safetensors.index.json"), "w") as file:
        json.dump(index, file)
    with pytest.raises(LimitExceeded, match="has 5,000 files"):
        ckptool.list_tensors(f"{served.url}/m.safetensors.index.json")
    assert len(served.asked) <= 3


def test_an_address_with_a_password_is_refused_and_not_shown(large, served):
    address = served.url.replace("://", "://user:word@") + "/large.pth"
    with pytest.raises(UnreadableFile, match="contains a user or a password") as raised:
        ckptool.list_tensors(address)
    assert "word@" not in f"{raised.value} {raised.value.hint}"
    assert served.asked == []


def test_whether_a_folder_is_there_is_asked_once(fixtures, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe("/once.pth", (fixtures / "torch-2.13.0" / "dp_full_cuda3.pth").read_bytes())
    asked = []
    isdir = type(memory).isdir
    monkeypatch.setattr(
        type(memory), "isdir", lambda self, path: asked.append(path) or isdir(self, path)
    )
    ckptool.list_tensors("memory://once.pth")
    assert asked.count("/once.pth") == 1


def test_what_is_packed_is_refused(large, served):
    served.headers = {"Content-Encoding": "gzip"}
    with pytest.raises(UnreadableFile, match=r"compresses the file \(gzip\)"):
        ckptool.list_tensors(f"{served.url}/large.pth")


def test_a_web_page_in_place_of_the_file_is_named(large, served, monkeypatch):
    def answer(self, served, path):
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"6\r\n<html>\r\n0\r\n\r\n")

    monkeypatch.setattr(Handler, "file", answer)
    with pytest.raises(UnreadableFile, match="the server sent a web page, not the file"):
        ckptool.list_tensors(f"{served.url}/large.pth")


def test_a_server_that_sends_little_at_a_time_is_asked_until_all_is_there(large, served, tmp_path):
    served.most = 100_000  # a piece takes more answers than a failure is given attempts
    ckptool.convert(f"{served.url}/large.pth", tmp_path / "there.pth")
    assert ckptool.diff(large, tmp_path / "there.pth").identical


@pytest.mark.parametrize(
    ("name", "spelled"),
    [
        ("a b.pth", "a b.pth"), ("a b.pth", "a%20b.pth"), ("é日.pth", "é日.pth"),
        ("a%20b.pth", "a%2520b.pth"), ("a#b.pth", "a%23b.pth"), ("a.pth", "a.pth#part"),
    ],
)  # fmt: skip
def test_an_address_is_taken_as_a_browser_takes_it(name, spelled, served):
    torch.save({"a": torch.ones(3)}, os.path.join(served.folder, name))
    assert torch.equal(
        ckptool.load_state_dict(f"{served.url}/{spelled}")["a"],
        torch.load(f"{served.folder}/{name}")["a"],
    )
    assert ckptool.list_tensors(f"{served.url}/{spelled}".replace("http", "HTTP", 1)).tensors


@pytest.mark.parametrize("address", ["http://[::1", "http://host:port/x.pth", "http://a b/x.pth"])
def test_what_is_no_address_is_a_sentence(address):
    with pytest.raises(UnreadableFile, match="is not a valid address"):
        ckptool.list_tensors(address)


def test_a_number_without_end_is_no_size(large, served):
    served.misdeeds = {1: "long"}
    with pytest.raises(UnreadableFile, match="other bytes than requested"):
        ckptool.list_tensors(f"{served.url}/large.pth")


def test_a_redirect_to_itself_is_a_line(served):
    served.redirects = {"a.pth": "/a.pth"}
    with pytest.raises(UnreadableFile, match="infinite loop") as raised:
        ckptool.list_tensors(f"{served.url}/a.pth")
    assert "\n" not in raised.value.message


def test_a_member_of_a_zip_reads_through_a_chain(fixtures):
    fsspec = pytest.importorskip("fsspec")
    torch.save({"a": torch.ones(3)}, content := io.BytesIO())
    with zipfile.ZipFile(packed := io.BytesIO(), "w") as archive:
        archive.writestr("run/a.pth", content.getvalue())
    fsspec.filesystem("memory").pipe("/packed.zip", packed.getvalue())
    state = ckptool.load_state_dict("zip://run/a.pth::memory://packed.zip")
    assert torch.equal(state["a"], torch.ones(3))
    for missing in ("zip://b.pth::memory://packed.zip", "zip://a.pth::memory://nothing.zip"):
        with pytest.raises(FileMissing, match="no such file"):
            ckptool.list_tensors(missing)


def test_what_is_not_there_or_not_ours_is_told(served):
    with pytest.raises(FileMissing):
        ckptool.list_tensors(f"{served.url}/nothing.pth")
    with pytest.raises(UnreadableFile, match=r"cannot be downloaded: .*refused"):
        ckptool.list_tensors("http://127.0.0.1:9/x.pth")
    served.token = "secret"
    with pytest.raises(FileDenied, match="401") as raised:
        ckptool.list_tensors(f"{served.url}/nothing.pth?token=hidden")
    assert "hidden" not in str(raised.value)


def test_nothing_is_written_to_a_server_of_http(large, served):
    for kind in ("http", "https", "hf"):
        with pytest.raises(UsageError, match=f"cannot write to {kind}://"):
            ckptool.convert(large, f"{kind}://host/there/x.safetensors")
    with (
        ckptool.open(f"{served.url}/large.pth") as checkpoint,
        pytest.raises(UsageError, match="is remote, and remote files cannot be edited in place"),
    ):
        checkpoint.save(f"{served.url}/large.pth", in_place=True)


def test_fsspec_reads_what_it_knows(fixtures):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    folder = fixtures / "dcp" / "training-2.13.0"
    for path in folder.iterdir():
        memory.pipe(f"/run/{path.name}", path.read_bytes())
    assert ckptool.diff(folder, "memory://run").identical
    with pytest.raises(FileMissing):
        ckptool.list_tensors("memory://run/nothing.pth")
    with pytest.raises(CheckpointError, match="fsspec does not support this address"):
        ckptool.list_tensors("nosuch://run/nothing.pth")


@pytest.fixture
def hub(served, monkeypatch):
    pytest.importorskip("huggingface_hub")
    _look_up_repository.cache_clear()
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    monkeypatch.setenv("HF_TOKEN", "secret")
    yield served
    _look_up_repository.cache_clear()


def test_the_commit_that_is_read_is_told(large, hub, tmp_path):
    receipt = ckptool.convert("hf://org/model/large.pth", tmp_path / "x.pth")
    assert f"read at revision hf://org/model@{SHA}" in receipt.notes


@pytest.mark.parametrize(
    "address",
    [
        "hf://org/model", "hf://org/model@main/model.safetensors.index.json",
        "{}/org/model/blob/main/model.safetensors.index.json", "{}/org/model",
        "{}/org/model/tree/main",
    ],
)  # fmt: skip
def test_a_repository_reads_as_a_folder(address, large, hub):
    hub.token = "secret"
    index = os.path.join(hub.folder, "model.safetensors.index.json")
    ckptool.convert(large, index, max_shard_size="2MB")
    os.unlink(large)
    assert ckptool.diff(index, address.format(hub.url)).identical
    assert {token for token in hub.seen_tokens if token} == {"Bearer secret"}


def test_a_token_stays_with_its_host(large, hub, tmp_path):
    shutil.copyfile(large, tmp_path / "elsewhere.pth")
    with serving(tmp_path) as other:
        other.url = other.url.replace("127.0.0.1", "localhost")
        hub.redirects = {f"org/model/resolve/{SHA}/large.pth": f"{other.url}/elsewhere.pth"}
        assert len(ckptool.list_tensors("hf://org/model/large.pth").tensors) == 60
        assert set(other.seen_tokens) == {None}


def test_a_redirect_is_followed_once_and_anew_when_its_end_expires(large, hub, tmp_path):
    asked = []
    hub.note = asked.append
    resolved = f"org/model/resolve/{SHA}/large.pth"
    with serving(hub.folder) as other:
        hub.redirects = {resolved: f"{other.url}/large.pth"}
        ckptool.convert("hf://org/model/large.pth", tmp_path / "a.pth")
        assert asked.count(resolved) == 2  # at the beginning, and to see that it is the same
        assert len(other.asked) > 10
        asked.clear()
        other.asked.clear()
        other.misdeeds = {5: 403}
        ckptool.convert("hf://org/model/large.pth", tmp_path / "b.pth")
        assert 3 <= asked.count(resolved) <= 12  # those that were on their way ask, too
    assert ckptool.diff(large, tmp_path / "a.pth").identical
    assert ckptool.diff(large, tmp_path / "b.pth").identical


def test_a_repository_is_scanned_as_a_folder(large, hub):
    os.mkdir(os.path.join(hub.folder, "more"))
    torch.save({"a": torch.ones(3)}, os.path.join(hub.folder, "more", "a b.pth"))
    top = f"hf://org/model@{SHA}"
    found = list(find_files(["hf://org/model"]))
    assert found == [f"{top}/large.pth", f"{top}/more/a b.pth"]
    assert [ckptool.scan(one).verdict for one in found] == ["data", "data"]


def test_a_gated_repository_is_told(large, hub):
    told = {
        "X-Error-Code": "GatedRepo",
        "X-Error-Message": "Access to model org/model is restricted",
    }
    for status in (401, 403):
        hub.refusal = (status, told)
        with pytest.raises(FileDenied, match=f"{status} Access to model org/model") as raised:
            ckptool.list_tensors("hf://org/model/large.pth")
        assert raised.value.hint == "request access on its page, then run: hf auth login"
    hub.refusal = (401, {})
    with pytest.raises(FileDenied) as raised:
        ckptool.list_tensors("hf://org/model/large.pth")
    assert raised.value.hint == "run hf auth login, or set HF_TOKEN"


@pytest.mark.parametrize(
    "address", ["hf://org/model@refs/pr/3/large.pth", "{}/org/model/blob/refs%2Fpr%2F3/large.pth"]
)
def test_a_pull_request_is_a_revision(address, large, hub):
    asked = []
    hub.note = asked.append
    assert len(ckptool.list_tensors(address.format(hub.url)).tensors) == 60
    assert "api/models/org/model/revision/refs/pr/3" in asked


def test_a_repository_that_is_not_there_is_told(hub):
    with pytest.raises(FileMissing, match="no such repository"):
        ckptool.list_tensors("hf://org/missing")
    with pytest.raises(FileMissing, match="no such file"):
        ckptool.list_tensors("hf://org/model/nothing.pth")


def test_what_was_asked_is_told_to_those_who_ask(large, served, monkeypatch, capsys):
    from ckptool.cli import main
    from ckptool.files import remote

    monkeypatch.setenv("CKPTOOL_DEBUG", "1")
    monkeypatch.setattr(remote, "TRAFFIC", remote.Traffic())
    assert main(["list", f"{served.url}/large.pth"]) == 0
    assert "2 requests, 262,144 bytes" in capsys.readouterr().err


def test_fsspec_notices_a_file_that_changes_meanwhile(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    torch.save({"a": torch.ones(200_000)}, tmp_path / "a.pth")
    memory.pipe("/changing.pth", (tmp_path / "a.pth").read_bytes())
    with ckptool.open("memory://changing.pth") as checkpoint:
        memory.pipe("/changing.pth", b"another")
        with pytest.raises(UnreadableFile):
            checkpoint.save(tmp_path / "x.pth")
    assert not (tmp_path / "x.pth").exists()


def test_no_error_shows_what_may_be_secret(served):
    address = served.url.replace("://", "://user:word@") + "/nothing.pth?signature=hidden"
    with pytest.raises(CheckpointError) as raised:
        ckptool.list_tensors(address)
    assert "hidden" not in str(raised.value)
    assert "word@" not in str(raised.value)
    with pytest.raises(FileMissing) as raised:
        ckptool.list_tensors(f"{served.url}/nothing.pth?signature=hidden")
    assert "hidden" not in str(raised.value)


def test_a_list_of_a_folder_of_dcp_asks_for_no_file_of_a_rank(fixtures):
    folder = fixtures / "dcp" / "meshed-2.13.0"
    with serving(folder) as served:
        there = ckptool.list_tensors(f"{served.url}/.metadata").to_dict()
        assert there["tensors"] == ckptool.list_tensors(folder).to_dict()["tensors"]
        assert {path for path, _, _ in served.asked} == {".metadata"}
        with ckptool.open(f"{served.url}/.metadata") as far, ckptool.open(folder) as near:
            assert far.details.size == near.details.size
