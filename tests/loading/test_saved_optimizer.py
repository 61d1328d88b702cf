"""Optimizers in files: of old and new torch, FSDP and trainers; next to the model or with it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckptool
from ckptool.errors import CorruptFile, MatchError, NotFound, UnreadableFile
from tests.loading.bits import untouched_by
from tests.loading.optimizing import (
    assert_alike,
    by_name,
    loaded,
    model_of,
    refusal_of,
    report_of,
    shapely,
    stepped,
    three,
)

TRAINERS = Path(__file__).parents[2] / "fixtures" / "trainers"


@pytest.fixture
def checkpoint(tmp_path):
    """The folder of a trainer, with what it holds beside model and optimizer."""
    folder = tmp_path / "checkpoint-500"
    folder.mkdir()
    model = shapely()
    optimizer = stepped(model)
    save_file(model.state_dict(), folder / "model.safetensors")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, folder / "rng_state.pth")
    torch.save(shapely, folder / "training_args.bin")
    (folder / "trainer_state.json").write_text("{}")
    return folder, by_name(model, optimizer)


def fresh():
    model = shapely()
    return model, torch.optim.Adam(model.parameters(), lr=0.5)


def taken(source, wanted, **options):
    """The report, where each parameter has the state that is wanted."""
    model, optimizer = fresh()
    report = ckptool.load_into(model, source, optimizer=optimizer, **options)
    assert_alike(by_name(model, optimizer), wanted)
    return report


def refused(source, *words, kind=MatchError, **options):
    """What it says, and that nothing was changed."""
    model, optimizer = fresh()
    with untouched_by(kind, model, optimizer) as caught:
        ckptool.load_into(model, source, optimizer=optimizer, **options)
    for word in words:
        assert word in str(caught.value)
    return caught.value


@pytest.mark.parametrize("name", ["optimizer.pt", "optimizer.bin"])
@pytest.mark.parametrize("as_text", [False, True])
def test_the_optimizer_in_the_folder_of_a_trainer_is_loaded(checkpoint, name, as_text):
    folder, wanted = checkpoint
    (folder / "optimizer.pt").rename(folder / name)
    report = taken(str(folder) if as_text else folder, wanted)
    assert report.coverage == 1.0
    assert report.optimizer.matched == 4
    assert report.optimizer.notes == (f"loaded the optimizer from '{name}', next to the model",)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_what_a_trainer_of_transformers_saved_is_continued(name):
    """It decays what is neither bias nor norm, names nothing, and much is of one shape."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(TRAINERS / name)
    kind = {"bert": "BertForMaskedLM", "llama": "LlamaForCausalLM"}[name]
    model = getattr(transformers, kind)(config)
    parameters = dict(model.named_parameters())
    decaying = transformers.Trainer.get_decay_parameter_names(None, model)
    groups = [
        {"params": [p for n, p in parameters.items() if (n in decaying) == one]}
        for one in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups)
    with untouched_by(
        MatchError, model, optimizer, match="sorted by key, so the original order"
    ) as caught:
        ckptool.load_into(model, TRAINERS / name, optimizer=optimizer)
    assert "optimizer_order='position'" in caught.value.hint
    report = ckptool.load_into(
        model, TRAINERS / name, optimizer=optimizer, optimizer_order="position"
    )
    assert report.optimizer.matched == len(parameters)
    saved = torch.load(TRAINERS / name / "optimizer.pt")
    for number, parameter in enumerate(p for group in groups for p in group["params"]):
        assert_alike(optimizer.state[parameter], saved["state"][number])


def test_beside_shards_it_is_found_as_well(checkpoint):
    folder, wanted = checkpoint
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    names = dict.fromkeys(shapely().state_dict(), "model-00001-of-00001.safetensors")
    index = json.dumps({"metadata": {}, "weight_map": names})
    (folder / "model.safetensors.index.json").write_text(index)
    taken(folder, wanted)


def test_state_by_names_as_accelerate_gathers_it_of_fsdp(tmp_path):
    """Names decide, whatever is of one shape, and in whatever order."""
    model = three()
    optimizer = stepped(model)
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()
    state["state"] = {names[number]: held for number, held in state["state"].items()}
    state["param_groups"][0]["params"] = names
    torch.save(model.state_dict(), tmp_path / "pytorch_model_fsdp.bin")
    torch.save(state, tmp_path / "optimizer.bin")
    other = three()
    loaded = torch.optim.Adam(reversed(list(other.parameters())))
    assert ckptool.load_into(other, tmp_path, optimizer=loaded).optimizer.by == "names"
    assert_alike(by_name(other, loaded), by_name(model, optimizer))


def test_the_optimizer_in_the_models_own_file_comes_first(checkpoint):
    folder, _ = checkpoint
    model = shapely()
    optimizer = stepped(model)
    optimizer.param_groups[0]["lr"] = 0.25
    state = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    other, loaded = fresh()
    report = ckptool.load_into(other, folder, optimizer=loaded)
    assert report.optimizer.notes == ()
    assert loaded.param_groups[0]["lr"] == 0.25
    report = ckptool.load_into(other, folder, optimizer=loaded, optimizer_key="optimizer.pt")
    assert loaded.param_groups[0]["lr"] == 0.1
    assert report.optimizer.notes


def test_of_several_files_none_is_taken_but_the_one_that_is_named(checkpoint):
    folder, wanted = checkpoint
    (folder / "optimizer.pt").rename(folder / "optimizer_1.bin")
    torch.save(stepped(shapely(), torch.optim.SGD).state_dict(), folder / "optimizer.bin")
    error = refused(folder, "the folder has 2 optimizer files", "optimizer.bin", "optimizer_1")
    assert error.hint == "`optimizer_key='optimizer.bin'` or `optimizer_key='optimizer_1.bin'`"
    taken(folder, wanted, optimizer_key="optimizer_1.bin")


def test_a_key_is_an_address_in_the_file_of_the_optimizer(checkpoint):
    folder, wanted = checkpoint
    state = torch.load(folder / "optimizer.pt")
    other = stepped(shapely(), torch.optim.SGD).state_dict()
    torch.save({"mine": {"opt": state}, "other": other}, folder / "optimizer.pt")
    error = refused(folder, "'optimizer.pt', next to the model: the file has 2 optimizers")
    assert error.hint == "`optimizer_key='mine/opt'` or `optimizer_key='other'`"
    taken(folder, wanted, optimizer_key="mine/opt")
    refused(folder, "nothing", kind=NotFound, optimizer_key="nothing")


@pytest.mark.parametrize("opened", [False, True])
def test_with_the_file_of_the_model_alone_it_says_what_to_pass(checkpoint, opened):
    folder, wanted = checkpoint
    with ckptool.open(folder) as read:
        source = read if opened else folder / "model.safetensors"
        error = refused(source, "the file has no optimizer state, but its folder has optimizer.pt")
    assert error.hint == f"use load_into(model, '{folder}', optimizer=...) to load it from there"
    taken(str(folder), wanted)


def test_a_folder_or_file_without_one_says_so(checkpoint):
    folder, _ = checkpoint
    refused(folder, "no entry is named 'nope.pt'", kind=NotFound, optimizer_key="nope.pt")
    torch.save({"a": 1}, folder / "optimizer.pt")
    error = refused(
        folder, "'optimizer.pt', next to the model: ", "the file has no optimizer state"
    )
    assert "ckptool.load(FILE)" in error.hint
    (folder / "optimizer.pt").unlink()
    assert "ckptool.load(FILE)" in refused(folder, "the file has no optimizer state").hint


def test_a_damaged_file_is_named_and_nothing_is_touched(checkpoint):
    folder, _ = checkpoint
    path = folder / "optimizer.pt"
    with ckptool.open(path) as read:
        data = next(ref.storage.data for _, ref in read.tensors() if ref.shape)
    content = bytearray(path.read_bytes())
    content[data.offset] ^= 1
    path.write_bytes(content)
    assert refused(folder, kind=CorruptFile).file == str(path)
    path.write_bytes(b"not that")
    assert refused(folder, kind=UnreadableFile).file == str(path)


def test_it_may_not_change_while_it_is_read(checkpoint, monkeypatch):
    folder, _ = checkpoint
    load = torch.optim.Adam.load_state_dict

    def loads(self, state):
        load(self, state)
        shutil.copy(folder / "scheduler.pt", folder / "optimizer.pt")

    monkeypatch.setattr(torch.optim.Adam, "load_state_dict", loads)
    refused(folder, "changed while it was read", kind=UnreadableFile)


def test_it_is_closed_again(checkpoint, monkeypatch):
    folder, _ = checkpoint
    opened = []
    real = ckptool.loading.source.open_checkpoint

    def opens(path):
        opened.append(real(path))
        return opened[-1]

    monkeypatch.setattr("ckptool.loading.source.open_checkpoint", opens)
    model, optimizer = fresh()
    ckptool.load_into(model, folder, optimizer=optimizer)
    (one,) = opened
    with pytest.raises((OSError, ValueError, UnreadableFile)):
        one.sources[0].read(0, 1)


FIXTURES = Path(__file__).parents[2] / "fixtures"

FILES = [
    *(f"torch-{version}/dp_full_cuda1.pth" for version in (
        "1.0.1-python2", "1.0.1", "1.2.0", "1.5.0", "1.8.1", "1.10.2", "1.12.1", "2.0.1", "2.2.2",
        "2.6.0", "2.10.0",
    )),
    *(f"torch-{version}/single_full.tar" for version in ("1.4.0", "1.6.0", "1.13.1", "2.13.0")),
    "ddp/ddp_full.pth", "ecosystem/lightning.ckpt", "trainers/ddp.pth.tar",
    "trainers/lightning.ckpt",
]  # fmt: skip


def optimizer_for(model, state):
    """One of the kind that a state dict is of."""
    options = state["param_groups"][0]
    kind = torch.optim.SGD if "momentum" in options else torch.optim.Adam
    return kind(model.parameters(), lr=0.5)


@pytest.mark.parametrize("name", FILES)
def test_position_gives_what_torch_gives_where_the_order_is_vouched_for(name):
    file = FIXTURES / name
    with ckptool.open(file) as checkpoint:
        (where,) = (one.name for one in checkpoint.sections if one.kind == "optimizer")
    held = ckptool.load(file)
    for key in where.split("/"):
        held = held[int(key) if key.isdigit() else key]
    model = model_of(ckptool.load_state_dict(file))
    mine, theirs = optimizer_for(model, held), optimizer_for(model, held)
    theirs.load_state_dict(held)
    report = loaded(model, mine, file, order="position")
    assert report.matched == len(list(model.parameters())) == len(theirs.state)
    assert_alike(*(dict(sorted(one.state_dict()["state"].items())) for one in (mine, theirs)))
    for key in held["param_groups"][0].keys() - {"params"}:
        assert mine.param_groups[0][key] == theirs.param_groups[0][key]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    mine.step()


def test_state_by_name_as_fsdp_gathers_it():
    file = FIXTURES / "distributed/fsdp1_full.pth"
    held = ckptool.load(file)
    model = model_of(held["model"])
    optimizer = torch.optim.Adam(reversed(list(model.parameters())))
    assert loaded(model, optimizer, file).by == "names"
    for name, parameter in model.named_parameters():
        assert_alike(optimizer.state[parameter], held["optim"]["state"][name])


def test_parts_of_ranks_are_refused():
    file = FIXTURES / "distributed/fsdp2_0_of_2.pth"
    whole = model_of(ckptool.load(FIXTURES / "distributed/fsdp1_full.pth")["model"])
    problems = report_of(whole, torch.optim.Adam(whole.parameters()), file).problems
    assert problems


def test_names_that_torch_stores():
    file = FIXTURES / "training/named_optimizer.pth"
    held = ckptool.load(file)
    model = model_of(ckptool.load_state_dict(file))
    options = {"lr": 0.1, "momentum": 0.9}
    optimizer = torch.optim.SGD(reversed(list(model.parameters())), **options)
    assert (
        "the file has 2 optimizers: optim_dict, optim_by_name"
        in refusal_of(model, optimizer, file)[0]
    )
    for key in ("optim_dict", "optim_by_name"):
        assert loaded(model, optimizer, file, key=key).by == "names"
        names = held[key]["param_groups"][0]["param_names"]
        numbers = held[key]["param_groups"][0]["params"]
        wanted = dict(zip(names, numbers, strict=True))
        mine = {name.split("module.")[-1]: number for name, number in wanted.items()}
        for name, parameter in model.named_parameters():
            assert_alike(optimizer.state[parameter], held[key]["state"][mine[name]])


ALLOWED = {"allow_missing": ["head.*"], "allow_unexpected": ["old.*"]}


class Net(nn.Module):
    def __init__(self, head="old", width=3):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.add_module(head, nn.Linear(4, width))


def trained(tmp_path, net=None):
    net = net or Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.3)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    ckptool.save(tmp_path / "run.pth", model=net, optimizer=optimizer)
    return net, optimizer


def moments(net, optimizer):
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    return {names[id(one)]: state["exp_avg"] for one, state in optimizer.state.items()}


def steps(net, optimizer):
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_a_new_head_starts_without_state_and_the_old_one_is_left_out(tmp_path):
    old, used = trained(tmp_path)
    net = Net("head", width=7)
    fresh = torch.optim.AdamW(net.parameters(), lr=0.1)
    with pytest.raises(MatchError) as refused:
        ckptool.load_into(net, tmp_path / "run.pth", optimizer=fresh, **ALLOWED)
    assert "optimizer_partial=True" in refused.value.hint
    assert not fresh.state
    report = ckptool.load_into(
        net, tmp_path / "run.pth", optimizer=fresh, optimizer_partial=True, **ALLOWED
    ).optimizer
    assert (report.by, report.matched, report.parameters) == ("names", 4, 6)
    assert report.notes == (
        "2 parameters without state: head.weight, head.bias",
        "left out the state of 2 parameters: old.weight, old.bias",
    )
    there, here = moments(old, used), moments(net, fresh)
    assert here.keys() == {name for name in there if name.startswith("body")}
    assert all(torch.equal(here[name], there[name]) for name in here)
    assert fresh.param_groups[0]["lr"] == 0.3
    steps(net, fresh)
    assert len(fresh.state) == 6


def test_groups_that_are_divided_by_decay_keep_their_own_options(tmp_path):
    old, used = trained(tmp_path)
    net = Net()
    decayed = [one for one in net.parameters() if one.dim() > 1]
    others = [one for one in net.parameters() if one.dim() == 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    fresh = torch.optim.AdamW(groups, lr=0.1)
    report = ckptool.load_into(
        net, tmp_path / "run.pth", optimizer=fresh, optimizer_partial=True
    ).optimizer
    assert report.matched == 6
    assert report.notes[0].startswith("kept the learning rates and options of the groups")
    assert [(one["lr"], one["weight_decay"]) for one in fresh.param_groups] == [
        (0.1, 0.01), (0.1, 0.0),
    ]  # fmt: skip
    there, here = moments(old, used), moments(net, fresh)
    assert all(torch.equal(here[name], there[name]) for name in there)
    steps(net, fresh)


def test_frozen_layers_need_no_state(tmp_path):
    trained(tmp_path)
    net = Net()
    fresh = torch.optim.AdamW(net.old.parameters())
    report = ckptool.load_into(
        net, tmp_path / "run.pth", optimizer=fresh, optimizer_partial=True
    ).optimizer
    assert report.matched == 2
    assert report.notes[0].startswith("left out the state of 4 parameters: body.0.weight")


def test_what_has_no_names_or_shares_none_is_refused_all_the_same(tmp_path):
    net, used = trained(tmp_path)
    torch.save({"model": net.state_dict(), "optimizer": used.state_dict()}, tmp_path / "bare.pth")
    fresh = torch.optim.AdamW(net.old.parameters())
    with pytest.raises(MatchError, match="the optimizer in the file has no parameter names"):
        ckptool.load_into(net, tmp_path / "bare.pth", optimizer=fresh, optimizer_partial=True)
    other = nn.Sequential(Net("head"), nn.Linear(2, 2))
    fresh = torch.optim.AdamW(other[1].parameters())
    with pytest.raises(MatchError, match=r"over other parameters|first difference"):
        ckptool.load_into(
            other, tmp_path / "run.pth", optimizer=fresh, optimizer_partial=True, strict=False
        )
