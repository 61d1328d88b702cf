"""One network as it comes wrapped: by what trained it, and by what is to be loaded into."""

import io

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel


class Block(nn.Module):
    """Equal in shape to its neighbors."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return x + self.norm(self.fc(x)).relu()


class Net(nn.Module):
    """What state dicts have of every kind: a tie, counters, a bare parameter, a passing buffer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("passing", torch.ones(4), persistent=False)

    def forward(self, tokens):
        x = self.embed(tokens) * self.scale - self.mean + self.passing
        return self.head(self.blocks(x))


TOKENS = torch.tensor([0, 3, 6, 2, 5])


class Lightning(nn.Module):
    """A network under `self.model`, as most people's LightningModules have it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(tokens)


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_inside(model):
    model.blocks = compiled(model.blocks)
    return model


def fully_sharded(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def fully_sharded_twice(model):
    model.blocks = fully_sharded(model.blocks)
    return fully_sharded(model)


def parallel_inside(model):
    model.blocks = nn.DataParallel(model.blocks)
    return model


def averaged(model):
    average = AveragedModel(model)
    average.update_parameters(model)
    return average


def checkpointed(model):
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    return model


WRAPPINGS = {
    "plain": lambda model: model,
    "DP": nn.DataParallel,
    "DDP": DistributedDataParallel,
    "compile": compiled,
    "compile of DP": lambda model: compiled(nn.DataParallel(model)),
    "DP of compile": lambda model: nn.DataParallel(compiled(model)),
    "compile inside": compiled_inside,
    "FSDP1": fully_sharded,
    "AveragedModel": averaged,
    "Lightning": Lightning,
}

MORE = {
    "compile of DDP": lambda model: compiled(DistributedDataParallel(model)),
    "compile of Lightning of DP": lambda model: compiled(Lightning(nn.DataParallel(model))),
    "AveragedModel of DDP": lambda model: averaged(DistributedDataParallel(model)),
    "AveragedModel of compile": lambda model: averaged(compiled(model)),
    "Lightning of compile inside": lambda model: Lightning(compiled_inside(model)),
    "Lightning twice": lambda model: Lightning(Lightning(model)),
    "checkpoint inside": checkpointed,
    "FSDP1 of checkpoint inside": lambda model: fully_sharded(checkpointed(model)),
    "FSDP1 inside FSDP1": fully_sharded_twice,
    "DP inside": parallel_inside,
    "DDP of DP inside": lambda model: DistributedDataParallel(parallel_inside(model)),
    "DP twice": lambda model: nn.DataParallel(nn.DataParallel(model)),
}


def made(name, seed, **how):
    """A fresh network in the wrapping, in evaluation mode."""
    torch.manual_seed(seed)
    return {**WRAPPINGS, **MORE}[name](Net(**how)).eval()


def trained(name, seed=1):
    """The same with statistics and counters that are not those of a fresh one."""
    torch.manual_seed(seed)
    model = Net()
    model.train()(TOKENS)
    return {**WRAPPINGS, **MORE}[name](model).eval()


def scramble(model, seed=2):
    """Give all that a file has of a model other numbers, in place."""
    torch.manual_seed(seed)
    buffers = [buffer for name, buffer in model.named_buffers() if "passing" not in name]
    with torch.no_grad():
        for tensor in [*model.parameters(), *buffers]:
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5)
            else:
                tensor.fill_(77)


def answer(model):
    """What a model answers."""
    with torch.no_grad():
        return model.eval()(TOKENS)


def saved(path, wrapping, model):
    """A file of the model, as those who wrap models so save them."""
    content = model.state_dict()
    if "Lightning" in wrapping:
        content = {
            "epoch": 1,
            "global_step": 3,
            "pytorch-lightning_version": "2.6.6",
            "state_dict": content,
            "optimizer_states": [],
        }
    elif "DDP" in wrapping:
        content = {"epoch": 1, "arch": "net", "state_dict": content, "best_acc1": 20.0}
    torch.save(content, path)
    return path


def copied(state):
    """A state dict over memory of its own, `_metadata` included."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)
