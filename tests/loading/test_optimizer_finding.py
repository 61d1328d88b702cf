"""The state of an optimizer that a trainer puts beside the model, in a file of its own."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptool
from ckptool.errors import CorruptFile, MatchError, NotFound, UnreadableFile
from tests.loading.bits import untouched_by
from tests.loading.optimizing import assert_alike, by_name, shapely, stepped, three

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
    assert report.optimizer.notes == (f"the state is that of '{name}', beside the model",)


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
    with untouched_by(MatchError, model, optimizer, match="does not name") as caught:
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
    error = refused(folder, "there are 2 files of optimizers", "optimizer.bin", "optimizer_1")
    assert error.hint == "`optimizer_key='optimizer.bin'`; or `optimizer_key='optimizer_1.bin'`"
    taken(folder, wanted, optimizer_key="optimizer_1.bin")


def test_a_key_is_an_address_in_the_file_of_the_optimizer(checkpoint):
    folder, wanted = checkpoint
    state = torch.load(folder / "optimizer.pt")
    other = stepped(shapely(), torch.optim.SGD).state_dict()
    torch.save({"mine": {"opt": state}, "other": other}, folder / "optimizer.pt")
    error = refused(folder, "'optimizer.pt', beside the model: there are 2 optimizers")
    assert error.hint == "`optimizer_key='mine/opt'`; or `optimizer_key='other'`"
    taken(folder, wanted, optimizer_key="mine/opt")
    refused(folder, "nothing", kind=NotFound, optimizer_key="nothing")


@pytest.mark.parametrize("opened", [False, True])
def test_with_the_file_of_the_model_alone_it_says_what_to_pass(checkpoint, opened):
    folder, wanted = checkpoint
    with ckptool.open(folder) as read:
        source = read if opened else folder / "model.safetensors"
        error = refused(source, "there is none in the file, but optimizer.pt beside it")
    assert error.hint == f"load_into(model, '{folder}', optimizer=...) looks there too"
    taken(str(folder), wanted)


def test_a_folder_or_file_without_one_says_so(checkpoint):
    folder, _ = checkpoint
    refused(folder, "nothing named 'nope.pt'", kind=NotFound, optimizer_key="nope.pt")
    torch.save({"a": 1}, folder / "optimizer.pt")
    error = refused(folder, "'optimizer.pt', beside the model: ", "there is none in the file")
    assert "ckptool.load(FILE)" in error.hint
    (folder / "optimizer.pt").unlink()
    assert "ckptool.load(FILE)" in refused(folder, "wanted, and there is none in the file").hint


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
