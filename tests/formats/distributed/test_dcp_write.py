"""Folders of DCP written, and edited in place: torch reads what is there, and nothing is lost."""

import pickle
import re
import shutil
import signal
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import ckptool
from ckptool.errors import NoSpace, NotRepresentable, TargetExists, WriteError
from ckptool.files import atomic
from ckptool.formats import open_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::ckptool.errors.CheckpointWarning"),
]


def training():
    """Return the state of a run under DataParallel: names stand in keys and in values."""
    torch.manual_seed(0)
    model = nn.DataParallel(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    names = dict(model.named_parameters())
    group = {**optimizer.param_groups[0], "params": list(names)}
    state = {name: optimizer.state[one] for name, one in names.items()}
    return {
        "model": dict(model.state_dict()),
        "optim": {"state": state, "param_groups": [group]},
        "step": 3,
        "list": [1, [2, {"a": torch.ones(2)}]],
        "pair": (1, torch.arange(3)),
    }


@pytest.fixture
def run(tmp_path):
    """A folder that torch has saved."""
    dcp.save(training(), checkpoint_id=tmp_path / "run", no_dist=True)
    return tmp_path / "run"


@pytest.fixture
def file(tmp_path):
    """The same in one file."""
    torch.save(training(), tmp_path / "run.pth")
    return tmp_path / "run.pth"


def by_torch(folder, tmp_path):
    """What torch's own converter makes of a folder."""
    dcp_to_torch_save(folder, tmp_path / "back.pth")
    return torch.load(tmp_path / "back.pth", weights_only=False)


def leaves(node, path=()):
    if isinstance(node, (dict, list)):
        for key, one in node.items() if isinstance(node, dict) else enumerate(node):
            yield from leaves(one, (*path, key))
    else:
        yield path, node


def assert_equal(one, other):
    one, other = dict(leaves(one)), dict(leaves(other))
    assert one.keys() == other.keys()
    for path, value in one.items():
        if isinstance(value, tuple):
            assert_equal(list(value), list(other[path]))
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value, other[path]), path
            assert value.dtype == other[path].dtype
        else:
            assert (type(value), value) == (type(other[path]), other[path]), path


def stripped():
    """What the run holds without `module.`."""
    state = training()
    cut = {name.removeprefix("module."): one for name, one in state["model"].items()}
    optim = state["optim"]["state"]
    group = state["optim"]["param_groups"][0]
    group["params"] = [name.removeprefix("module.") for name in group["params"]]
    state["optim"]["state"] = {name.removeprefix("module."): one for name, one in optim.items()}
    return {**state, "model": cut}


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_torch_reads_what_is_written(file, tmp_path):
    receipt = ckptool.convert(file, tmp_path / "out", format="dcp")
    assert receipt.path == str(tmp_path / "out" / ".metadata")
    assert_equal(by_torch(tmp_path / "out", tmp_path), training())
    wanted = training()["model"]
    found = {"model": {name: torch.zeros_like(one) for name, one in wanted.items()}}
    dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    assert_equal(found["model"], wanted)


def test_it_is_what_torch_would_have_written(file, run, tmp_path):
    ckptool.convert(file, tmp_path / "out", format="dcp")
    ours, theirs = (
        pickle.loads((one / ".metadata").read_bytes()) for one in (tmp_path / "out", run)
    )
    assert ours.planner_data == theirs.planner_data
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    for name, one in theirs.state_dict_metadata.items():
        if hasattr(one, "chunks"):
            mine = ours.state_dict_metadata[name]
            assert (mine.size, mine.chunks) == (one.size, one.chunks)
            assert mine.properties.dtype == one.properties.dtype


def test_files_hold_as_much_as_they_may(file, tmp_path):
    ckptool.convert(file, tmp_path / "out", format="dcp", max_shard_size="8KB")
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.distcp")]
    assert len(sizes) > 3
    assert max(sizes) <= 8000
    assert_equal(by_torch(tmp_path / "out", tmp_path), training())


def test_tied_tensors_lie_there_once(tmp_path):
    weight = torch.randn(50, 50)
    torch.save({"a": weight, "b": weight, "half": weight[:25]}, tmp_path / "tied.pth")
    ckptool.convert(tmp_path / "tied.pth", tmp_path / "out", format="dcp")
    size = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.distcp"))
    assert size < 20_000
    back = by_torch(tmp_path / "out", tmp_path)
    assert torch.equal(back["b"], weight)
    assert torch.equal(back["half"], weight[:25])


def test_what_the_folder_cannot_hold_is_told(tmp_path):
    state = nn.Linear(2, 2).state_dict()
    state[3], state["none"] = nn.Parameter(torch.ones(1)), {}
    torch.save(state, tmp_path / "a.pth")
    receipt = ckptool.convert(tmp_path / "a.pth", tmp_path / "out", format="dcp")
    assert receipt.left_out == (
        "the Parameter type of 1 tensor",
        "requires_grad of 1 tensor",
        "empty dicts",
        "integer keys (written as text)",
        "attributes of dicts, such as _metadata",
    )


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ([torch.ones(1)], "cannot be written as a DCP folder: the root must be a dict"),
        (
            {"a": {"b": torch.ones(1)}, "a.b": 3},
            r"cannot be written as a DCP folder: two entries would become 'a\.b'",
        ),
        ({"a": torch.ones(2, device="meta")}, "a is a meta tensor, which DCP cannot store"),
        ({"a": torch.eye(2).to_sparse()}, "a is a sparse_coo tensor, which DCP cannot store"),
    ],
)
def test_what_it_cannot_hold_is_refused(state, why, tmp_path):
    torch.save(state, tmp_path / "a.pth")
    with pytest.raises(NotRepresentable, match=why):
        ckptool.convert(tmp_path / "a.pth", tmp_path / "out", format="dcp")
    assert not (tmp_path / "out").exists()


def test_what_is_computed_is_read_back(file, tmp_path, monkeypatch):
    receipt = ckptool.convert(file, tmp_path / "out", ckptool.Cast("float16"), format="dcp")
    assert receipt.verified
    back = by_torch(tmp_path / "out", tmp_path)["model"]
    assert back["module.0.weight"].dtype == torch.float16
    monkeypatch.setattr("ckptool.files.atomic.write_at", damaged(atomic.write_at))
    with pytest.raises(WriteError, match="verification failed"):
        ckptool.convert(file, tmp_path / "other", ckptool.Cast("float16"), format="dcp")
    assert not (tmp_path / "other").exists()


def damaged(write):
    """Change a byte of a tensor on its way to the disk."""

    def changed(fd, data, offset):
        data = bytearray(data)
        if b"archive/data/0FB" in data:
            padding = re.compile(rb"archive/data/0FB..Z*", re.DOTALL).search(data)
            data[padding.end()] ^= 1
        write(fd, bytes(data), offset)

    return changed


def test_another_folder_is_not_replaced_unasked(file, run):
    with pytest.raises(TargetExists):
        ckptool.convert(file, run, format="dcp")
    ckptool.convert(file, run, format="dcp", overwrite=True)
    assert ckptool.diff(file, run).identical


def test_a_folder_of_it_can_be_written_anew(run, tmp_path):
    ckptool.convert(run, tmp_path / "out", format="dcp")
    assert ckptool.diff(run, tmp_path / "out").identical


def test_names_change_in_the_index_alone(run, tmp_path):
    shards = bytes_of(run)
    with ckptool.open(run) as checkpoint:
        receipt = checkpoint.strip_module().save(run, in_place=True)
    assert_equal(by_torch(run, tmp_path), stripped())
    now = bytes_of(run)
    assert now["__0_0.distcp"] == shards["__0_0.distcp"]
    assert now.keys() - shards.keys() == {"__ckptool0_0.distcp"}  # the names in param_groups
    assert receipt.edited
    assert "unused bytes stay in the folder" in receipt.notes[0]
    index, old = (pickle.loads(one[".metadata"]) for one in (now, shards))
    assert index.storage_meta == old.storage_meta
    assert ckptool.verify(run).ok


def test_there_and_back_is_the_same(run, tmp_path):
    for change in ("strip_module", "add_module"):
        with ckptool.open(run) as checkpoint:
            getattr(checkpoint, change)().save(run, in_place=True)
    assert_equal(by_torch(run, tmp_path), training())


def test_a_rule_renames_in_place(run, tmp_path):
    with ckptool.open(run) as checkpoint:
        checkpoint.rename(["^module=>net"]).save(run, in_place=True)
    assert "net.0.weight" in by_torch(run, tmp_path)["model"]
    wanted = torch.zeros(2, 3)
    dcp.load({"model": {"net.0.weight": wanted}}, checkpoint_id=run, no_dist=True)
    assert torch.equal(wanted, training()["model"]["module.0.weight"])


def test_dropped_keys_stay_on_the_disk_and_are_told(run, tmp_path):
    with ckptool.open(run) as checkpoint:
        part = checkpoint.then(ckptool.Take(exclude=["optim/*"]))
        with pytest.raises(NotRepresentable, match="would lose data"):
            part.save(run, in_place=True)
        receipt = part.save(run, in_place=True, overwrite=True)
    assert "optim" not in by_torch(run, tmp_path)
    assert int(receipt.notes[0].split()[0].replace(",", "")) > 10_000


def test_an_older_dialect_keeps_its_items(fixtures, tmp_path):
    folder = shutil.copytree(fixtures / "dcp" / "training-2.2.2", tmp_path / "run")
    before = pickle.loads((folder / ".metadata").read_bytes())
    with ckptool.open(folder) as checkpoint:
        checkpoint.add_module().save(folder, in_place=True)
    after = pickle.loads((folder / ".metadata").read_bytes())
    assert "optim.param_groups" in before.planner_data.keys() & after.planner_data.keys()
    names = by_torch(folder, tmp_path)["optim"]["param_groups"][0]["params"]
    assert all(name.startswith("module.") for name in names)


@pytest.mark.parametrize("name", ["dcp/alone-2.13.0", "dcp/hugging-2.13.0", "processes/accelerate"])
def test_what_has_no_single_index_is_refused_in_place(name, fixtures, tmp_path):
    folder = shutil.copytree(fixtures / name, tmp_path / "run")
    before = bytes_of(folder)
    with (
        ckptool.open(folder) as checkpoint,
        pytest.raises(
            TargetExists, match="is a folder without an index and cannot be edited in place"
        ),
    ):
        checkpoint.add_module().save(folder, in_place=True)
    assert bytes_of(folder) == before


def test_a_file_beside_the_index_stays(run, tmp_path):
    torch.save({"epoch": 4, "hyper_parameters": {"lr": 0.1}}, run / "meta.pt")
    with ckptool.open(run) as checkpoint:
        checkpoint.strip_module().save(run, in_place=True)
    assert ckptool.load(run)["epoch"] == 4
    assert "epoch" not in by_torch(run, tmp_path)
    with ckptool.open(run) as checkpoint:
        part = checkpoint.then(ckptool.Take(exclude=["optim/*"]))
        del part.root["epoch"]
        with pytest.raises(
            NotRepresentable, match="epoch is in a file of its own, which is not rewritten"
        ):
            part.save(run, in_place=True, overwrite=True)


def test_the_optimizer_of_a_run_follows_where_its_groups_do(tmp_path):
    state = training()
    optim, folder = state["optim"], tmp_path / "run"
    dcp.save(
        {"state_dict": state["model"], "optimizer": optim["state"]},
        checkpoint_id=folder,
        no_dist=True,
    )
    torch.save({"param_groups": optim["param_groups"]}, folder / "run.pth")
    before = bytes_of(folder)
    with ckptool.open(folder) as checkpoint:
        made = checkpoint.strip_module()
        made.save(tmp_path / "new.pth")
        with pytest.raises(
            NotRepresentable, match=r"run\.pth, which is not rewritten, also contains"
        ):
            made.save(folder, in_place=True)
    assert bytes_of(folder) == before
    new = torch.load(tmp_path / "new.pth", weights_only=False)
    expected = stripped()["optim"]["state"]
    assert_equal(new["optimizer"], expected)
    (folder / "run.pth").unlink()
    with ckptool.open(folder) as checkpoint:
        checkpoint.strip_module().save(folder, in_place=True)
    assert_equal(by_torch(folder, tmp_path)["optimizer"], expected)


def test_numbers_of_parameters_are_no_names(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    folder, file = tmp_path / "run", tmp_path / "run.pth"
    dcp.save(state, checkpoint_id=folder, no_dist=True)  # which makes text of the numbers
    torch.save(state, file)
    assert ckptool.diff(file, folder).identical
    ckptool.convert(folder, tmp_path / "new.pth")
    assert_equal(torch.load(tmp_path / "new.pth")["optim"], state["optim"])
    with ckptool.open(folder) as checkpoint:
        checkpoint.add_module().save(folder, in_place=True)
    new = by_torch(folder, tmp_path)
    assert list(new["model"]) == ["module.weight", "module.bias"]
    assert list(new["optim"]["state"]) == ["0", "1"]
    assert new["optim"]["param_groups"][0]["params"] == [0, 1]


def test_the_flat_state_of_an_optimizer_follows(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, flat = get_state_dict(model, optimizer, options=options)
    names = {f"state.{name}.exp_avg" for name, _ in model.named_parameters()}
    assert names < flat.keys()
    state = {"model": weights, "optim": {**flat, "state.0.weight": 1, "other": 2}}
    folder = tmp_path / "run"
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    with ckptool.open(folder) as checkpoint:
        checkpoint.rename(["^0=>first.0"]).save(folder, in_place=True)
    new = by_torch(folder, tmp_path)
    expected = {name.replace("s.0.", "s.first.0.", 1): one for name, one in flat.items()}
    expected = {
        name.replace("state.0.", "state.first.0.", 1): one for name, one in expected.items()
    }
    assert_equal(new["optim"], {**expected, "state.0.weight": 1, "other": 2})
    assert "first.0.weight" in new["model"]


def test_more_than_names_is_refused_in_place(run):
    before = bytes_of(run)
    with ckptool.open(run) as checkpoint:
        with pytest.raises(NotRepresentable, match="differs from the tensor in the folder"):
            checkpoint.then(ckptool.Cast("float16")).save(run, in_place=True)
        with pytest.raises(
            NotRepresentable,
            match="a folder cannot be written over itself; --in-place can only change",
        ):
            checkpoint.then(ckptool.Compact()).save(run, in_place=True, rewrite=True)
    assert bytes_of(run) == before


def test_a_full_disk_leaves_the_folder(run, monkeypatch):
    before = bytes_of(run)

    def refuse(folder, size):
        raise NoSpace("the disk is full", file=folder)

    monkeypatch.setattr("ckptool.files.atomic.check_space", refuse)
    with ckptool.open(run) as checkpoint, pytest.raises(NoSpace):
        checkpoint.strip_module().save(run, in_place=True)
    assert bytes_of(run) == before


KILLED = """
import os, signal, sys
import ckptool
calls = iter(range(int(sys.argv[3]), -1, -1))
def killing(function):
    def counted(*args, **kwargs):
        if next(calls) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return counted
for name in ("fsync", "replace", "rename", "unlink", "pwrite"):
    setattr(os, name, killing(getattr(os, name)))
with ckptool.open(sys.argv[1]) as checkpoint:
    if sys.argv[2] == "edit":
        checkpoint.strip_module().save(sys.argv[1], in_place=True)
    else:
        checkpoint.strip_module().save(sys.argv[2], format="dcp")
"""


@pytest.mark.parametrize("calls", range(12))
def test_a_kill_leaves_the_old_or_the_new_folder(calls, run, tmp_path):
    script = [sys.executable, "-c", KILLED]
    ended = subprocess.run([*script, run, "edit", str(calls)], timeout=120, check=False)
    assert ended.returncode in (0, -signal.SIGKILL)
    found = ckptool.load(run)  # which finishes what was begun
    assert_equal(found, stripped() if "0.weight" in found["model"] else training())
    assert_equal(by_torch(run, tmp_path), found)
    out = tmp_path / "out"
    subprocess.run([*script, run, out, str(calls)], timeout=120, check=False)
    if (out / ".metadata").exists():
        assert_equal(by_torch(out, tmp_path), stripped())
    else:
        with open_checkpoint(run) as checkpoint:
            checkpoint.strip_module().save(out, format="dcp", overwrite=True)
        assert_equal(by_torch(out, tmp_path), stripped())


KEYS = st.text("ab.", min_size=1, max_size=3)
LEAVES = st.one_of(
    st.integers(-3, 3), st.floats(allow_nan=False), st.none(), st.booleans(), st.text(max_size=3),
    st.tuples(st.integers(), st.text(max_size=2)),
    st.builds(lambda n: torch.full((n,), float(n)), st.integers(0, 3)),
)  # fmt: skip
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(KEYS, TREES, min_size=1, max_size=4))
def test_any_tree_is_divided_as_torch_divides_it(tmp_path_factory, tree):
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    folder = tmp_path_factory.mktemp("tree")
    torch.save(tree, folder / "a.pth")
    try:
        flat, paths = flatten_state_dict(tree)
    except ValueError:  # two entries of one name
        with pytest.raises(NotRepresentable, match="two entries would become"):
            ckptool.convert(folder / "a.pth", folder / "out", format="dcp")
        return
    if not any(isinstance(one, torch.Tensor) for one in flat.values()):
        return
    ckptool.convert(folder / "a.pth", folder / "out", format="dcp")
    index = pickle.loads((folder / "out" / ".metadata").read_bytes())
    assert index.planner_data == paths
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_equal(by_torch(folder / "out", folder), tree)
