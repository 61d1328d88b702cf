"""A model and its optimizer bit for bit: what a refusal must not have touched."""

import pickle
from contextlib import contextmanager

import pytest
import torch


def bits_of(tensor):
    """Everything about a tensor that loading could change."""
    lazy = isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)
    data = None
    if not lazy and tensor.device.type != "meta":
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return {
        "is": id(tensor),
        "class": type(tensor),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "shape": None if lazy else tuple(tensor.shape),
        "stride": None if lazy else tensor.stride(),
        "at": 0 if lazy else tensor.data_ptr(),
        "requires_grad": tensor.requires_grad,
        "grad": None if tensor.grad is None else bits_of(tensor.grad),
        "data": data,
    }


def model_bits(model):
    """Each parameter and buffer by its place, extra state, and the mode of each module."""
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            found[path, name] = None if tensor is None else bits_of(tensor)
        found[path, "attributes"] = (type(module), module.training, sorted(vars(module)))
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            found[path, "extra"] = pickle.dumps(module.get_extra_state())
    return found


def optimizer_bits(optimizer):
    """Its options, its parameters, and its state by parameter."""

    def plain(value):
        return bits_of(value) if isinstance(value, torch.Tensor) else value

    groups = [
        {
            key: [id(p) for p in value] if key == "params" else plain(value)
            for key, value in g.items()
        }
        for g in optimizer.param_groups
    ]
    state = {
        id(parameter): {key: plain(value) for key, value in entry.items()}
        for parameter, entry in optimizer.state.items()
    }
    return groups, state


class Untouched:
    """Says whether anything has changed since it was made."""

    def __init__(self, model, optimizer=None):
        self.model, self.optimizer = model, optimizer
        self.before = self.now()

    def now(self):
        return model_bits(self.model), self.optimizer and optimizer_bits(self.optimizer)

    def check(self):
        assert self.now() == self.before


@contextmanager
def untouched_by(error, model, optimizer=None, *, match=None):
    """An error is raised, and nothing has changed."""
    untouched = Untouched(model, optimizer)
    with pytest.raises(error, match=match) as caught:
        yield caught
    untouched.check()


def saved(path, tree):
    torch.save(tree, path)
    return path


def raising(error):
    """A hook that raises an error."""

    def hook(*_):
        raise error

    return hook


def net(seed=0):
    """A convolution, a norm with a counter, and a linear layer."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten(), torch.nn.Linear(8, 2)
    )
