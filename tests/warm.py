"""What every process of a run imports; it takes seconds, which a process that is forked has not."""

import gc
from contextlib import suppress

import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.rpc

with suppress(ImportError):  # of the extra `trainer`
    import torch.utils.tensorboard

import ckptool.trainer.trainer
from tests.trainer import agreeing, runs

__all__ = ["agreeing", "ckptool", "runs", "torch"]

gc.collect()
gc.freeze()  # else the first collection in a fork copies all that the others share
