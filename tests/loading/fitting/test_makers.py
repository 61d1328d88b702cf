"""What can read a file as those do who wrote it."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckptool
from ckptool.errors import MatchError


class Net(nn.Module):
    """A model that a hub has."""

    def __init__(self, inside="q"):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.add_module(inside, nn.Linear(4, 4, bias=False))
        self.add_module(f"{inside}2", nn.Linear(4, 4, bias=False))

    @classmethod
    def from_pretrained(cls, folder):
        """Never called by the library."""
        raise AssertionError


def refused(model, source):
    with pytest.raises(MatchError) as caught:
        ckptool.load_into(model, source)
    return caught.value


@pytest.fixture
def folder(tmp_path):
    save_file(Net("proj").state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text('{"architectures": ["Net"]}')
    return tmp_path


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_class_that_reads_the_folder_itself_is_what_helps(folder, wrapped):
    model = nn.DataParallel(Net()) if wrapped else Net()
    for source in (folder, folder / "model.safetensors"):
        error = refused(model, source)
        assert error.hint.startswith(
            f"Net.from_pretrained({str(folder)!r}) converts what its save_pretrained wrote"
        )
        assert error.remedy.arguments == ()


def test_nothing_is_told_of_a_file_that_no_such_class_wrote(folder):
    assert "from_pretrained" not in refused(nn.Sequential(nn.Linear(4, 4)), folder).hint
    assert "from_pretrained" not in refused(Net(), Net("proj").state_dict()).hint
    (folder / "config.json").unlink()
    assert "from_pretrained" not in refused(Net(), folder).hint


def test_what_is_missing_only_is_a_matter_of_what_is_allowed(folder):
    state = Net().state_dict()
    del state["q.weight"]
    save_file(state, folder / "model.safetensors")
    assert refused(Net(), folder).hint == "allow_missing=['q.weight']"


def test_the_experts_of_a_mixtral(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        vocab_size=60, num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    kind = transformers.MixtralForCausalLM
    saved = kind(config)
    saved.save_pretrained(tmp_path)
    error = refused(kind(config), tmp_path)
    assert "allow_" not in error.hint
    loaded = eval(error.hint.partition(" converts")[0], {"MixtralForCausalLM": kind})
    for name, tensor in saved.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
