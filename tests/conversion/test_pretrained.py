"""What convert makes of a training, `from_pretrained` reads, and the model computes the same."""

import subprocess
import sys
from collections import OrderedDict

import pytest
import torch
from torch.distributed import checkpoint as dcp

import ckptool

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TOKENS = torch.arange(12).view(2, 6)
RANKS = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
state, folder = torch.load(sys.argv[1]), sys.argv[2]
for rank in range(2):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    parts = {
        key: DTensor.from_local(
            [*one.chunk(2), one[:0]][rank].clone(), mesh, [Shard(0)],
            shape=one.shape, stride=one.stride(), run_check=False,
        )
        for key, one in state.items()
    }
    torch.save(parts, f"{folder}/model_world_size_2_rank_{rank}.pt")
    dist.destroy_process_group()
"""


def llama(*, tied):
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2(*, tied):
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=16, n_embd=16, n_layer=2, n_head=2, tie_word_embeddings=tied
    )
    return transformers.GPT2LMHeadModel(config)


def write_wrapped(model, folder):
    wrapped = torch.nn.DataParallel(model)
    torch.save({"state_dict": wrapped.state_dict(), "epoch": 3}, folder / "checkpoint.pth.tar")
    return folder / "checkpoint.pth.tar"


def write_shards(model, folder):
    model.save_pretrained(folder, max_shard_size="4KB")
    assert (folder / "model.safetensors.index.json").exists()
    return folder


def write_dcp(model, folder):
    dcp.save({"model": model.state_dict(), "step": 5}, checkpoint_id=folder, no_dist=True)
    return folder


def write_ranks(model, folder):
    torch.save(model.state_dict(), folder.parent / "whole.pth")
    words = [sys.executable, "-c", RANKS, folder.parent / "whole.pth", folder]
    subprocess.run([*map(str, words)], check=True, timeout=300)
    return folder


def write_zero(model, folder):
    """Stage 3, as DeepSpeed lays it out: each parameter in equal slices, in fp32."""
    parameters = {key: one.detach() for key, one in model.named_parameters()}
    shapes = OrderedDict((key, one.shape) for key, one in parameters.items())
    module = OrderedDict((key, torch.empty(0, dtype=one.dtype)) for key, one in parameters.items())
    (folder / "global_step5").mkdir()
    (folder / "latest").write_text("global_step5")
    for rank in range(2):
        cuts = []
        for one in parameters.values():
            half = -(-one.numel() // 2)
            flat = torch.zeros(2 * half)
            flat[: one.numel()] = one.float().flatten()
            cuts.append(flat[rank * half : (rank + 1) * half])
        vector = torch.cat(cuts)
        moments = {"exp_avg": vector * 0, "exp_avg_sq": vector * 0, "step": torch.tensor(5.0)}
        own = {
            "zero_stage": 3,
            "partition_count": 2,
            "optimizer_state_dict": {"state": {0: moments}, "param_groups": [{"params": [0]}]},
            "fp32_flat_groups": [vector],
        }
        name = f"global_step5/zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"module": module, "param_shapes": [shapes]}, folder / f"{name}_model_states.pt")
        torch.save({"optimizer_state_dict": own}, folder / f"{name}_optim_states.pt")
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("write", [write_wrapped, write_shards, write_dcp, write_ranks, write_zero])
def test_from_pretrained_computes_the_logits_of_the_training(tmp_path, write, make, tied, dtype):
    torch.manual_seed(0)
    model = make(tied=tied).to(dtype).eval()
    source = tmp_path / "checkpoint-5"
    source.mkdir()
    written = write(model, source)
    config = model.config
    config.dtype = dtype
    config.save_pretrained(source)
    named = {} if written == source else {"files_from": source}
    receipt = ckptool.convert(written, tmp_path / "hf", **named)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype="auto", output_loading_info=True
    )
    assert receipt.format == "safetensors"
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.dtype == dtype
    with torch.no_grad():
        assert torch.equal(loaded.eval()(TOKENS).logits, model(TOKENS).logits)


def test_a_folder_in_shards_of_another_size_and_as_pickles_is_read(tmp_path):
    model = llama(tied=True).eval()
    write_shards(model, tmp_path / "source")
    ckptool.convert(tmp_path / "source", tmp_path / "shards", max_shard_size="9KB")
    ckptool.convert(tmp_path / "source", tmp_path / "pickles", format="torch-zip")
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    assert (tmp_path / "pickles" / "pytorch_model.bin").exists()
    for name in ("shards", "pickles"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
        assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft calls what transformers deprecates
def test_peft_loads_the_folder_of_an_adapter(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = llama(tied=False).eval()
    base.save_pretrained(tmp_path / "base")
    options = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, options).eval()
    expected = model(TOKENS).logits
    model.save_pretrained(tmp_path / "adapter")
    for target, format in (("pickle", "torch-zip"), ("safe", None)):
        source = tmp_path / "adapter" if format else tmp_path / "pickle"
        ckptool.convert(source, tmp_path / target, format=format)
        own = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        loaded = peft.PeftModel.from_pretrained(own, tmp_path / target).eval()
        assert torch.equal(loaded(TOKENS).logits, expected)


def test_diffusers_loads_a_folder_of_its_own(tmp_path):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    model = diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(32, 32), layers_per_block=1,
        down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
    ).eval()  # fmt: skip
    model.save_pretrained(tmp_path / "unet")
    noise = torch.randn(1, 3, 8, 8)
    ckptool.convert(tmp_path / "unet", tmp_path / "pickle", format="torch-zip")
    ckptool.convert(tmp_path / "pickle", tmp_path / "safe")
    torch.save(model.state_dict(), tmp_path / "ema.pth")
    ckptool.convert(tmp_path / "ema.pth", tmp_path / "from", files_from=tmp_path / "unet")
    with torch.no_grad():
        for name in ("pickle", "safe", "from"):
            loaded = diffusers.UNet2DModel.from_pretrained(tmp_path / name).eval()
            state, expected = loaded.state_dict(), model.state_dict()
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[key], expected[key]) for key in state)
            torch.testing.assert_close(loaded(noise, 3).sample, model(noise, 3).sample)
