"""What every process of a run imports; it takes seconds, which a process that is forked has not."""

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
