"""Folders of DeepSpeed: joined as DeepSpeed gathers its parameters, refused where files lack."""

import enum
import json
import os
import shutil
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

import ckptool
from ckptool.errors import CheckpointError, CorruptFile, FileMissing, UnsupportedFormat
from ckptool.inspection.discovery import find_checkpoints
from ckptool.inspection.listing import list_tensors
from ckptool.limits import DEFAULT_LIMITS
from tests.conftest import FIXTURES
from tests.formats.contract import FormatContract
from tests.formats.zips import resaved


class TestContract(FormatContract):
    name = "deepspeed"
    sample = "zero/z2-bf16"


ZERO = FIXTURES / "zero"
STEPS = sorted(one.name for one in ZERO.iterdir() if (one / "latest").exists())
SCRIPT = json.loads((ZERO / "masters.json").read_text())
"""What DeepSpeed's `zero_to_fp32` makes of each folder: shape and hash of each tensor."""


@pytest.fixture(autouse=True)
def _deepspeed(monkeypatch):
    """Have the classes that DeepSpeed pickles, so that a test can change its files."""

    @dataclass
    class Address:
        numel: int
        start: int

    Stage = enum.Enum("ZeroStageEnum", {"optimizer_states": 1, "gradients": 2, "weights": 3})
    classes = {
        "deepspeed.runtime.zero.config.ZeroStageEnum": Stage,
        "deepspeed.utils.tensor_fragment.fragment_address": Address,
        "deepspeed.runtime.fp16.loss_scaler.LossScaler": type("LossScaler", (), {}),
    }
    for path, made in classes.items():
        home, _, name = path.rpartition(".")
        made.__module__, made.__qualname__, made.__name__ = home, name, name
        parts = home.split(".")
        for end in range(1, len(parts) + 1):
            module = ".".join(parts[:end])
            if module not in sys.modules:
                monkeypatch.setitem(sys.modules, module, ModuleType(module))
        setattr(sys.modules[home], name, made)


@pytest.fixture
def run(tmp_path):
    """Return a copy of a run's folder."""
    return lambda name: Path(shutil.copytree(ZERO / name, tmp_path / name))


def file(folder, end):
    (found,) = folder.rglob(f"*{end}")
    return found


def changed(folder, end, change):
    """Change what a file has, or the dict of its optimizer."""
    resaved(file(folder, end), lambda state: change(state.get("optimizer_state_dict", state)))


def hashes(source):
    return {
        row["name"]: (row["shape"], row["sha256"])
        for row in list_tensors(source, hash=True).to_dict()["tensors"]
    }


@pytest.mark.parametrize("name", STEPS)
def test_the_step_and_the_run_are_one_checkpoint(name):
    with ckptool.open(ZERO / name) as whole, ckptool.open(ZERO / name / "global_step3") as step:
        assert (whole.format, whole.path) == ("deepspeed", str(ZERO / name))
        assert hashes(whole) == hashes(step)
        assert whole["optimizer"]["param_groups"][1]["params"][0] == "up.bias"
        assert whole["epoch"] == 5


@pytest.mark.parametrize("name", [name for name in STEPS if isinstance(SCRIPT[name], dict)])
def test_masters_are_those_of_the_script_of_deepspeed(name):
    found = hashes(ZERO / name)
    masters = {
        key: found.get(f"optimizer/state/{key}/fp32") or found[f"module/{key}"]
        for key in SCRIPT[name]
        if f"optimizer/state/{key}/exp_avg" in found
    }
    assert len(masters) == 7
    assert masters == {key: (tuple(SCRIPT[name][key][0]), SCRIPT[name][key][1]) for key in masters}


def set_type(folder, dtype, *names):
    """Give the placeholders of weights another type in the file of rank 0; None: leave them out."""

    def change(own):
        for name in names or [k for k, one in own["module"].items() if one.shape == (0,)]:
            del own["module"][name]
            if dtype is not None:
                own["module"][name] = torch.empty(0, dtype=dtype)

    changed(folder, "zero_pp_rank_0_mp_rank_00_model_states.pt", change)


@pytest.mark.filterwarnings("ignore:.*rounded .* to bfloat16")
def test_weights_of_stage_3_are_rounded_as_in_training_and_that_is_reported(tmp_path):
    masters = ckptool.load(ZERO / "z3-bf16")["optimizer"]["state"]
    receipt = ckptool.convert(
        ZERO / "z3-bf16", tmp_path / "m.safetensors", ckptool.Take(model_only=True)
    )
    made = ckptool.load(tmp_path / "m.safetensors")
    for name, state in masters.items():
        assert torch.equal(made[name], state["fp32"].bfloat16())
    (change,) = (one for one in receipt.changes if one.kind == "cast")
    assert change.count == 7
    assert "to bfloat16 from the fp32 master weights" in change.text
    assert "--master" in change.text
    lost = {name: int((made[name].float() != masters[name]["fp32"]).sum()) for name in masters}
    told = {c.text.partition(":")[0]: c.count for c in receipt.outcomes if c.kind == "precision"}
    assert told == {f"module/{name}": count for name, count in lost.items() if count}


@pytest.mark.filterwarnings("ignore:.*rounded .* to bfloat16")
def test_every_answer_has_the_type_of_the_training(tmp_path):
    folder, part = ZERO / "z3-bf16", tmp_path / "part.pth"
    listed = {row["name"]: row["dtype"] for row in list_tensors(folder).to_dict()["tensors"]}
    state = ckptool.load_state_dict(folder)
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    assert all(listed[f"module/{name}"] in str(one.dtype) for name, one in state.items())
    with ckptool.open(folder) as checkpoint:
        checkpoint.then(ckptool.Take(model_only=True)).save(part)
        masters = checkpoint["optimizer"]["state"]["up.bias"]["fp32"].torch()
    assert ckptool.diff(folder, part, key="module").equal
    with ckptool.open(folder, master=True) as exact:
        for source, want in ((folder, state["up.bias"].float()), (exact, masters)):
            model = torch.nn.ModuleDict({"up": torch.nn.Linear(5, 9)})
            ckptool.load_into(model, source, allow_unexpected=True)
            assert torch.equal(model["up"].bias, want)
    assert not torch.equal(state["up.bias"].float(), masters)


def test_masters_of_the_type_of_the_training_are_the_weights():
    with ckptool.open(ZERO / "z3-fp32") as checkpoint:
        assert not checkpoint.changes
        assert "fp32" not in checkpoint["optimizer"]["state"]["up.bias"]


def test_weights_whose_type_no_file_says_stay_masters(run):
    folder = run("z3-bf16")
    set_type(folder, None, "up.bias")
    with ckptool.open(folder) as checkpoint:
        assert checkpoint["module/up.bias"].dtype == "float32"
        assert checkpoint["module/up.weight"].dtype == "bfloat16"
        assert "kept 1 weight" in checkpoint.details.notes[-1]


def test_a_weight_that_was_infinite_in_training_is_written_and_reported(run, tmp_path):
    folder = run("z3-bf16")
    set_type(folder, torch.float16)

    def grow(own):
        own["fp32_flat_groups"][-1].detach()[0] = 1e6

    changed(folder, "rank_0_mp_rank_00_optim_states.pt", grow)
    receipt = ckptool.convert(folder, tmp_path / "m.pth", ckptool.Take(model_only=True))
    (lost,) = (one for one in receipt.outcomes if one.kind == "overflow")
    assert lost.count == 1
    assert sum(int(one.isinf().sum()) for one in torch.load(tmp_path / "m.pth").values()) == 1


def test_the_tag_may_be_any_name(run):
    folder = run("z2-bf16")
    before = hashes(folder)
    (folder / "global_step3").rename(folder / "checkpoint")  # as Lightning calls it
    (folder / "latest").write_text("checkpoint\n")
    assert hashes(folder) == before


def test_one_file_stays_that_file():
    path = ZERO / "z2-bf16" / "global_step3" / "mp_rank_00_model_states.pt"
    with ckptool.open(path) as checkpoint:
        assert checkpoint.format == "torch-zip"


@pytest.mark.parametrize("name", ["z1-fp32", "z1-bf16", "z2-bf16", "bf16"])
def test_without_stated_places_the_parameters_lie_in_a_row(run, name):
    folder = run(name)
    before = hashes(folder)
    for path in folder.rglob("*optim_states.pt"):
        changed(folder, path.name, lambda own: own.pop("param_slice_mappings"))
    assert hashes(folder) == before


def test_paddings_between_parameters_are_left_out(run):
    folder = run("z2-fp32")
    before = hashes(folder)
    for rank in range(2):
        path = file(folder, f"rank_{rank}_mp_rank_00_optim_states.pt")
        state = torch.load(path, weights_only=False)
        own = state["optimizer_state_dict"]
        del own["param_slice_mappings"]
        own["param_alignment_paddings"] = [[3, 0, 0, 0], [0, 0, 0]]
        moments = own["base_optimizer_state"]["state"][0]
        if rank == 0:
            masters = own["single_partition_of_fp32_groups"]
            masters[0] = padded(masters[0])
            moments.update(exp_avg=padded(moments["exp_avg"]))
            moments.update(exp_avg_sq=padded(moments["exp_avg_sq"]))
        torch.save(state, path)
    assert hashes(folder) == before


def padded(vector):
    return torch.cat([vector[:1], torch.full((3,), 7.0), vector[1:]])


def test_states_alone_are_read_as_elastic_checkpoints_have_them(run):
    folder = run("z1-fp32")
    before = hashes(folder)
    for path in folder.rglob("*optim_states.pt"):
        changed(folder, path.name, elastic)
    with ckptool.open(folder) as found:
        assert hashes(found) == before
        assert [list(one) for one in found["optimizer"]["param_groups"]] == [["params"]] * 2


def elastic(own):
    own["base_optimizer_state"] = list(own["base_optimizer_state"]["state"].values())


def test_a_list_reads_no_tensor(run):
    folder = run("z3-fp32")
    with ckptool.open(folder) as checkpoint:
        raw = checkpoint["module/up.weight"].read()[:40]
    before = ckptool.list_tensors(folder).to_dict()
    path = file(folder, "rank_0_mp_rank_00_optim_states.pt")
    data = path.read_bytes()
    assert raw in data
    path.write_bytes(data.replace(raw, bytes(40)))
    assert ckptool.list_tensors(folder).to_dict() == before
    (problem,) = ckptool.verify(folder).problems
    assert (problem.kind, problem.place.partition(": ")[0]) == ("checksum", path.name)


def test_a_damaged_file_of_a_universal_folder_is_found(run):
    folder = run("universal-z2-bf16")
    path = folder / "zero" / "up.bias" / "exp_avg.pt"
    with ckptool.open(folder) as checkpoint:
        raw = checkpoint["optimizer"]["state"]["up.bias"]["exp_avg"].read()
    path.write_bytes(path.read_bytes().replace(raw, bytes(len(raw))))
    (problem,) = ckptool.verify(folder).problems
    assert problem.place.startswith("zero/up.bias/exp_avg.pt: ")


@pytest.mark.parametrize("name", ["z2-fp32", "z3-fp32", "bf16", "universal-z2-bf16"])
def test_what_is_whole_is_verified(name):
    assert ckptool.verify(ZERO / name).ok


@pytest.mark.parametrize(
    ("name", "rank", "kind"),
    [
        ("z1-bf16", 0, "optim"), ("z1-bf16", 1, "optim"), ("z1-bf16", 2, "optim"),
        ("z3-bf16", 1, "optim"), ("z3-bf16", 2, "optim"), ("z3-bf16", 0, "model"),
        ("z3-bf16", 2, "model"), ("universal-z3-fp32", 0, "model"),
    ],
)  # fmt: skip
def test_a_rank_that_is_missing_is_named(run, name, rank, kind):
    folder = run(name)
    path = file(folder, f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt")
    path.unlink()
    with pytest.raises(
        FileMissing, match=f"file of rank {rank} of . is missing: {path.name}"
    ) as caught:
        ckptool.open(folder)
    assert ("mp_rank_00_model_states.pt OUT --model-only" in caught.value.hint) is ("z1" in name)


def test_weights_without_the_optimizer_are_read(run):
    folder = run("z1-bf16")
    before = hashes(folder)
    for path in folder.rglob("*optim_states.pt"):
        path.unlink()
    assert hashes(folder) == {k: v for k, v in before.items() if k.startswith("module")}


def test_a_run_without_zero_is_read(run):
    folder = run("z2-fp32")
    state = torch.load(file(folder, "mp_rank_00_model_states.pt"), weights_only=False)
    for path in folder.rglob("*.pt"):
        path.unlink()
    state.update(param_shapes=None, optimizer={"state": {0: {"step": 3}}})
    torch.save(state, folder / "global_step3" / "mp_rank_00_model_states.pt")
    loaded = ckptool.load(folder)
    assert loaded["optimizer"] == state["optimizer"]
    assert loaded["module"].keys() == state["module"].keys()


def test_a_rank_too_many_is_named(run):
    folder = run("z1-fp32")
    path = file(folder, "rank_1_mp_rank_00_optim_states.pt")
    shutil.copy(path, str(path).replace("rank_1", "rank_2"))
    with pytest.raises(CorruptFile, match="has the files of 3 ranks, but 2 ranks saved it"):
        ckptool.open(folder)


def base_of(own):
    """Return the state of the optimizer that ZeRO wraps."""
    return own.get("base_optimizer_state") or own["optimizer_state_dict"]


def cut_vector(own):
    for key in ("single_partition_of_fp32_groups", "fp32_flat_groups"):
        if key in own:
            own[key][0] = own[key][0][:-5].clone()


DIFFERS = "has other optimizer options, or another step, than .*rank_0"
FAULTS = {
    "another step": (lambda own: base_of(own)["state"][1].update(step=torch.tensor(4.0)), DIFFERS),
    "other options": (lambda own: base_of(own)["param_groups"][0].update(lr=7.0), DIFFERS),
    "a short vector": (cut_vector, "'(up|norm).weight' needs elements"),
    "no moment": (
        lambda own: base_of(own)["state"][0].pop("exp_avg"), "does not have one dimension"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["z2-fp32", "z3-fp32"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_does_not_fit_is_named_with_the_tensor(run, name, fault):
    change, message = FAULTS[fault]
    folder = run(name)
    end = "rank_1_mp_rank_00_optim_states.pt"
    changed(folder, end, change)
    with pytest.raises(CorruptFile, match=message) as caught:
        ckptool.open(folder)
    assert caught.value.file == str(file(folder, end))
    assert not ckptool.verify(folder).ok


def test_a_file_that_states_no_checksums_is_as_good(run):
    folder = run("z2-fp32")
    path = file(folder, "rank_1_mp_rank_00_optim_states.pt")
    saved = torch.load(path, weights_only=False)
    torch.save(saved, path, _use_new_zipfile_serialization=False)
    ckptool.open(folder).close()


def test_a_part_that_no_rank_has_and_vectors_of_other_groups_are_told(run):
    for name, change, error, text in (
        ("z2-fp32", lambda own: own["param_slice_mappings"][0].pop("up.weight"),
         CorruptFile, r"'up.weight' of shape \[9, 5\] has 8 elements"),
        ("z3-fp32", lambda own: own["fp32_flat_groups"].pop(),
         UnsupportedFormat, "has 3 parameter groups, but its ranks have 3, 2 vectors"),
    ):  # fmt: skip
        folder = run(name)
        changed(folder, "rank_1_mp_rank_00_optim_states.pt", change)
        with pytest.raises(error, match=text):
            ckptool.open(folder)


def test_ranks_without_masters_are_refused(run):
    folder = run("z2-fp32")
    for path in folder.rglob("*optim_states.pt"):
        changed(folder, path.name, lambda own: own.pop("single_partition_of_fp32_groups"))
    with pytest.raises(UnsupportedFormat, match="has no fp32 master weights of ZeRO"):
        ckptool.open(folder)


@pytest.mark.parametrize(
    "name",
    [
        "layer_00-model_00-model_states.pt",
        "layer_3_expert_1_mp_rank_00_model_states.pt",
        "expp_rank_0_mp_rank_00_optim_states.pt",
        "mp_rank_01_model_states.pt",
        "zero_pp_rank_0_mp_rank_01_optim_states.pt",
    ],
)
def test_parts_that_are_not_joined_are_refused_by_name(run, name):
    folder = run("z2-fp32") / "global_step3"
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / name)
    with pytest.raises(
        UnsupportedFormat,
        match="has files with pipeline, expert or tensor parallelism, whose parts",
    ) as caught:
        ckptool.open(folder)
    assert name in str(caught.value)
    assert caught.value.hint.endswith(f"ckptool list {folder / name}")


def test_a_state_and_a_parameter_that_a_universal_folder_lacks_are_named(run):
    folder = run("universal-z2-bf16")
    (folder / "zero" / "up.bias" / "exp_avg.pt").unlink()
    with pytest.raises(
        FileMissing, match=r"only one of 'down\.bias' and 'up\.bias' has exp_avg\.pt"
    ):
        ckptool.open(folder)
    shutil.rmtree(folder / "zero" / "up.bias")
    with pytest.raises(FileMissing, match=r"the folder of 'up\.bias' is missing"):
        ckptool.open(folder)


def test_an_empty_buffer_is_no_weight_without_slices(run):
    folder = run("z3-fp32")

    def change(own):
        own["module"]["nothing"] = torch.empty(0)
        own["buffer_names"].append("nothing")

    changed(folder, "zero_pp_rank_0_mp_rank_00_model_states.pt", change)
    assert ckptool.load(folder)["module"]["nothing"].shape == (0,)


@pytest.mark.parametrize("tag", ["../z2-fp32/global_step3", "..", "", "global_step3/", "a\0b"])
def test_a_tag_that_is_no_folder_of_the_run_is_not_followed(run, tag):
    folder = run("z1-fp32")
    run("z2-fp32")
    (folder / "latest").write_text(tag)
    with pytest.raises(UnsupportedFormat, match="a DeepSpeed checkpoint") as caught:
        ckptool.open(folder)
    assert caught.value.hint.endswith(f"ckptool list {folder / 'global_step3'}")


def test_a_file_in_the_place_of_a_folder_is_refused(run):
    folder = run("universal-z2-bf16")
    shutil.rmtree(folder / "zero")
    (folder / "zero").write_bytes(b"")
    with pytest.raises(FileMissing, match=r"optimizer_state\.pt"):
        ckptool.open(folder)


def test_a_search_finds_the_step_once(run):
    folder = run("universal-z3-fp32").parent
    run("z2-fp32")
    found = {
        os.path.relpath(path, folder) for path in find_checkpoints(str(folder), DEFAULT_LIMITS)
    }
    assert found == {"universal-z3-fp32", "z2-fp32/global_step3"}


def test_eight_bit_states_are_left_out(run):
    folder = run("z2-fp32")
    before = hashes(folder)

    def quantize(own):
        for state in own["base_optimizer_state"]["state"].values():
            del state["exp_avg"], state["exp_avg_sq"]
            state.update(state1=torch.ones(99, dtype=torch.uint8), absmax1=torch.ones(1))

    for path in folder.rglob("*optim_states.pt"):
        changed(folder, path.name, quantize)
    assert hashes(folder) == {key: one for key, one in before.items() if "/exp_avg" not in key}


@pytest.mark.parametrize(
    "key", ["base_optimizer_state", "single_partition_of_fp32_groups", "partition_count"]
)
@pytest.mark.parametrize("value", [7, [7], ["a", None], {"param_groups": [{"params": 3}]}])
def test_no_form_of_an_optimizer_crashes(run, key, value):
    folder = run("z1-fp32")
    for path in folder.rglob("*optim_states.pt"):
        changed(folder, path.name, lambda own: own.update({key: value}))
    with suppress(CheckpointError):
        ckptool.open(folder).close()


def test_loading_warns_that_weights_are_rounded(fixtures):
    folder = fixtures / "zero" / "z3-bf16"
    with pytest.warns(
        ckptool.errors.CheckpointWarning, match=r"rounded .* to bfloat16 from the fp32"
    ):
        rounded = ckptool.load_state_dict(folder)
    with warnings.catch_warnings(), ckptool.open(folder, master=True) as checkpoint:
        warnings.simplefilter("error")
        exact = ckptool.load_state_dict(checkpoint)
    assert all(torch.equal(one, exact[name].to(one.dtype)) for name, one in rounded.items())
