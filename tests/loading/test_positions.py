"""State without names goes by position where that proves whose it is, or where the user vouches."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckptool
from ckptool.errors import MatchError, NotFound
from tests.loading.bits import saved, untouched_by
from tests.loading.optimizing import assert_alike, by_name

WORDS = 'optimizer_order="position"'


class Net(nn.Module):
    """Blocks of equal shapes, batch norms and a tied head: 2 parameters and 4 per block."""

    def __init__(self, blocks=2, head="head", order=None, width=4):
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        parts = {str(at): nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for at in range(blocks)}
        self.blocks = nn.ModuleDict({key: parts[key] for key in order or parts})
        self.add_module(head, nn.Linear(4, width))
        if width == 4:
            getattr(self, head).weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return [*self.children()][-1](x)


def step(model, optimizer):
    torch.manual_seed(11)
    x = torch.randn(8, 4)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def by_decay(model):
    every = [*model.parameters()]
    return [
        {"params": [p for p in every if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in every if p.dim() < 2], "weight_decay": 0.0},
    ]


def halves(model, turned=False, **decays):
    every = [*model.parameters()]
    half = len(every) // 2
    groups = [
        {"params": some, "lr": 0.1 + at, **({"weight_decay": at / 10} if decays else {})}
        for at, some in enumerate((every[:half], every[half:]))
    ]
    return groups[::-1] if turned else groups


def plain(model):
    return [*model.parameters()]


def trained(make=Net, groups=plain, kind=torch.optim.AdamW, **options):
    torch.manual_seed(5)
    model = make()
    optimizer = kind(groups(model), **{"lr": 0.05, **options})
    for _ in range(2):
        step(model, optimizer)
    return model, optimizer


def given_by(model, optimizer, **more):
    return copy.deepcopy(
        {"state_dict": model.state_dict(), "optim_dict": optimizer.state_dict(), **more}
    )


def refused(source, model, optimizer, *words, **options):
    with untouched_by(MatchError, model, optimizer) as caught:
        ckptool.load_into(model, source, optimizer=optimizer, **options)
    text = str(caught.value)
    assert "does not fit" not in text
    for word in words:
        assert word in text
    return caught.value


@pytest.mark.parametrize("groups", [plain, by_decay, halves])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adafactor, {}),
        (torch.optim.SGD, {}),
    ],
)
def test_what_a_script_saves_resumes_as_with_torchs_own_loading(
    tmp_path, groups, wrapped, kind, options
):
    model, optimizer = trained(groups=groups, kind=kind, **options)
    outer = nn.DataParallel(model) if wrapped else model
    content = given_by(outer, optimizer, epoch=3)
    for source in (content, saved(tmp_path / "f.pth", content)):
        new, other = Net(), Net()
        mine, theirs = (kind(groups(one), **{"lr": 0.7, **options}) for one in (new, other))
        report = ckptool.load_into(new, source, optimizer=mine)
        other.load_state_dict(model.state_dict())
        theirs.load_state_dict(copy.deepcopy(content["optim_dict"]))
        count = len(optimizer.state_dict()["state"])
        assert report.optimizer.by == "position"
        assert report.optimizer.matched == (count if kind is not torch.optim.SGD or options else 0)
        assert f"optimizer: matched {report.optimizer.matched} states by position" in str(report)
        assert report.fits
        assert mine.state_dict()["param_groups"] == theirs.state_dict()["param_groups"]
        for one, opt in ((new, mine), (other, theirs), (model, copy.deepcopy(optimizer))):
            if one is not model:
                step(one, opt)
        assert_alike(by_name(new, mine), by_name(other, theirs))
        assert_alike({**new.state_dict()}, {**other.state_dict()})


def only(start, stop):
    return lambda model: [*model.blocks.parameters()][4 * start : 4 * stop]


def test_other_blocks_of_the_same_model_are_refused():
    source = given_by(*trained(lambda: Net(12), only(0, 6)))
    model = Net(12)
    optimizer = torch.optim.AdamW(only(6, 12)(model))
    error = refused(source, model, optimizer, "the optimizer state cannot be loaded", WORDS)
    assert "the model in the file has 50 parameters, and its optimizer has 24" in str(error)


@pytest.mark.parametrize("decays", [{}, {"decays": True}])
@pytest.mark.parametrize("turned", [False, True])
def test_groups_in_another_order_are_refused(decays, turned):
    def make():
        return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(14)))

    source = given_by(*trained(make, lambda model: halves(model, turned, **decays)))
    model = make()
    optimizer = torch.optim.AdamW(halves(model, not turned, **decays))
    why = (
        "weight_decay"
        if decays
        else "have lr [1.1, 0.1]"
        if turned
        else "in the order of the model"
    )
    refused(source, model, optimizer, WORDS, why)


@pytest.mark.parametrize("rates", [(0.0, 0.0), (0.01, 0.11), (0.3, 0.3)])
def test_rates_that_a_schedule_changed_do_not_tell_groups_of_the_same_shapes_apart(rates):
    def make():
        return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(14)))

    model, optimizer = trained(make, halves)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    new = make()
    mine = torch.optim.AdamW(halves(new))
    ckptool.load_into(new, given_by(model, optimizer), optimizer=mine)
    assert_alike(by_name(new, mine), by_name(model, optimizer))


def test_layers_in_another_order_are_refused():
    source = given_by(*trained(lambda: Net(3, order="201")))
    model = Net(3)
    refused(
        source, model, torch.optim.AdamW(model.parameters()), WORDS, "starting at blocks.2.0.weight"
    )


@pytest.mark.parametrize("blocks", [2, 11])
def test_a_model_in_safetensors_has_no_order(tmp_path, blocks):
    def make():
        return Net(blocks, width=3)

    model, optimizer = trained(make)
    folder = tmp_path / "checkpoint-500"
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    new = make()
    fresh = torch.optim.AdamW(new.parameters())
    error = refused(folder, new, fresh, WORDS, "sorted by key")
    assert "optimizer_order='position'" in error.hint
    loose = {"model": load_file(folder / "model.safetensors"), "optim": optimizer.state_dict()}
    refused(loose, new, fresh, WORDS)
    ckptool.load_into(new, folder, optimizer=fresh, optimizer_order="position")
    assert_alike(by_name(new, fresh), by_name(model, optimizer))


def test_without_a_model_in_the_file_nothing_is_proved():
    model, optimizer = trained()
    alone = {"optimizer": optimizer.state_dict()}
    new = Net()
    fresh = torch.optim.AdamW(new.parameters())
    with untouched_by(NotFound, new, fresh, match=WORDS):
        ckptool.load_into(new, alone, optimizer=fresh)
    empty = {"model": nn.BatchNorm1d(4, affine=False).state_dict(), **alone}
    refused_for = {"strict": False, "min_coverage": 0}
    refused(empty, new, fresh, WORDS, "has 0 parameters, and its optimizer has 10", **refused_for)
    source = {"model": new.state_dict(), "optimizer": alone}
    ckptool.load_into(new, source, optimizer=fresh, optimizer_order="position")
    assert_alike(by_name(new, fresh), by_name(model, optimizer))


def reordered(model):
    every = plain(model)
    return [every[0], every[2], every[1], *every[3:]]


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (reordered, "shape"),
        (lambda model: plain(model)[::-1], "shape"),
        (lambda model: [{"params": [p]} for p in plain(model)], "in groups of"),
        (lambda model: [*plain(model)[1:], nn.Parameter(torch.ones(4, 4))], "every parameter"),
    ],
)
def test_an_optimizer_that_is_not_that_of_the_model_is_refused(groups, words):
    source = given_by(*trained())
    model = Net()
    refused(source, model, torch.optim.AdamW(groups(model)), WORDS, words)


def test_equal_shapes_in_another_order_are_refused():
    def make():
        return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))

    source = given_by(*trained(make))
    model = make()
    optimizer = torch.optim.AdamW([*model.parameters()][::-1])
    refused(source, model, optimizer, WORDS, "in the order of the model")


def test_a_key_that_only_the_file_has_counts_unless_it_is_of_a_norm():
    model, optimizer = trained()
    source = given_by(model, optimizer)
    source["state_dict"]["old.running_var"] = torch.ones(4)
    new = Net()
    fresh = torch.optim.AdamW(new.parameters())
    options = {"optimizer": fresh, "allow_unexpected": ["old.*"]}
    assert ckptool.load_into(new, source, **options).optimizer.by == "position"
    source["state_dict"]["old.weight"] = torch.ones(4)
    refused(source, new, fresh, WORDS, "has 11 parameters, and its optimizer has 10", **{
        "allow_unexpected": ["old.*"]
    })  # fmt: skip


DIVIDED = [
    (halves, plain), (plain, halves),
    (halves, lambda model: [{"params": [p]} for p in plain(model)]),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after"), DIVIDED)
def test_who_vouches_has_groups_flattened_and_keeps_their_options(before, after):
    model, optimizer = trained(groups=before)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3).state_dict()
    source = given_by(model, optimizer, scheduler=schedule)
    new = Net()
    fresh = torch.optim.AdamW(after(new), lr=0.9)
    rates = [group["lr"] for group in fresh.param_groups]
    refused(source, new, fresh, WORDS, "in groups of")
    report = ckptool.load_into(new, source, optimizer=fresh, optimizer_order="position").optimizer
    assert_alike(by_name(new, fresh), by_name(model, optimizer))
    assert [group["lr"] for group in fresh.param_groups] == rates
    assert report.notes[0].startswith("kept the learning rates and options of the groups")
    assert report.notes[1].startswith("scheduler has base_lrs for the groups in the file")
    step(new, fresh)


def test_who_vouches_still_has_shapes_checked():
    source = given_by(*trained())
    model = Net()
    turned = torch.optim.AdamW(plain(model)[::-1])
    with untouched_by(MatchError, model, turned, match="has shape"):
        ckptool.load_into(model, source, optimizer=turned, optimizer_order="position")
    fewer = torch.optim.AdamW(plain(model)[1:])
    with untouched_by(MatchError, model, fewer, match="10 parameters in groups of 10"):
        ckptool.load_into(model, source, optimizer=fewer, optimizer_order="position")


PARTLY = {"optimizer_order": "position", "optimizer_partial": True}


@pytest.mark.parametrize("width", [3, 7])
@pytest.mark.parametrize("head", ["head", "new"])
def test_a_new_head_starts_without_state_in_an_ordinary_file(tmp_path, head, width):
    model, optimizer = trained(lambda: Net(width=3))
    path = saved(tmp_path / "f.pth", given_by(model, optimizer))
    new = Net(head=head, width=width)
    if (head, width) == ("head", 3):
        return
    fresh = torch.optim.AdamW(new.parameters(), lr=0.9)
    options = {
        "allow_missing": [f"{head}.*"], "allow_unexpected": ["head.*"],
        "allow_mismatched": ["head.*"],
    }  # fmt: skip
    error = refused(path, new, fresh, WORDS, **options)
    assert "optimizer_order='position'" in error.hint
    report = ckptool.load_into(new, path, optimizer=fresh, **options, **PARTLY).optimizer
    assert (report.by, report.matched) == ("position", 9)
    assert report.notes == (
        f"2 parameters without state: {head}.weight, {head}.bias",
        "left out the state of 2 parameters: head.weight, head.bias",
    )
    mine, theirs = by_name(new, fresh), by_name(model, optimizer)
    kept = [name for name in mine if not name.startswith(head)]
    assert len(kept) == 9
    assert_alike({name: mine[name] for name in kept}, {name: theirs[name] for name in kept})
    assert fresh.param_groups[0]["lr"] == 0.05
    step(new, fresh)


def test_layers_that_are_frozen_now_drop_their_state():
    model, optimizer = trained()
    new = Net()
    fresh = torch.optim.AdamW(new.blocks.parameters())
    error = refused(given_by(model, optimizer), new, fresh, WORDS)
    assert "optimizer_partial=True" in error.hint
    report = ckptool.load_into(new, given_by(model, optimizer), optimizer=fresh, **PARTLY).optimizer
    assert report.notes == ("left out the state of 2 parameters: embed.weight, head.bias",)
    wanted = {n: s for n, s in by_name(model, optimizer).items() if n.startswith("blocks")}
    assert_alike({n: s for n, s in by_name(new, fresh).items() if s}, wanted)


def test_partial_changes_nothing_where_both_have_the_same_parameters():
    model, optimizer = trained(groups=by_decay)
    new = Net()
    fresh = torch.optim.AdamW(by_decay(new))
    report = ckptool.load_into(new, given_by(model, optimizer), optimizer=fresh, **PARTLY)
    assert report.optimizer.notes == ()
    assert_alike(by_name(new, fresh), by_name(model, optimizer))
