"""What processes of DDP do, each scene in all of them at once."""

import torch
from torch import nn

from tests.trainer.ranks import main
from tests.trainer.runs import Crash, crash_at, net, refusal, run


class Partial(nn.Module):
    """Has a layer that is never called, one that is frozen, and running statistics."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(3, 8), nn.Linear(3, 8)
        self.frozen, self.head = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 1)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        hidden = self.frozen(self.used(x).relu())
        if self.training and len(x):
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return self.head(hidden)


MODELS = {"net": net, "partial": Partial}
OPTIONS = {"strategy": "ddp", "save_every": 1, "clip": 0.5, "ema": 0.9, "weight_decay": 0.1}


def cut(folder):
    """Runs that end in the middle of an epoch and go on, and those that never were."""
    for name, model in MODELS.items():
        run(folder / name, model=model(), **OPTIONS)
        try:
            run(folder / f"{name}_cut", crash_at(5), model=model(), **OPTIONS)
        except Crash:
            run(folder / f"{name}_cut", model=model(), resume="auto", **OPTIONS)


def refused(folder):
    """What is said before the first step."""
    return [
        refusal(folder / "small", strategy="ddp", batch_size=1),
        refusal(folder / "untrained", strategy="ddp", model=net().requires_grad_(False)),
    ]


if __name__ == "__main__":
    main([cut, refused])
