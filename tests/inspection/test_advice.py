"""The commands that are proposed: only what is needed, and quoted."""

import pytest

from ckptool.inspection.advice import Needs, load_commands, waste_notes


def commands(file="model.pth", devices=("cpu",), *, strip=False, rewrite=False, model_only=False,
             choices=()):  # fmt: skip
    return load_commands(Needs(file, tuple(devices), strip, rewrite, model_only, choices))


def test_a_plain_file_on_the_cpu_needs_nothing():
    assert commands() == {}
    assert commands(devices=["cpu", "meta"]) == {}


def test_another_gpu_needs_a_remap():
    assert commands(devices=["cuda:3"]) == {
        "one_gpu": "ckptool remap --map cuda:3=cuda:0 model.pth",
        "cpu": "ckptool remap --to cpu model.pth",
    }


@pytest.mark.parametrize("tag", ["cuda", "cuda:0"])
def test_the_first_gpu_needs_nothing_where_there_is_one(tag):
    assert commands(devices=[tag]) == {"cpu": "ckptool remap --to cpu model.pth"}


def test_several_gpus_are_mapped_by_one_rule():
    found = commands(devices=["cuda:0", "cuda:1", "cuda:2"])
    assert found["one_gpu"] == "ckptool remap --map 'cuda:*=cuda:0' model.pth"


def test_another_kind_of_device_goes_to_the_gpu_as_well():
    found = commands(devices=["mps", "cuda:1"])
    assert found["one_gpu"] == "ckptool remap --map cuda:1=cuda:0 --map mps=cuda:0 model.pth"


def test_wrappers_alone_are_stripped():
    assert set(commands(strip=True).values()) == {"ckptool strip-module model.pth"}


def test_wrappers_and_devices_go_in_one_pass():
    assert commands(devices=["cuda:3"], strip=True) == {
        "one_gpu": "ckptool convert model.pth model.cuda0.pth --wrappers strip "
        "--device-map cuda:3=cuda:0",
        "cpu": "ckptool convert model.pth model.cpu.pth --wrappers strip --to cpu",
    }


def test_a_layout_that_does_not_load_is_rewritten():
    assert commands("m.pkl", rewrite=True)["cpu"] == "ckptool convert m.pkl m.plain.pth"


def test_objects_are_left_behind_with_a_key_where_one_is_needed():
    found = commands(model_only=True, choices=("model", "model_ema"))
    assert found["cpu"] == "ckptool convert model.pth model.plain.pth --model-only --key NAME"


def test_names_are_quoted_for_the_shell():
    assert commands("a b;rm.pth", strip=True)["cpu"] == "ckptool strip-module 'a b;rm.pth'"


def test_a_name_that_looks_like_an_option_is_none():
    assert commands("-m.pth", strip=True)["cpu"] == "ckptool strip-module ./-m.pth"


def test_a_folder_becomes_a_file_beside_it():
    assert commands("unzipped/", rewrite=True)["cpu"] == (
        "ckptool convert unzipped/ unzipped.plain.pth"
    )


@pytest.mark.parametrize(
    ("unseen", "dead", "facts"),
    [
        (4000, 0, "4,000 bytes of the storages are seen by no tensor"),
        (0, 17, "17 bytes are dead"),
        (1, 2, "1 byte of the storages is seen by no tensor and 2 bytes are dead"),
    ],
)
def test_waste_is_told_with_what_removes_it(unseen, dead, facts):
    assert waste_notes("a b.pth", unseen, dead) == (
        f"{facts}: ckptool compact 'a b.pth' leaves them out",
    )


def test_without_waste_there_is_no_note():
    assert waste_notes("m.pth", 0, 0) == ()
