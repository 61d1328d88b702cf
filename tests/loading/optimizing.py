"""An optimizer loaded from what a script saves, as `load_into` goes about it."""

import re
from contextlib import contextmanager

import torch

from ckptool.loading.optimizer import plan_optimizer
from ckptool.loading.plan import plan_load
from ckptool.loading.source import open_state_dict
from ckptool.loading.target import describe_target
from ckptool.matching import Allowance


@contextmanager
def plan_for(model, optimizer, source, *, state_key=None, allow_lossy_cast=False, **options):
    """The plan, while the file is open."""
    target = describe_target(model)
    with open_state_dict(source, key=state_key) as state:
        match = plan_load(state, target)
        allowance = Allowance(lossy_cast=allow_lossy_cast)
        yield plan_optimizer(optimizer, model, state, target, match, allowance=allowance, **options)


def report_of(model, optimizer, source, **options):
    with plan_for(model, optimizer, source, **options) as plan:
        return plan.report


def loaded(model, optimizer, source, **options):
    """Load it; the report."""
    with plan_for(model, optimizer, source, **options) as plan:
        assert plan.report.problems == ()
        plan.apply()
        return plan.report


def refusal_of(model, optimizer, source, **options):
    """The only problem, and what helps."""
    report = report_of(model, optimizer, source, **options)
    (problem,) = report.problems
    return problem, str(report.remedy)


def three(order=("a", "b", "c")):
    """Layers of one shape."""
    model = torch.nn.Module()
    for name in order:
        model.add_module(name, torch.nn.Linear(3, 3))
    return model


def shapely():
    """Parameters of which no two have one shape."""
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 5))


def model_of(state_dict):
    """Modules with parameters, and buffers, of these names, all zero."""
    model = torch.nn.Module()
    for name, tensor in state_dict.items():
        *path, own = name.split(".")
        module = model
        for component in path:
            if component not in dict(module.named_children()):
                module.add_module(component, torch.nn.Module())
            module = module.get_submodule(component)
        if own.startswith(("running_", "num_batches")):
            module.register_buffer(own, torch.zeros_like(tensor))
        else:
            module.register_parameter(own, torch.nn.Parameter(torch.zeros_like(tensor)))
    return model


def stepped(model, kind=torch.optim.Adam, parameters=None, steps=2, **options):
    """An optimizer whose state of each parameter is another."""
    if kind is not torch.optim.Adafactor:
        options = {"lr": 0.1, **options}
    optimizer = kind(
        list(model.named_parameters()) if parameters is None else parameters, **options
    )
    torch.manual_seed(3)
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for _ in range(steps):
        for parameter in model.parameters():
            if id(parameter) in wanted and parameter.requires_grad:
                parameter.grad = torch.randn_like(parameter)
        optimizer.step(*([lambda: torch.tensor(1.0)] if kind is torch.optim.LBFGS else []))
    return optimizer


def content(model, optimizer, **more):
    """What a script saves."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}


def given_by(model, **options):
    """The same, with an optimizer that has made steps."""
    return content(model, stepped(model, **options))


def adam(model):
    """An optimizer that has made none, and knows no names."""
    return torch.optim.Adam(model.parameters())


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters())


def groups(model, pattern, **options):
    """Parameters by name in two groups."""
    held = {True: [], False: []}
    for name, parameter in model.named_parameters():
        held[bool(re.search(pattern, name))].append((name, parameter))
    return [{"params": held[True], "weight_decay": 0.5, **options}, {"params": held[False]}]


class Thin:
    """A wrapper that is no `Optimizer`."""

    def __init__(self, inner):
        self.optimizer = inner

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)


class Around(Thin, torch.optim.Optimizer):
    """A wrapper, as accelerate puts one around an optimizer."""

    defaults = property(lambda self: self.optimizer.defaults)


def by_name(model, optimizer):
    """The state of each parameter."""
    return {name: optimizer.state.get(p) for name, p in model.named_parameters()}


def assert_alike(one, other):
    """Two states, whatever they are nested in."""
    assert isinstance(one, type(other))
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, (dict, list, tuple)):
        mine, its = (x if isinstance(x, dict) else dict(enumerate(x)) for x in (one, other))
        assert mine.keys() == its.keys()
        for key in mine:
            assert_alike(mine[key], its[key])
    else:
        assert one == other
