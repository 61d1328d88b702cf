"""Models and optimizers that a new torch trains, and an old one builds again.

Nothing here may need more than Python 3.8 and torch 1.6.
"""

import torch
from torch import nn


class Tied(nn.Module):
    """An embedding whose weight is that of the layer behind it as well; one layer has no bias."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(6, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.words.weight

    def forward(self, numbers):
        """Scores of what comes next."""
        return self.head(torch.tanh(self.body(self.words(numbers))))


def net():
    """With buffers, and modules without a name."""
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3), nn.Tanh()
    )


MODELS = {
    "net": net,
    "tied": Tied,
    "sparse": lambda: nn.Embedding(6, 4, sparse=True),
    "double": lambda: nn.Linear(3, 2).double(),
    "half": lambda: nn.Linear(3, 2).to(torch.bfloat16),
}
INPUTS = {
    "net": lambda: torch.randn(4, 1, 4, 4),
    "tied": lambda: torch.tensor([1, 2, 5]),
    "sparse": lambda: torch.tensor([1, 2, 5]),
    "double": lambda: torch.randn(4, 3, dtype=torch.float64),
    "half": lambda: torch.randn(4, 3).to(torch.bfloat16),
}
CASES = {
    "Adadelta": ("net", "Adadelta", {"rho": 0.8}),
    "Adagrad": ("net", "Adagrad", {"lr": 0.1}),
    "Adam": ("net", "Adam", {"lr": 0.1, "betas": [0.8, 0.9]}),
    "Adam, AMSGrad": ("net", "Adam", {"amsgrad": True}),
    "Adam of tied weights": ("tied", "Adam", {}),
    "AdamW": ("net", "AdamW", {"weight_decay": 0.2}),
    "AdamW in double precision": ("double", "AdamW", {}),
    "Adamax": ("net", "Adamax", {}),
    "ASGD": ("net", "ASGD", {}),
    "LBFGS": ("tied", "LBFGS", {"history_size": 3}),
    "RMSprop": ("net", "RMSprop", {"momentum": 0.5, "centered": True}),
    "Rprop": ("net", "Rprop", {}),
    "SGD": ("net", "SGD", {"lr": 0.1}),
    "SGD with momentum": ("net", "SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD of bfloat16": ("half", "SGD", {"lr": 0.1, "momentum": 0.9}),
    "SparseAdam": ("sparse", "SparseAdam", {}),
}
"""By name: a model, the kind of its optimizer, and the options of that."""


def built(case):
    """Model and optimizer, as they are before the first step: biases in a group of their own."""
    name, kind, options = CASES[case]
    model = MODELS[name]()
    groups = [[p for p in model.parameters() if p.dim() > 1 or len(p) > 8]]
    groups.append([p for p in model.parameters() if all(p is not one for one in groups[0])])
    if kind == "LBFGS":
        groups = [groups[0] + groups[1]]
    given = [{"params": group} for group in groups if group]
    return model, getattr(torch.optim, kind)(given, **options)


def step(case, model, optimizer):
    """One step on random input."""
    inputs = INPUTS[CASES[case][0]]()

    def loss():
        optimizer.zero_grad()
        found = model(inputs).float().pow(2).sum()
        found.backward()
        return found

    optimizer.step(loss)
