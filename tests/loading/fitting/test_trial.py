"""What a trial on a twin tells of a module's own loading."""

import torch

from ckptool.loading.fitting.states import stated
from ckptool.loading.fitting.trial import tried


class Converting(torch.nn.Module):
    """Some of it as it was given, under the same name or another's, some made of it."""

    def __init__(self):
        super().__init__()
        for name in ("same", "up", "gate", "turned", "cast", "mixed", "part", "stretched"):
            self.register_parameter(name, torch.nn.Parameter(torch.ones(4, 4)))

    def _load_from_state_dict(self, state, prefix, *rest):
        def change(name, how):
            state[prefix + name] = how(state[prefix + name])

        up, gate = f"{prefix}up", f"{prefix}gate"
        state[up], state[gate] = state[gate], state[up]
        change("turned", lambda tensor: tensor.t())
        change("cast", lambda tensor: tensor.half().clone())
        change("mixed", lambda tensor: tensor[torch.tensor([1, 0, 2, 3])])
        with torch.no_grad():
            self.part[:2].copy_(state.pop(prefix + "part")[:2])
            self.stretched.copy_(state.pop(prefix + "stretched")[0])
        super()._load_from_state_dict(state, prefix, *rest)


def test_it_tells_which_entries_are_in_the_model_as_they_were_given():
    model = torch.nn.Sequential(Converting())
    with stated(model.state_dict()) as state:
        trial = tried(model, state, {name: name for name in state.slots}, None)
    assert trial.filled == set(model.state_dict())
    assert dict(sorted(trial.origins.items())) == {
        "0.cast": "0.cast",
        "0.gate": "0.up",
        "0.same": "0.same",
        "0.up": "0.gate",
    }
