"""`ckptool report`."""

import pytest
import torch

from ckptool.errors import TorchMissing
from tests.render.page.pages import Page, names


def page_at(path):
    return Page(path.read_bytes())


def test_a_page_is_written_and_said(ckptool, model, tmp_path):
    target = tmp_path / "out.html"
    done = ckptool("report", model, "-o", target, "--no-values")
    assert done.code == 0, done.err
    assert done.out == ""
    assert f"wrote {target} (" in done.err
    assert "state_dict/module.conv1.weight" in names(page_at(target).data)


def test_the_receipt_as_json(ckptool, model, tmp_path):
    target = tmp_path / "out.html"
    done = ckptool("report", model, "-o", target, "--no-values", "--json", "-q")
    assert done.err == ""
    assert done.document == {
        "schema": "ckptool.report/1",
        "source": str(model),
        "other": None,
        "file": str(target),
        "size": target.stat().st_size,
        "tensors": 9,
        "measured": 0,
        "identical": None,
        "structure": None,
        "notes": ["the values of the tensors were not read"],
    }


def test_no_target_is_wrong_usage(ckptool, model):
    done = ckptool("report", model)
    assert done.code == 2
    assert "'-o' / '--output'" in done.err


def test_an_existing_page_needs_force(ckptool, model, tmp_path):
    target = tmp_path / "out.html"
    target.write_text("mine")
    done = ckptool("report", model, "-o", target, "--no-values")
    assert done.code == 2
    assert "already exists" in done.err
    assert "--force" in done.err
    assert target.read_text() == "mine"
    assert ckptool("report", model, "-o", target, "--no-values", "--force").code == 0
    assert page_at(target).all("html")


def test_the_page_is_never_a_source(ckptool, model, tmp_path):
    before = model.read_bytes()
    done = ckptool("report", model, "-o", model, "--force")
    assert done.code == 2
    assert "is the source itself" in done.err
    assert model.read_bytes() == before


def test_a_target_is_refused_before_anything_is_read(ckptool, model, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("values were read for a page that cannot be written")

    monkeypatch.setattr("ckptool.comparison.report.report", refuse)
    assert "is a folder" in ckptool("report", model, "-o", tmp_path).err


def test_what_is_no_checkpoint_is_told(ckptool, tmp_path):
    (tmp_path / "page.txt").write_text("hello")
    done = ckptool("report", tmp_path / "page.txt", "-o", tmp_path / "out.html")
    assert done.code == 2
    assert not (tmp_path / "out.html").exists()


def test_a_key_that_is_not_there_is_told(ckptool, model, tmp_path):
    done = ckptool("report", model, "--key", "nothing", "-o", tmp_path / "out.html")
    assert done.code == 2
    assert "no entry is named 'nothing'" in done.err


def test_two_files_of_different_formats(ckptool, model, tmp_path):
    other, target = tmp_path / "model.safetensors", tmp_path / "out.html"
    assert ckptool("convert", model, other).code == 0
    done = ckptool("report", model, other, "-o", target, "--json", "--key", "state_dict")
    assert done.code == 0, done.err
    assert done.document["identical"] is True
    assert set(page_at(target).data["diff"]["chart"]["status"]) == {"="}


def test_values_are_those_that_torch_finds(ckptool, model, tmp_path):
    target = tmp_path / "out.html"
    done = ckptool("report", model, "-o", target, "--json")
    data = page_at(target).data
    assert done.document["measured"] == done.document["tensors"] == 9
    state = torch.load(model, weights_only=True)["state_dict"]
    for i, name in enumerate(names(data)):
        values, tensor = data["values"], state[name.removeprefix("state_dict/")].double()
        assert values["minimum"][i] == pytest.approx(tensor.min().item(), rel=1e-5)
        assert values["mean"][i] == pytest.approx(tensor.mean().item(), rel=1e-4, abs=1e-8)
        assert values["zeros"][i] == (tensor == 0).sum()


def test_changed_values_are_in_the_chart_by_how_much(ckptool, model, tmp_path):
    saved = torch.load(model, weights_only=True)
    saved["state_dict"]["module.fc.weight"] *= 1.5
    saved["epoch"] = 8
    other, target = tmp_path / "other.pth", tmp_path / "out.html"
    torch.save(saved, other)
    done = ckptool("report", model, other, "-o", target, "--json")
    assert done.code == 0
    assert done.document["identical"] is False
    diff = page_at(target).data["diff"]
    chart = dict(zip(names(diff, "chart"), diff["chart"]["change"], strict=True))
    assert chart.pop("state_dict/fc.weight") == pytest.approx(0.5, rel=1e-5)
    assert set(chart.values()) == {None}
    assert dict(zip(names(diff, "changes"), diff["changes"]["what"], strict=True)) == {
        "state_dict/fc.weight": "value",
        "epoch": "value: 7 -> 8",
    }


def test_without_values_headers_alone_are_said_to_be_the_same(ckptool, model, tmp_path):
    saved = torch.load(model, weights_only=True)
    saved["state_dict"]["module.fc.weight"] *= 1.5
    other, target = tmp_path / "other.pth", tmp_path / "out.html"
    torch.save(saved, other)
    done = ckptool("report", model, other, "-o", target, "--json", "--no-values")
    assert (done.document["identical"], done.document["structure"]) == (True, True)
    drawn = page_at(target)
    assert drawn.data["diff"]["chart"]["structure"] is True
    assert "the same structure" in drawn.one("section", id="changes").text
    done = ckptool("report", model, other, "-o", target, "--json", "--force")
    assert (done.document["identical"], done.document["structure"]) == (False, False)
    assert page_at(target).data["diff"]["chart"]["structure"] is False


def test_without_torch_there_are_no_figures_and_it_says_so(ckptool, model, tmp_path, monkeypatch):
    def missing(*_, **__):
        raise TorchMissing("torch is not installed")

    monkeypatch.setattr("ckptool.comparison.report.stats", missing)
    target = tmp_path / "out.html"
    done = ckptool("report", model, "-o", target)
    assert done.code == 0, done.err
    assert "torch is not installed" in done.err
    assert page_at(target).data["values"] is None
    assert "torch is not installed" in page_at(target).one("section", id="summary").text
