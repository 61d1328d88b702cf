"""What the file has of the model in another form."""

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import MatchError
from ckptool.matching import Allowance, Slot, matched

WRAPPED = ("weight", "bias")


def advised(have, want):
    match = matched(have, want)
    judgement = Allowance().judged(match.report, match.again)
    assert judgement.remedy.arguments == ()
    assert all("allow" not in str(way) for way in (judgement.remedy, *judgement.remedy.instead))
    return match.report.reformed, str(judgement.remedy)


def generator(norm=None):
    model = nn.ModuleDict({
        "pre": nn.Conv1d(8, 16, 3),
        "ups": nn.ModuleList(nn.ConvTranspose1d(16, 16, 4) for _ in range(4)),
    })  # fmt: skip
    for module in (model["pre"], *model["ups"]) if norm else ():
        norm(module)
    return model


OLD, NEW = nn.utils, nn.utils.parametrizations


def refusal(model, state):
    with pytest.raises(MatchError) as caught:
        ckptool.load_into(model, state)
    assert caught.value.remedy.arguments == ()
    return caught.value


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("wrap", ["", "module."])
@pytest.mark.parametrize("norm", [OLD.weight_norm, NEW.weight_norm])
def test_a_file_with_weight_norm_is_loaded_with_weight_norm_which_is_removed_then(norm, wrap):
    file, model = generator(norm), generator()
    state = {f"{wrap}{name}": value for name, value in file.state_dict().items()}
    error = refusal(model, state)
    assert (
        str(error)
        .splitlines()[-1]
        .endswith("; the file has weight_norm on pre, ups.{0..3}, and the model has not")
    )
    assert error.hint == (
        "torch.nn.utils.parametrizations.weight_norm(module) on pre, ups.{0..3} of the model, "
        "load, then torch.nn.utils.parametrize.remove_parametrizations(module, 'weight'): "
        "no rule does what weight_norm does"
    )
    modules = (model["pre"], *model["ups"])
    for module in modules:
        torch.nn.utils.parametrizations.weight_norm(module)
    assert ckptool.load_into(model, state).coverage == 1.0
    for module in modules:
        torch.nn.utils.parametrize.remove_parametrizations(module, "weight")
    given = torch.ones(1, 16, 5)
    torch.testing.assert_close(model["ups"][3](given), file["ups"][3](given))


PARAMETRIZED = "torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')"


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("norm", "text", "remove"),
    [
        (OLD.weight_norm, "torch.nn.utils.remove_weight_norm(module)", OLD.remove_weight_norm),
        (NEW.weight_norm, PARAMETRIZED, None),
        (NEW.spectral_norm, PARAMETRIZED, None),
    ],
)
def test_a_model_with_a_norm_of_weights_is_loaded_without(norm, text, remove):
    file, model, kind = generator(), generator(norm), norm.__name__
    error = refusal(model, file.state_dict())
    assert error.report.reformed[0][0] == (
        f"the model has {kind} on pre, ups.{{0..3}}, and the file has not"
    )
    assert error.hint == f"{text} on pre, ups.{{0..3}} of the model, load, then put {kind} on again"
    for module in (model["pre"], *model["ups"]):
        if remove is not None:
            remove(module)
        else:
            torch.nn.utils.parametrize.remove_parametrizations(module, "weight")
    assert ckptool.load_into(model, file.state_dict()).fits


class Scale(nn.Module):
    """Two tensors, as those of weight norm, of which something else is made."""

    def forward(self, scale, weight):
        return scale * weight

    def right_inverse(self, weight):
        return torch.ones(weight.shape[0], 1), weight


class Flip(nn.Module):
    """The names of spectral norm."""

    def __init__(self):
        super().__init__()
        self.register_buffer("_u", torch.ones(3))
        self.register_buffer("_v", torch.ones(4))

    def forward(self, weight):
        return -weight


class WeightNorm(torch.nn.utils.parametrizations._WeightNorm):
    """Torch's, of a class of its own."""


def parametrized(*made, front="body"):
    """Layers with such parametrizations, the last on top of the others."""
    layer = nn.Linear(4, 3)
    for one in made:
        torch.nn.utils.parametrize.register_parametrization(layer, "weight", one)
    return nn.ModuleDict({front: nn.Sequential(layer, nn.Linear(3, 2)), "head": nn.Linear(2, 5)})


def hooked(norm, front="body"):
    model = parametrized(front=front)
    norm(model[front][0])
    return model


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("front", ["body", "bod"])
@pytest.mark.parametrize("wrap", ["", "module.", "model."])
@pytest.mark.parametrize(
    ("norm", "made", "mine"),
    [
        (OLD.weight_norm, [Scale()], "Scale"),
        (OLD.weight_norm, [WeightNorm(), nn.Tanh()], "WeightNorm and Tanh"),
        (OLD.spectral_norm, [Flip()], "Flip"),
    ],
)
def test_tensors_of_a_norm_are_none_of_a_parametrization_of_the_same_names(
    norm, made, mine, wrap, front
):
    model = parametrized(*made)
    state = {f"{wrap}{name}": one for name, one in hooked(norm, front).state_dict().items()}
    before = {name: one.clone() for name, one in model.state_dict().items()}
    error = refusal(model, state)
    told = f"the file has {norm.__name__} on body.0, and the model has {mine}"
    assert [text for text, _ in error.report.reformed] == [told]
    assert told in str(error)
    assert not ckptool.match(state, model)[1].fits
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_what_is_called_as_the_parametrization_itself_is_its_own():
    file, model = parametrized(Scale()), parametrized(Scale())
    assert ckptool.load_into(model, file.state_dict()).fits


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_rule_gives_the_tensors_of_weight_norm_to_another_parametrization():
    new = r"parametrizations.weight.original"
    rules = [rf"\.weight_g$=>.{new}0", rf"\.weight_v$=>.{new}1"]
    file = hooked(OLD.weight_norm)
    assert ckptool.load_into(parametrized(Scale()), file.state_dict(), rules=rules).fits


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_class_made_of_weight_norm_takes_its_tensors():
    file, model = hooked(OLD.weight_norm), parametrized(WeightNorm())
    assert ckptool.load_into(model, file.state_dict()).fits
    torch.testing.assert_close(model["body"][0].weight, file["body"][0].weight)


def test_a_parametrization_of_the_model_is_told_by_its_class():
    error = refusal(parametrized(Scale()), parametrized().state_dict())
    assert error.report.reformed[0][0] == "the model has Scale on body.0, and the file has not"


def test_the_old_spectral_norm_which_leaves_a_hook_behind_is_put_on_later():
    error = refusal(generator(OLD.spectral_norm), generator().state_dict())
    assert error.hint == (
        "load before torch.nn.utils.spectral_norm is put on pre, ups.{0..3} of the model"
    )


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("theirs", [OLD.spectral_norm, NEW.spectral_norm])
@pytest.mark.parametrize("mine", [OLD.weight_norm, NEW.weight_norm])
def test_of_two_norms_both_are_told(mine, theirs):
    file, model = generator(mine), generator(theirs)
    (told,) = refusal(model, file.state_dict()).report.reformed
    assert told[0].startswith("the file has weight_norm on")
    assert told[0].endswith(", and the model has spectral_norm")
    assert told[1].startswith("load into a model that has weight_norm on")


def test_another_tensor_than_weight_is_named_and_a_parametrization_of_ones_own_is_told():
    plain = {"a.kernel": Slot((4, 4)), "b.w": Slot((3,))}
    normed = {
        "a.parametrizations.kernel.original0": Slot((4, 1)),
        "a.parametrizations.kernel.original1": Slot((4, 4)),
        "b.w": Slot((3,)),
    }
    assert "weight_norm(module, 'kernel') on a of" in advised(normed, plain)[1]
    own = {"a.parametrizations.kernel.original": Slot((4, 4)), "b.w": Slot((3,))}
    (told, *_), *_ = advised(own, plain)
    assert told[0] == "the file has a parametrization on a, and the model has not"


EXPERTS = {
    **{
        f"layers.{n}.moe.experts.{m}.{name}.weight": Slot(shape)
        for n in range(2) for m in range(2)
        for name, shape in {"w1": (32, 16), "w2": (16, 32), "w3": (32, 16)}.items()
    },
    **{f"layers.{n}.moe.gate.weight": Slot((2, 16)) for n in range(2)},
    "norm.weight": Slot((16,)),
}  # fmt: skip
FUSED = {
    **{f"layers.{n}.mlp.experts.up": Slot((2, 64, 16)) for n in range(2)},
    **{f"layers.{n}.mlp.experts.down": Slot((2, 16, 32)) for n in range(2)},
    **{f"layers.{n}.mlp.gate.weight": Slot((2, 16)) for n in range(2)},
    "norm.weight": Slot((16,)),
}


@pytest.mark.parametrize(("have", "want"), [(EXPERTS, FUSED), (FUSED, EXPERTS)])
@pytest.mark.parametrize("front", ["", "module."])
def test_experts_that_are_one_tensor_are_not_allowed_to_stay_at_random(have, want, front):
    have = {f"{front}{name}": slot for name, slot in have.items()}
    ((text, _),), hint = advised(have, want)
    assert text == "the file has all elements that layers.{0..1} lacks, in other tensors"
    assert hint.startswith("no rule makes one tensor of several, or several of one")


def test_shapes_that_are_equal_or_elements_that_are_not_as_many_are_no_other_form():
    body = {f"x.{n}": Slot((9, n + 1)) for n in range(9)}
    q, k = {"a.q.weight": Slot((4, 4))}, {"a.k.weight": Slot((4, 4))}
    assert matched(body | q, body | k).report.reformed == ()
    assert matched(body | {"a.q.weight": Slot((4, 3))}, body | k).report.reformed == ()
    assert matched(body | {"a.q.weight": Slot(None)}, body | k).report.reformed == ()
    assert matched(body | {"a.q.weight": Slot((2, 8))}, body | k).report.reformed != ()
