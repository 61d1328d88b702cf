"""Real architectures are filled from what their own trainers saved."""

import json
import re
from functools import cache

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import MatchError
from fixtures.make.resnet import ResNet
from tests.loading.bits import Untouched, untouched_by

TOKENS = torch.tensor([[2, 5, 7, 11, 13, 3]])
IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


@pytest.fixture(scope="module")
def trainers(fixtures):
    """The folder of what the trainers saved."""
    return fixtures / "trainers"


@cache
def transformers():
    import transformers

    return transformers


@pytest.fixture
def answers(trainers):
    """What each trained model answers."""
    return json.loads((trainers / "answers.json").read_text())


def language_model(trainers, name, head="MaskedLM", device="cpu", **changes):
    """A fresh one of the architecture that was trained, perhaps with another head."""
    config = transformers().AutoConfig.from_pretrained(trainers / name)
    for option, value in changes.items():
        setattr(config, option, value)
    kind = getattr(transformers(), {"bert": "Bert", "llama": "Llama"}[name] + head)
    torch.manual_seed(4)
    with torch.device(device):
        return kind(config).eval()


HEADS = {"bert": "ForMaskedLM", "llama": "ForCausalLM"}
LANGUAGE = pytest.mark.parametrize("name", HEADS)


def logits(model):
    with torch.no_grad():
        found = model(TOKENS)
    return found.logits.flatten(0, -2)


def same(found, wanted):
    """The answer to as many digits as are noted."""
    return torch.allclose(found, torch.tensor(wanted), atol=2e-5)


WRAPS = {"plain": lambda m: m, "DP": nn.DataParallel, "compile": torch.compile}


@LANGUAGE
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_language_model_answers_as_it_did(trainers, answers, name, wrap):
    model = language_model(trainers, name, HEADS[name])
    report = ckptool.load_into(WRAPS[wrap](model), trainers / name / "model.safetensors")
    assert report.coverage == 1.0
    assert report.fits
    assert report.model == type(model).__name__
    assert same(logits(model), answers[name])


@LANGUAGE
def test_a_language_model_on_the_meta_device_is_filled(trainers, answers, name):
    model = language_model(trainers, name, HEADS[name], "meta")
    with pytest.warns(ckptool.CheckpointWarning, match="inv_freq|position_ids"):
        report = ckptool.load_into(model, trainers / name / "model.safetensors")
    assert report.coverage == 1.0
    fresh = language_model(trainers, name, HEADS[name])
    for path, buffer in fresh.named_buffers():  # no file has those: the model makes them itself
        owner, _, leaf = path.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = buffer
    assert same(logits(model), answers[name])


def test_the_tied_decoder_is_told_and_stays_tied(trainers):
    model = language_model(trainers, "bert", "ForMaskedLM")
    report = ckptool.load_into(model, trainers / "bert" / "model.safetensors")
    assert any(
        {"cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"} <= set(names)
        for names in report.tied
    )
    decoder = model.cls.predictions.decoder
    assert decoder.weight is model.bert.embeddings.word_embeddings.weight


def test_untied_in_the_model_is_missing_in_the_file(trainers):
    model = language_model(trainers, "bert", "ForMaskedLM", tie_word_embeddings=False)
    with untouched_by(MatchError, model, match=r"decoder\.weight"):
        ckptool.load_into(model, trainers / "bert" / "model.safetensors")


def test_the_body_alone_takes_its_part(trainers):
    wanted = language_model(trainers, "bert", "ForMaskedLM")
    ckptool.load_into(wanted, trainers / "bert" / "model.safetensors")
    body = language_model(trainers, "bert", "Model")
    with untouched_by(MatchError, body, match="pooler"):
        ckptool.load_into(body, trainers / "bert" / "model.safetensors")
    report = ckptool.load_into(
        body,
        trainers / "bert" / "model.safetensors",
        allow_missing="pooler.*",
        allow_unexpected="cls.*",
    )
    assert [one.text for one in report.renamed if one.kind == "prefix"]
    assert torch.equal(body.encoder.layer[1].output.dense.weight,
                       wanted.bert.encoder.layer[1].output.dense.weight)  # fmt: skip
    assert 0.8 < report.coverage < 1


def test_another_head_is_missing_and_may_be(trainers):
    model = language_model(trainers, "bert", "ForSequenceClassification")
    before = model.classifier.weight.clone()
    with pytest.raises(MatchError, match="classifier"):
        ckptool.load_into(model, trainers / "bert" / "model.safetensors")
    report = ckptool.load_into(
        model,
        trainers / "bert" / "model.safetensors",
        allow_missing=["classifier.*", "bert.pooler.*"],
        allow_unexpected=["cls.*"],
        min_coverage=0.8,
    )
    assert {name.split(".")[0] for name in report.missing_keys} == {"bert", "classifier"}
    assert torch.equal(model.classifier.weight, before)


def test_a_body_goes_into_a_model_that_has_it_inside(trainers, tmp_path):
    wanted = language_model(trainers, "bert", "ForMaskedLM")
    torch.save(wanted.bert.state_dict(), tmp_path / "body.pth")
    model = language_model(trainers, "llama", "ForCausalLM")
    with untouched_by(MatchError, model):
        ckptool.load_into(model, tmp_path / "body.pth", strict=False)
    again = language_model(trainers, "bert", "ForMaskedLM")
    report = ckptool.load_into(again, tmp_path / "body.pth", allow_missing=["cls.*"])
    assert torch.equal(
        again.bert.embeddings.LayerNorm.weight, wanted.bert.embeddings.LayerNorm.weight
    )
    assert report.coverage < 1


def test_a_vocabulary_of_another_size_is_named_with_both_shapes(trainers):
    model = language_model(trainers, "llama", "ForCausalLM", vocab_size=30)
    with untouched_by(MatchError, model, match="24") as caught:
        ckptool.load_into(model, trainers / "llama" / "model.safetensors")
    assert {(one.name, one.shape, one.wanted) for one in caught.value.report.mismatched} == {
        ("model.embed_tokens.weight", (24, 8), (30, 8)),
        ("lm_head.weight", (24, 8), (30, 8)),
    }
    assert "model.layers.{0..1}" not in str(caught.value)


OLD_SPELLINGS = {
    "gamma and beta": lambda name: re.sub(
        "LayerNorm.bias$", "LayerNorm.beta", re.sub("LayerNorm.weight$", "LayerNorm.gamma", name)
    ),
    "layers under another word": lambda name: name.replace("encoder.layer.", "encoder.blocks."),
    "a prefix for all": lambda name: f"backbone.{name}",
    "a prefix for the body": lambda name: re.sub("^bert\\.", "transformer.bert.", name),
}


def followed(model, source, **options):
    """Load, with the rules that refusals propose."""
    rules = []
    for _ in range(3):
        try:
            return ckptool.load_into(model, source, rename=rules, **options)
        except MatchError as error:
            rules += [one.rule for one in error.report.proposed]
    return ckptool.load_into(model, source, rename=rules, **options)


@pytest.mark.parametrize("wrapper", ["", "module."])
@pytest.mark.parametrize("spelling", OLD_SPELLINGS)
def test_other_spellings_of_the_same_names(trainers, answers, spelling, wrapper):
    rename = OLD_SPELLINGS[spelling]
    state = ckptool.load_state_dict(trainers / "bert" / "model.safetensors")
    given = {wrapper + rename(name): tensor for name, tensor in state.items()}
    model = language_model(trainers, "bert", "ForMaskedLM")
    report = followed(model, given)
    assert report.coverage == 1.0
    assert report.renamed
    assert same(logits(model), answers["bert"])


@pytest.mark.parametrize("wrapper", ["", "module."])
def test_a_part_that_is_called_otherwise_beside_one_that_is_not_is_asked_about(
    trainers, answers, wrapper
):
    state = ckptool.load_state_dict(trainers / "bert" / "model.safetensors")
    given = {
        wrapper + name.replace("attention.self.", "attn.own."): tensor
        for name, tensor in state.items()
    }
    model = language_model(trainers, "bert", "ForMaskedLM")
    with untouched_by(MatchError, model):
        ckptool.load_into(model, given)
    report = followed(model, given)
    assert report.coverage == 1.0
    assert same(logits(model), answers["bert"])


@LANGUAGE
def test_a_model_in_half_precision_is_a_lossy_cast(trainers, name):
    model = language_model(trainers, name, HEADS[name]).half()
    with untouched_by(MatchError, model, match="float16") as caught:
        ckptool.load_into(model, trainers / name / "model.safetensors")
    assert "allow_lossy_cast" in caught.value.hint
    report = ckptool.load_into(model, trainers / name / "model.safetensors", allow_lossy_cast=True)
    assert report.coverage == 1.0
    assert {one.after for one in report.cast} == {"float16"}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}


@LANGUAGE
def test_double_precision_loses_nothing(trainers, answers, name):
    model = language_model(trainers, name, HEADS[name]).double()
    report = ckptool.load_into(model, trainers / name / "model.safetensors")
    assert report.fits
    assert same(logits(model).float(), answers[name])


def trainer_groups(model):
    """The groups that transformers' Trainer makes: biases and norms do not decay."""
    parameters = dict(model.named_parameters())
    plain = {name for name in parameters if re.search(r"bias|norm", name, re.IGNORECASE)}
    return [
        {"params": [p for name, p in parameters.items() if name not in plain], "weight_decay": 0.1},
        {"params": [p for name, p in parameters.items() if name in plain], "weight_decay": 0.0},
    ]


@LANGUAGE
def test_the_optimizer_of_a_trainer_is_continued(trainers, tmp_path, name):
    saved = torch.load(trainers / name / "optimizer.pt")
    state = ckptool.load_state_dict(trainers / name / "model.safetensors")
    torch.save({"model": state, "optimizer": saved}, tmp_path / "f.pth")
    model = language_model(trainers, name, HEADS[name])
    optimizer = torch.optim.AdamW(trainer_groups(model))
    untouched = Untouched(model, optimizer)
    with pytest.raises(MatchError, match="sorted by key"):  # as safetensors keeps the model
        ckptool.load_into(model, tmp_path / "f.pth", optimizer=optimizer)
    untouched.check()
    report = ckptool.load_into(
        model, tmp_path / "f.pth", optimizer=optimizer, optimizer_order="position"
    )
    assert report.optimizer.matched == report.optimizer.parameters
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(held):
        assert torch.equal(optimizer.state[parameter]["exp_avg"], saved["state"][number]["exp_avg"])
    assert optimizer.param_groups[0]["lr"] == saved["param_groups"][0]["lr"]


FILES = {"lightning": "lightning.ckpt", "ddp": "ddp.pth.tar"}
RESIDUAL = pytest.mark.parametrize("name", FILES)


def residual(device="cpu", **options):
    torch.manual_seed(9)
    with torch.device(device):
        return ResNet(**options).eval()


@RESIDUAL
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_residual_network_answers_as_it_did(trainers, answers, name, wrap, device):
    model = residual(device)
    report = ckptool.load_into(WRAPS[wrap](model), trainers / FILES[name])
    assert report.coverage == 1.0
    assert report.fits
    with torch.no_grad():
        assert same(model(IMAGES), answers[name])


@RESIDUAL
def test_another_number_of_classes(trainers, name):
    model = residual(classes=7)
    untouched = Untouched(model)
    with pytest.raises(MatchError, match=r"fc\.") as caught:
        ckptool.load_into(model, trainers / FILES[name])
    untouched.check()
    assert "allow_mismatched" in caught.value.hint
    with pytest.raises(MatchError):
        ckptool.load_into(model, trainers / FILES[name], strict=False)
    untouched.check()
    head = model.fc.weight.clone()
    report = ckptool.load_into(model, trainers / FILES[name], allow_mismatched="fc.*")
    assert [one.name for one in report.mismatched] == ["fc.weight", "fc.bias"]
    assert torch.equal(model.fc.weight, head)
    assert not torch.equal(model.conv1.weight, residual().conv1.weight)


@RESIDUAL
def test_a_deeper_network_misses_its_blocks(trainers, name):
    model = residual(blocks=(3, 1))
    with untouched_by(MatchError, model, match=r"layer1\.2\."):
        ckptool.load_into(model, trainers / FILES[name])


class Detector(nn.Module):
    """What torchvision's users build: the network under a name, its head replaced."""

    def __init__(self):
        super().__init__()
        self.backbone = residual()
        self.backbone.fc = nn.Identity()
        self.boxes = nn.Linear(4, 4)


@RESIDUAL
def test_a_backbone_takes_what_is_its_own(trainers, name):
    wanted = residual()
    ckptool.load_into(wanted, trainers / FILES[name])
    model = Detector()
    prefixes = ["model=backbone"] if name == "lightning" else []
    report = followed(
        model,
        trainers / FILES[name],
        allow_missing="boxes.*",
        allow_unexpected="*fc.*",
        prefixes=prefixes,
    )
    assert set(report.missing_keys) == {"boxes.weight", "boxes.bias"}
    for path, tensor in model.backbone.state_dict().items():
        assert torch.equal(tensor, wanted.state_dict()[path]), path


@RESIDUAL
def test_a_head_of_another_name_is_found_by_its_shape(trainers, answers, name):
    model = residual()
    model.classifier, model.fc = model.fc, nn.Identity()
    report = followed(model, trainers / FILES[name])
    assert report.coverage == 1.0
    assert any("classifier" in one.text for one in report.renamed)
    with torch.no_grad():
        assert same(model.classifier(model(IMAGES)), answers[name])


@RESIDUAL
@pytest.mark.parametrize("word", ["counters", "stages"])
def test_names_of_other_times_and_houses(trainers, answers, name, word):
    state = ckptool.load_state_dict(trainers / FILES[name])
    given = {
        "counters": {key: value for key, value in state.items() if "num_batches" not in key},
        "stages": {re.sub(r"\blayer(\d)\.", r"stage\1.", key): v for key, v in state.items()},
    }[word]
    model = residual()
    report = followed(model, given)
    assert report.coverage == 1.0
    assert bool(report.kept) == (word == "counters")
    with torch.no_grad():
        assert same(model(IMAGES), answers[name])


@RESIDUAL
def test_norms_of_one_shape_are_not_told_apart_by_a_digit(trainers, answers, name):
    state = ckptool.load_state_dict(trainers / FILES[name])
    given = {re.sub(r"\bbn(\d)", r"norm\1", key): value for key, value in state.items()}
    model = residual()
    with untouched_by(MatchError, model, match="norm"):
        ckptool.load_into(model, given)
    report = ckptool.load_into(model, given, rename=[r"\bnorm(\d)=>bn\1"])
    assert report.fits
    with torch.no_grad():
        assert same(model(IMAGES), answers[name])


@RESIDUAL
def test_the_momentum_of_a_residual_network_is_continued(trainers, name):
    saved = torch.load(trainers / FILES[name], weights_only=False)
    saved = saved["optimizer"] if name == "ddp" else saved["optimizer_states"][0]
    model = residual()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    report = ckptool.load_into(model, trainers / FILES[name], optimizer=optimizer)
    assert report.optimizer.by == "position"
    for number, parameter in enumerate(model.parameters()):
        wanted = saved["state"][number]["momentum_buffer"]
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], wanted)
    assert optimizer.param_groups[0]["lr"] == saved["param_groups"][0]["lr"]
