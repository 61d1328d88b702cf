"""`save`: what it writes is what a bare `torch.load` and every plain `load_state_dict` take."""

import os
from collections import Counter, OrderedDict

import numpy
import pytest
import torch

import ckptool
from ckptool import save
from ckptool.core.sections import MODEL_MARK
from ckptool.errors import (
    AmbiguousName,
    FileBusy,
    NotRepresentable,
    TargetExists,
    UsageError,
    WriteError,
)
from ckptool.files.journal import open_locked
from ckptool.writing import Receipt
from tests.files.faults import crashes, needs_fork
from tests.loading.bits import net
from tests.tensors.judge import assert_same


def trained(model, kind=torch.optim.Adam, steps=2, **options):
    optimizer = kind(model.parameters(), **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 1, 4, 4)).square().sum().backward()
        optimizer.step()
    return optimizer


def loaded(path, **options):
    return torch.load(path, weights_only=True, **options)


def compiled_inside(model):
    model[3] = torch.compile(model[3])
    return model


def parallel_inside(model):
    model[0] = torch.nn.DataParallel(model[0])
    return model


WRAPPINGS = {
    "plain": lambda model: model,
    "parallel": torch.nn.DataParallel,
    "compiled": torch.compile,
    "compiled parallel": lambda model: torch.compile(torch.nn.DataParallel(model)),
    "parallel compiled": lambda model: torch.nn.DataParallel(torch.compile(model)),
    "compiled inside": compiled_inside,
    "parallel inside": parallel_inside,
    "parallel in parallel": lambda model: torch.nn.DataParallel(torch.nn.DataParallel(model)),
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_model_in_any_wrapping_is_saved_as_the_plain_one(tmp_path, wrapping):
    plain = net()
    save(tmp_path / "f.pth", model=WRAPPINGS[wrapping](net()))
    for mmap in (False, True):
        state = loaded(tmp_path / "f.pth", mmap=mmap)["state_dict"]
        assert_same(state, loaded_again(tmp_path, plain.state_dict()))
        fresh = net(1)
        fresh.load_state_dict(state)
        assert torch.equal(fresh[3].weight, plain[3].weight)


def loaded_again(tmp_path, tree):
    torch.save(tree, tmp_path / "again.pth")
    return loaded(tmp_path / "again.pth")


def test_a_run_goes_on_from_what_was_saved(tmp_path):
    model = net()
    optimizer = trained(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu")
    save(
        tmp_path / "f.pth", model=model, optimizer=optimizer, epoch=3, step=70,
        scheduler=scheduler, scaler=scaler, rng=torch.get_rng_state(), config={"lr": 0.1},
    )  # fmt: skip
    tree = loaded(tmp_path / "f.pth")
    assert list(tree) == [
        "state_dict", "optimizer", "epoch", "step", "scheduler", "scaler", "rng", "config",
    ]  # fmt: skip
    assert (tree["epoch"], tree["step"], tree["config"]) == (3, 70, {"lr": 0.1})
    assert tree["scheduler"] == scheduler.state_dict()
    assert tree["scaler"] == scaler.state_dict()
    torch.set_rng_state(tree["rng"])
    fresh = net(1)
    fresh.load_state_dict(tree["state_dict"])
    other = torch.optim.Adam(fresh.parameters())
    other.load_state_dict(tree["optimizer"])
    state = other.state_dict()
    assert [group.pop("param_names") for group in state["param_groups"]] == [
        [name for name, _ in model.named_parameters()]
    ]
    assert_same(loaded_again(tmp_path, state), loaded_again(tmp_path, optimizer.state_dict()))


def test_plain_values_come_back_as_they_were(tmp_path):
    config = {
        "none": None, "flags": [True, False], "number": 2**70, "real": -0.0, "complex": 1 - 2j,
        "text": "ünïcode\n", "raw": b"\0\xff", "pair": (1, (2,)), "empty": [(), {}, [], set()],
        "set": {3, 1, 2}, "mixed": {1, "a", None}, "count": Counter("abca"),
        "order": OrderedDict(b=1, a=2), "size": torch.Size([2, 3]),
        "device": torch.device("cuda:7"), "dtype": torch.bfloat16,
        0: "zero", (1, 2): "a pair", 0.5: "half", None: "none",
    }  # fmt: skip
    save(tmp_path / "f.pth", config=config)
    found = loaded(tmp_path / "f.pth")["config"]
    assert found == config
    assert {name: type(value) for name, value in found.items()} == {
        name: type(value) for name, value in config.items()
    }


def test_numpy_scalars_become_numbers(tmp_path):
    kinds = [numpy.float64(0.5), numpy.float32(0.5), numpy.int64(3), numpy.uint8(3)]
    kinds += [numpy.bool_(True), numpy.str_("text"), numpy.complex128(1j), numpy.bytes_(b"raw")]
    save(tmp_path / "f.pth", values=kinds, keyed={numpy.int64(5): 1})
    tree = loaded(tmp_path / "f.pth")
    assert tree["values"] == [0.5, 0.5, 3, 3, True, "text", 1j, b"raw"]
    assert [type(value) for value in tree["values"]] == [
        float, float, int, int, bool, str, complex, bytes,
    ]  # fmt: skip
    assert tree["keyed"] == {5: 1}


def test_what_is_one_object_stays_one(tmp_path):
    shared = [1]
    shared.append(shared)
    save(tmp_path / "f.pth", a={"list": shared}, b=shared)
    tree = loaded(tmp_path / "f.pth")
    assert tree["a"]["list"] is tree["b"]
    assert tree["b"][1] is tree["b"]


def test_equal_content_makes_equal_files(tmp_path):
    for name in ("a.pth", "b.pth"):
        save(tmp_path / name, model=net(), words={"one", "two", "three"})
    assert (tmp_path / "a.pth").read_bytes() == (tmp_path / "b.pth").read_bytes()


def test_ties_and_views_are_kept_and_a_small_view_is_cut_out(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    large = torch.arange(1_000_000.0)
    other = torch.arange(1_000_000.0)
    views = {"row": large[10:20], "inside": large[12:14], "column": other[:1000:100]}
    receipt = save(tmp_path / "f.pth", model=model, views=views)
    assert receipt.size < 20_000
    tree = loaded(tmp_path / "f.pth")
    weights = [tree["state_dict"][f"{at}.weight"] for at in (0, 1)]
    assert weights[0].data_ptr() == weights[1].data_ptr()
    for name, view in views.items():
        assert torch.equal(tree["views"][name], view)
    assert tree["views"]["inside"].data_ptr() == tree["views"]["row"].data_ptr() + 8


def test_a_state_dict_is_taken_for_a_model_too(tmp_path):
    state = torch.nn.DataParallel(net()).state_dict()
    save(tmp_path / "f.pth", model=state)
    assert_same(
        loaded(tmp_path / "f.pth")["state_dict"], loaded_again(tmp_path, net().state_dict())
    )
    assert next(iter(state)).startswith("module.")


def test_the_live_objects_are_not_touched(tmp_path):
    model = torch.nn.DataParallel(net())
    optimizer = trained(model.module)
    before = loaded_again(tmp_path, {"m": model.state_dict(), "o": optimizer.state_dict()})
    save(tmp_path / "f.pth", model=model, optimizer=optimizer)
    after = loaded_again(tmp_path, {"m": model.state_dict(), "o": optimizer.state_dict()})
    assert_same(after, before)
    assert "param_names" not in optimizer.param_groups[0]
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_receipt_says_what_was_written(tmp_path):
    receipt = save(tmp_path / "a" / "b" / "f.pth", model=net())
    assert isinstance(receipt, Receipt)
    assert receipt.path == str(tmp_path / "a" / "b" / "f.pth")
    assert receipt.size == os.path.getsize(receipt.path)
    assert (receipt.format, receipt.tensors, receipt.blockers) == ("torch-zip", 9, ())


def test_the_library_reads_what_it_wrote(tmp_path):
    model = net()
    save(tmp_path / "f.pth", model=model, optimizer=trained(model), epoch=1)
    with ckptool.open(tmp_path / "f.pth") as checkpoint:
        assert [section.kind for section in checkpoint.sections] == [
            "state_dict", "optimizer", "values",
        ]  # fmt: skip
        assert list(checkpoint.devices) == ["cpu"]
    assert ckptool.verify(tmp_path / "f.pth").ok
    model.load_state_dict(ckptool.load_state_dict(tmp_path / "f.pth"))


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path):
    save(tmp_path / "real.pth", epoch=1)
    (tmp_path / "last.pth").symlink_to("real.pth")
    os.chmod(tmp_path / "real.pth", 0o640)
    save(tmp_path / "last.pth", epoch=2)
    assert (tmp_path / "last.pth").is_symlink()
    assert loaded(tmp_path / "real.pth") == {"epoch": 2}
    assert (tmp_path / "real.pth").stat().st_mode & 0o777 == 0o640


def test_a_model_that_lies_in_a_mapped_file_can_be_saved_over_that_file(tmp_path):
    file = tmp_path / "f.pth"
    save(file, model=net())
    model = net(1)
    model.load_state_dict(loaded(file, mmap=True)["state_dict"], assign=True)
    save(file, model=model, epoch=2)
    assert_same(loaded(file)["state_dict"], loaded_again(tmp_path, net().state_dict()))


def test_a_file_that_is_there_can_be_kept(tmp_path):
    save(tmp_path / "f.pth", epoch=1)
    with pytest.raises(TargetExists, match="already exists") as caught:
        save(tmp_path / "f.pth", epoch=2, overwrite=False)
    assert caught.value.hint == "`overwrite=True` replaces it; or choose another path"
    with pytest.raises(TargetExists, match="is a folder"):
        save(tmp_path, epoch=2)
    assert loaded(tmp_path / "f.pth") == {"epoch": 1}


@needs_fork
def test_a_kill_at_any_moment_leaves_the_old_file_or_the_new(tmp_path):
    file = tmp_path / "folder" / "f.pth"

    def write():
        save(file, epoch=2, weights=torch.ones(1000))

    seen = set()
    for _ in crashes(write, lambda: save(file, epoch=1)):
        seen.add(loaded(file)["epoch"])
        save(file, epoch=3)
        assert os.listdir(file.parent) == ["f.pth"]
    assert seen == {1, 2}


def test_a_safetensors_name_makes_a_safetensors_file_of_a_model_alone(tmp_path):
    model = net()
    receipt = save(tmp_path / "f.safetensors", model=torch.nn.DataParallel(model))
    assert receipt.format == "safetensors"
    assert_same(
        ckptool.load_state_dict(tmp_path / "f.safetensors"),
        loaded_again(tmp_path, model.state_dict()),
    )
    with pytest.raises(NotRepresentable, match="epoch") as caught:
        save(tmp_path / "g.safetensors", model=model, epoch=1)
    assert caught.value.hint == "save only the model, or write a .pth file"
    assert not (tmp_path / "g.safetensors").exists()


def test_calls_that_make_no_sense_are_refused(tmp_path):
    file, model = tmp_path / "f.pth", net()
    with pytest.raises(UsageError, match="nothing to save"):
        save(file)
    with pytest.raises(
        UsageError, match="'state_dict' is the key of the model, so no value can have this name"
    ):
        save(file, model=model, state_dict={})
    with pytest.raises(UsageError, match="model is a list, expected a module or its state dict"):
        save(file, model=[model])
    with pytest.raises(UsageError, match="optimizer is an int, expected an optimizer"):
        save(file, optimizer=1)
    with pytest.raises(UsageError, match="path is an int, expected a path"):
        save(3, model=model)
    with pytest.raises(UsageError, match="overwrite='no' is not True or False"):
        save(file, model=model, overwrite="no")
    assert not file.exists()


@pytest.mark.parametrize("source", ["plain", "compiled parallel", "parallel inside"])
def test_what_was_saved_of_one_wrapping_loads_into_any_other(tmp_path, source):
    model = net()
    optimizer = trained(model)
    wanted = optimizer.state_dict()["state"]
    save(tmp_path / "f.pth", model=WRAPPINGS[source](model), optimizer=optimizer, epoch=1)
    tensors = [*model.state_dict().values()]
    for target, wrap in WRAPPINGS.items():
        bare = net(1)
        bare_optimizer = trained(bare, steps=1)
        report = ckptool.load_into(wrap(bare), tmp_path / "f.pth", optimizer=bare_optimizer)
        assert (report.coverage, report.fits, report.optimizer.by) == (1.0, True, "names"), target
        assert all(map(torch.equal, tensors, bare.state_dict().values())), target
        found = bare_optimizer.state_dict()["state"]
        for number, state in wanted.items():
            assert all(torch.equal(found[number][key], value) for key, value in state.items())


def test_an_average_takes_its_counter_back_from_what_was_saved(tmp_path):
    average = torch.optim.swa_utils.AveragedModel(net())
    average.update_parameters(net(1))
    save(tmp_path / "f.pth", model=average)
    again = torch.optim.swa_utils.AveragedModel(torch.nn.DataParallel(net(2)))
    assert ckptool.load_into(again, tmp_path / "f.pth").fits
    assert again.n_averaged == 1
    assert ckptool.load_into(net(2), tmp_path / "f.pth").coverage == 1.0


def test_the_model_is_found_again_beside_its_average_and_whatever_else_there_is(tmp_path):
    model, average = net(), torch.optim.swa_utils.AveragedModel(net(1))
    save(tmp_path / "f.pth", ema=average, critic=net(2), model=model, optimizer=trained(model))
    for source in (tmp_path / "f.pth", loaded(tmp_path / "f.pth")):
        again = net(4)
        assert ckptool.load_into(again, source).fits
        assert torch.equal(again[3].weight, model[3].weight)
    again = ckptool.load_state_dict(tmp_path / "f.pth")
    assert torch.equal(again["3.weight"], model[3].weight)
    assert list(vars(again)) == ["_metadata"]
    averaged = torch.optim.swa_utils.AveragedModel(net(4))
    assert ckptool.load_into(averaged, tmp_path / "f.pth", key="ema").fits
    assert torch.equal(averaged.module[3].weight, average.module[3].weight)


def test_a_value_of_none_owns_nothing(tmp_path):
    model = net()
    save(tmp_path / "f.pth", model=model, optimizer=trained(model), note=None)
    noted = vars(loaded(tmp_path / "f.pth")["state_dict"])[MODEL_MARK]
    assert noted == {"optimizer": "state_dict"}


def test_of_files_of_others_no_state_dict_is_taken_for_the_models(tmp_path):
    torch.save({"state_dict": net().state_dict(), "ema": net(1).state_dict()}, tmp_path / "f.pth")
    with pytest.raises(AmbiguousName) as caught:
        ckptool.load_into(net(), tmp_path / "f.pth")
    assert caught.value.hint == "choose one with `key='state_dict'` or `key='ema'`"


def test_what_was_the_model_of_another_file_is_none_of_this_one(tmp_path):
    save(tmp_path / "old.pth", model=net(), ema=net(1))
    old = loaded(tmp_path / "old.pth")
    save(tmp_path / "f.pth", old=old, critic=net(2))
    with pytest.raises(AmbiguousName):
        ckptool.load_into(net(), tmp_path / "f.pth")
    save(tmp_path / "g.pth", one=old["state_dict"], other=old["ema"])
    with pytest.raises(AmbiguousName):
        ckptool.load_into(net(), tmp_path / "g.pth")


@pytest.mark.parametrize("name", ["x" * 300, "file/f.pth", "file/new/f.pth", "y" * 300 + "/f.pth"])
def test_a_path_that_the_system_does_not_take_is_an_error_of_ours(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="cannot be written") as caught:
        save(tmp_path / name, model=net())
    assert caught.value.file == str(tmp_path / name)
    assert os.listdir(tmp_path) == ["file"]


def test_a_path_with_a_null_byte_is_none(tmp_path):
    with pytest.raises(UsageError, match="not a path: it contains a null byte"):
        save(f"{tmp_path}/a\0b", model=net())


def test_another_thread_that_writes_the_same_file_is_told_as_ours(tmp_path):
    save(tmp_path / "f.pth", model=net())
    with open_locked(str(tmp_path / "f.pth")), pytest.raises(FileBusy, match="this one"):
        save(tmp_path / "f.pth", model=net())


def test_an_argument_without_a_keyword_is_refused_with_the_one_that_is_meant(tmp_path):
    model, target = torch.nn.Linear(2, 2), tmp_path / "f.pth"
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for args, words in [
        ((model, target), "model=..."),
        ((target, model.state_dict()), "model=..."),
        ((model, optimizer, target), "model=..., optimizer=..."),
        (({"epoch": 3}, target), "**..."),
        ((target, 3), "value=..."),
    ]:
        with pytest.raises(UsageError) as caught:
            save(*args)
        assert caught.value.message.endswith(f"by keyword: {words}")
        assert caught.value.hint == f"call ckptool.save({str(target)!r}, {words})"
    assert not target.exists()
