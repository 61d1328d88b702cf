"""Folders as Megatron-LM writes them: `iter_0000100/mp_rank_00/model_optim_rng.pt`, ..."""

import argparse
from collections import OrderedDict

import torch

EMBEDDING, QKV = "embedding.word_embeddings.weight", "decoder.layers.0.linear_qkv.weight"
PROJ, NORM = "decoder.layers.0.linear_proj.weight", "decoder.layers.0.norm.weight"
TIED = "output_layer.weight"
SPLIT = {EMBEDDING: 0, QKV: 0, PROJ: 1}
RULES = ["*word_embeddings.weight=0", "*qkv.weight=0", "*proj.weight=1"]


def whole(*, square=False):
    """Return the model of which the ranks have parts, before it is tied."""
    torch.manual_seed(0)
    qkv = (8, 8) if square else (12, 8)
    sizes = {EMBEDDING: (16, 8), QKV: qkv, PROJ: (8, 8), NORM: (8,)}
    return OrderedDict((name, torch.randn(size).bfloat16()) for name, size in sizes.items())


def write_ranks(folder, model, world=2, pattern="mp_rank_{:02d}", name="model_optim_rng.pt"):
    """Write the file of each rank of tensor parallelism; an optimizer and generators beside."""
    for rank in range(world):
        own = OrderedDict(
            (key, one.chunk(world, SPLIT[key])[rank].clone() if key in SPLIT else one.clone())
            for key, one in model.items()
        )
        own[TIED] = own[EMBEDDING]
        own["decoder.layers.0._extra_state"] = None
        state = {
            "args": argparse.Namespace(tensor_model_parallel_size=world, rank=rank),
            "checkpoint_version": 3.0,
            "iteration": 100,
            "model": own,
            "optimizer": {
                "fp32_from_fp16_params": [[one.float() for one in own.values() if one is not None]]
            },
            "rng_state": [{"torch_rng_state": torch.full((4,), rank, dtype=torch.uint8)}],
            "opt_param_scheduler": {"max_lr": 0.1},
        }
        path = folder / pattern.format(rank)
        path.mkdir(parents=True)
        torch.save(state, path / name)
    return folder
