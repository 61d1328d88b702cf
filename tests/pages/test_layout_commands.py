"""The commands about layouts, of docs/recipes.md and of the cookbook, run in their order."""

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from tests.forks import in_shell
from tests.pages import cookbook
from tests.sources import PROJECT

PAGE = (PROJECT / "docs" / "recipes.md").read_text(encoding="utf-8")
LAYOUTS = cookbook.SOURCE.read_text(encoding="utf-8").partition("## Layouts of model families")[2]
BLOCKS = re.findall(
    r"^ *```sh\n(.*?)^ *```$", PAGE + LAYOUTS.partition("\n## ")[0], re.MULTILINE | re.DOTALL
)
FIXTURES = PROJECT / "fixtures" / "recipes"
COPIES = {
    "vit.pth": "vit-timm/source/model.pth",
    "resnet50-0676ba61.pth": "resnet-torchvision-50/source/model.safetensors",
    "v1-5-pruned.ckpt": "unet-ldm/source/model.safetensors",
    "Llama-3-8B": "llama-torchtitan/source",
    "mixtral": "experts-mixtral/source",
    "phi3": "qkv-phi3/source",
    "neox": "qkv-neox/source",
    "gpt2": "gpt2-nanogpt/source",
}
"""What each name stands for."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder with every file that the commands name, of its kind."""
    folder = tmp_path_factory.mktemp("layouts")
    for name, source in COPIES.items():
        if (FIXTURES / source).is_dir():
            shutil.copytree(FIXTURES / source, folder / name)
        elif name.endswith((".pth", ".ckpt")) and source.endswith(".safetensors"):
            torch.save(load_file(FIXTURES / source), folder / name)
        else:
            shutil.copyfile(FIXTURES / source, folder / name)
    save_file(torch.load(folder / "vit.pth"), folder / "vit.safetensors")
    torch.save(load_file(FIXTURES / "experts-qwen3" / "target.safetensors"), folder / "state.pth")
    run = folder / "outputs" / "checkpoint" / "step-1000"
    ckptool.convert(FIXTURES / "llama-torchtitan" / "source" / "model.pth", run, format="dcp")
    write_meta(folder / "Meta-Llama-3-70B", ranks=8)
    write_mine(folder)
    return folder


def write_meta(folder, ranks):
    """Write a Llama of one layer in as many files, a head in each."""
    folder.mkdir()
    rows = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
    for rank in range(ranks):
        state = {f"layers.0.{name}.weight": torch.randn(4, 32) for name in rows}
        state |= {
            f"layers.0.{n}.weight": torch.randn(32, 4) for n in ("attention.wo", "feed_forward.w2")
        }
        state |= {f"layers.0.{n}_norm.weight": torch.ones(32) for n in ("attention", "ffn")}
        state |= {f"{n}.weight": torch.randn(2, 32) for n in ("output", "tok_embeddings")}
        state["norm.weight"] = torch.ones(32)
        torch.save(state, folder / f"consolidated.{rank:02}.pth")
    (folder / "params.json").write_text('{"dim": 32, "n_heads": 8}')


def write_mine(folder):
    """Write the model and the recipe that the page builds, and the results that torch makes."""
    names, rule, params = re.findall(r"^   ```toml\n(.*?)^   ```", PAGE, re.MULTILINE | re.DOTALL)
    out = '"trunk.{n}.out.weight" = "model.layers.{n}.self_attn.o_proj.weight"\n'
    (folder / "mine.toml").write_text(names.replace("norms", "norm") + out + rule + params)
    (folder / "config.json").write_text('{"num_attention_heads": 3}')
    qkv = torch.randn(36, 12)
    state = {"wte.weight": torch.randn(7, 12), "final.weight": torch.randn(12)}
    state |= {"trunk.0.norm.weight": torch.randn(12), "trunk.0.out.weight": torch.randn(12, 12)}
    new = {
        "model.embed_tokens.weight": state["wte.weight"],
        "model.norm.weight": state["final.weight"],
        "model.layers.0.input_layernorm.weight": state["trunk.0.norm.weight"],
        "model.layers.0.self_attn.o_proj.weight": state["trunk.0.out.weight"],
    }
    state["trunk.0.qkv.weight"] = qkv
    torch.save(state, folder / "mine.pth")
    save_file(state, folder / "mine.safetensors")
    (folder / "reference").mkdir()
    for heads, path in ((3, "reference.safetensors"), (12, "reference/model.safetensors")):
        parts = zip("qkv", qkv.view(heads, 3, -1, 12).unbind(1), strict=True)
        attention = {
            f"model.layers.0.self_attn.{w}_proj.weight": part.reshape(12, 12).contiguous()
            for w, part in parts
        }
        save_file({**new, **attention}, folder / path)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("\n")[0][:60])
def test_the_commands_of_a_block_run(sources, tmp_path, block):
    folder = tmp_path / "work"
    shutil.copytree(sources, folder)
    for line in filter(None, map(str.strip, block.splitlines())):
        done = in_shell(line, folder, together=True)
        assert done.returncode == 0, f"{line}\n{done.stdout}"
        written = re.match(r"ckptool convert \S+ (\S+)", line)
        assert not written or (folder / written[1]).exists(), line


def test_there_are_blocks_of_both_pages():
    assert len(BLOCKS) == 7
    assert sum(block.count("--recipe") for block in BLOCKS) == 16
