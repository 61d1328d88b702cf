"""Options of groups go to the groups that they are of, or nowhere."""

import pytest
import torch

from ckptool.loading.optimizers.readings import Model, Spelling, ways_of
from ckptool.loading.optimizers.saved import Kept
from ckptool.matching import Slot
from tests.loading.optimizing import content, loaded, refusal_of, shapely, stepped, three

KINDS = {"SGD": torch.optim.SGD, "Adam before its first step": torch.optim.Adam}


def over(kind, *parts, **options):
    """A group for each, with a learning rate of its own."""
    groups = [
        {"params": list(part.parameters()), "lr": number / 10}
        for number, part in enumerate(parts, 1)
    ]
    return kind(groups, **options)


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("make", [three, shapely], ids=["one shape", "shapes of their own"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("turned", [False, True])
def test_where_nothing_tells_groups_apart_their_options_are_not_loaded(kind, make, turned):
    old, new = make(), make()
    parts = list(new.children())[:2]
    optimizer = over(KINDS[kind], *(reversed(parts) if turned else parts))
    used = over(KINDS[kind], *list(old.children())[:2])
    problem, remedy = refusal_of(new, optimizer, content(old, used))
    assert "the optimizer" in problem or "order tells" in problem
    assert remedy
    if not turned or make is three:
        assert problem == (
            "nothing in the file but their order tells which groups of its optimizer are which, "
            "and lr of groups 0 and 1 differs"
        )
        assert remedy.startswith("`optimizer_order='position'`")
        loaded(new, optimizer, content(old, used), order="position")
        assert rates(optimizer) == [0.1, 0.2]


def test_options_that_are_the_same_need_no_witness():
    old, new = three(), three()
    used, optimizer = (
        torch.optim.SGD([{"params": list(part.parameters())} for part in parts], lr=rate)
        for parts, rate in (((old.a, old.b), 0.5), ((new.b, new.a), 0.1))
    )
    loaded(new, optimizer, content(old, used))
    assert rates(optimizer) == [0.5, 0.5]


def test_a_rate_that_is_a_tensor_is_not_looked_into():
    old, new = three(), three()
    used, optimizer = (over(torch.optim.Adam, one.a, one.b, foreach=False) for one in (old, new))
    for group in used.param_groups:
        group["lr"] = torch.tensor(0.1)
    assert "lr of groups 0 and 1" in refusal_of(new, optimizer, content(old, used))[0]


def test_one_state_that_is_sure_tells_its_group_and_the_only_other_one():
    old, new = shapely(), shapely()
    used = stepped(old, parameters=[{"params": list(old[0].parameters()), "lr": 0.3},
                                    {"params": list(old[1].parameters())}])  # fmt: skip
    for number in (2, 3):
        del used.state[used.param_groups[1]["params"][number - 2]]
    optimizer = over(torch.optim.Adam, new[0], new[1])
    loaded(new, optimizer, content(old, used))
    assert rates(optimizer) == [0.3, 0.1]


def test_names_tell_groups_apart_that_have_no_state():
    old, new = three(), three()
    used = torch.optim.SGD(
        [{"params": list(old.named_parameters())[:2], "lr": 0.1},
         {"params": list(old.named_parameters())[2:], "lr": 0.2}]
    )  # fmt: skip
    every = list(new.parameters())
    optimizer = torch.optim.SGD([{"params": every[2:]}, {"params": every[:2]}], lr=0.7)
    loaded(new, optimizer, content(old, used))
    assert rates(optimizer) == [0.2, 0.1]


def test_of_thousands_of_groups_each_is_looked_at_once():
    """Names of parts, another part in each group: what the model has is not gone through anew."""
    count = 3_000
    looked: list[str] = []

    class Counting(dict):
        def __iter__(self):
            looked.extend(self.keys())
            return super().__iter__()

    names = {f"part{number}.{number}.w": number for number in range(count)}
    model = Model(names, {name: Slot((3,)) for name in names})
    spelling = Spelling(Counting(zip(names, names, strict=True)))
    vars(model)["spellings"] = [spelling]
    kept = [(f"{number}.w", Kept(number, number, None)) for number in range(count)]
    (way,) = ways_of(kept, model)
    assert way.owners == tuple(range(count))
    assert len(looked) <= 2 * count
