"""Models whose parameters are dealt out over two and three processes, against one process."""

import pytest
import torch
from torch.distributed import fsdp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptool
from ckptool.errors import TrainingError
from tests.trainer.ranks import by_ranks, needs_gloo
from tests.trainer.runs import (
    BytesDone,
    assert_same_run,
    differences,
    held,
    lines,
    losses_of,
    net,
    run,
)
from tests.trainer.strategies.fsdp_scenes import AGREEING, SHARDED

pytestmark = needs_gloo
SCENES = "tests.trainer.strategies.fsdp_scenes"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def two(folder):
    return by_ranks(SCENES, folder / "two", 2)


@pytest.fixture(scope="module")
def three(folder, two):
    """Three processes, which go on from what two, and one, have written as well."""
    half = {**AGREEING["all"], "max_steps": 10}
    run(folder / "single", model=net(dropout=0.0), **half)
    return by_ranks(SCENES, folder / "three", 3)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return folder, {
        kind: losses_of(folder / kind, model=net(dropout=0.0), **options)
        for kind, options in AGREEING.items()
        if kind in SHARDED
    }


@pytest.mark.parametrize(
    ("size", "kind"), [*(("two", kind) for kind in SHARDED), ("three", SHARDED[0])]
)
def test_losses_and_weights_are_those_of_one_process(request, folder, alone, size, kind):
    told = request.getfixturevalue(size)
    assert told[0]["agreeing"] == told[-1]["agreeing"]
    assert told[0]["agreeing"][kind] == pytest.approx(alone[1][kind], rel=1e-9)
    one, other = (held(place / kind / "last.pth") for place in (folder / size, alone[0]))
    for section in ("state_dict", "ema"):
        for name, value in other.get(section, {}).items():
            torch.testing.assert_close(one[section][name], value, rtol=1e-9, atol=1e-12)
    assert one.get("scaler") == other.get("scaler")
    assert one["optimizer"]["param_groups"] == other["optimizer"]["param_groups"]


def test_a_run_that_is_cut_goes_on_as_if_it_had_not_been(folder, two):
    assert_same_run(folder / "two" / "file", folder / "two" / "file_cut")
    whole, cut = (folder / "two" / name for name in ("folder", "folder_cut"))
    assert not differences(lines(whole), lines(cut))
    assert not differences(in_one_file(whole / "last"), in_one_file(cut / "last"))


def test_torch_reads_a_folder_as_what_is_in_one_file(folder, two):
    file = held(folder / "two" / "file" / "last.pth")
    parts = in_one_file(folder / "two" / "folder" / "last")
    for name, value in file["state_dict"].items():
        assert torch.equal(parts["state_dict"][name], value)
        assert torch.equal(parts["ema"][name], file["ema"][name])
    names = [name for group in file["optimizer"]["param_groups"] for name in group["param_names"]]
    for number, state in file["optimizer"]["state"].items():
        for word, value in state.items():
            assert torch.equal(parts["optimizer"][names[number]][word], value)
    values = ckptool.load(folder / "two" / "folder" / "last" / "run.pth")
    assert len(values["rng"]) == 2
    assert values["step"] == file["step"]


def in_one_file(path):
    whole = path.with_suffix(".whole")
    dcp_to_torch_save(path, whole)
    return torch.load(whole, weights_only=True)


@pytest.mark.parametrize("origin", ["single", "folder", "folder with ddp"])
def test_other_processes_go_on(three, alone, origin):
    whole = alone[1]["all"]  # 20 steps, 7 epochs
    assert three[0]["elsewhere"][origin] == pytest.approx(whole[10:20] + whole[-4:], rel=1e-9)


def test_parts_that_were_gathered_load_into_a_plain_model_and_optimizer(folder, two):
    path, model = folder / "two" / "all" / "last.pth", net(seed=3)
    optimizer = torch.optim.AdamW(model.double().parameters())
    ckptool.load_into(model, path, optimizer=optimizer)
    file, state = held(path), optimizer.state_dict()["state"]
    assert not differences(dict(model.state_dict()), dict(file["state_dict"]))
    assert all(
        torch.equal(value, file["optimizer"]["state"][number][word])
        for number, one in state.items()
        for word, value in one.items()
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "strategy",
    [
        {"strategy": "single"},
        {"strategy": "dp"},
        {"strategy": "model-parallel", "devices": ("cpu", "cpu")},
    ],
    ids=lambda options: options["strategy"],
)
def test_one_process_goes_on_from_a_folder(tmp_path, folder, two, alone, strategy):
    told = BytesDone()
    half = {**AGREEING["all"], "resume": str(folder / "two" / "half")}
    run(tmp_path, told, model=net(dropout=0.0), **half, **strategy)
    assert told.of("Resumed")[0].without == ("rng",)
    found = [event.loss for event in told.of("Stepped")]
    assert found == pytest.approx(alone[1]["all"][10:20], rel=1e-9)


def test_only_so_many_folders_are_kept_and_nothing_is_left_beside_them(folder, two):
    names = sorted(path.name for path in (folder / "two" / "folder").iterdir())
    assert [name for name in names if not name.endswith(".whole")] == [
        "best", "last", "metrics.jsonl", "step-00000002", "step-00000004", "step-00000006",
    ]  # fmt: skip


@pytest.mark.parametrize("save", ["wrapped", "unwrapped"])
def test_what_scripts_write_is_whole_and_has_the_names_of_the_model(folder, two, save):
    tree = torch.load(folder / "two" / save / "last.pth", weights_only=True)
    model = net()
    state = tree["state_dict" if save == "wrapped" else "state_dict_model"]
    model.load_state_dict(state)
    assert all(one.untyped_storage().nbytes() == one.nbytes for one in state.values())
    if save == "wrapped":
        torch.optim.Adam(model.parameters()).load_state_dict(tree["optim_dict"])


def test_a_module_in_parts_is_not_pickled(two):
    for rank in two:
        assert rank["kinds"][1].endswith("each process has only shards of it")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_another_architecture_is_refused_with_the_report(two, kind):
    for rank in two:
        error, message, steps = rank["refused"][kind]
        assert (error, steps) == ("MatchError", 0)
        assert "does not fit FSDPSequential" in message


def test_a_folder_that_lacks_a_part_is_passed_over(two):
    for rank in two:
        found = rank["damaged"]
        assert found["error"] == ["CorruptFile", "__0_0.distcp is missing", 0]
        assert found["notes"] == [f"skipped {found['newest']}: __0_0.distcp is missing"]


def test_without_a_launcher_it_is_told_how_to_start(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(TrainingError, match="several processes"):
        run(tmp_path, strategy="fsdp")


def test_a_torch_without_it_is_told(tmp_path, monkeypatch):
    monkeypatch.delattr(fsdp, "fully_shard")
    with pytest.raises(TrainingError, match=r"needs torch 2\.6 or later, but this is") as caught:
        run(tmp_path, strategy="fsdp")
    assert caught.value.hint == "upgrade torch, or use --strategy ddp"
