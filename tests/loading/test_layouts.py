"""Files of Keras, TensorFlow and Flax in torch models; their own outputs are the judge."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckptool
from ckptool.errors import MatchError, UsageError

RULES = {
    "keras.keras": ["^layers/conv2d=>conv", "^layers/batch_normalization=>norm",
                    "^layers/dense/=>square/", "^layers/dense_1/=>head/"],
    "tensorflow": [],
    "images.msgpack": [],
}  # fmt: skip
RULES["keras.weights.h5"] = RULES["keras.keras"]
every_file = pytest.mark.parametrize("file", RULES)


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, (3, 2))
        self.norm = nn.BatchNorm2d(4, eps=1e-3)
        self.square = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, images):
        x = self.norm(self.conv(images.movedim(-1, 1)).relu())
        return self.head(self.square(x.mean((2, 3))).tanh())


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.norm = nn.LayerNorm(4, eps=1e-3)
        self.line = nn.Conv1d(4, 6, 3)
        self.solid = nn.Conv3d(2, 6, (2, 3, 2))

    def forward(self, words, volumes):
        x = self.line(self.norm(self.embed(words)).movedim(-1, 1)).mean(-1)
        return x + self.solid(volumes.movedim(-1, 1)).mean((2, 3, 4))


@pytest.fixture(scope="module")
def folder(fixtures):
    return fixtures / "layouts"


@pytest.fixture(scope="module")
def answers(folder):
    return load_file(folder / "answers.safetensors")


def assert_images(model, file, answers):
    """A model, or one of a state dict, gives what the library gave."""
    if not isinstance(model, nn.Module):
        state, model = model, Images()
        model.load_state_dict(state, strict=False)
    writer = file.partition(".")[0]
    given, wanted = answers[f"{writer}.input"], answers[f"{writer}.output"]
    torch.testing.assert_close(model.eval()(given), wanted)


def assert_words(model, answers):
    given = answers["words.input"], answers["words.volumes"]
    torch.testing.assert_close(model.eval()(*given), answers["words.output"])


@every_file
def test_a_model_gives_what_the_library_gave(folder, answers, file):
    model = Images()
    report = ckptool.load_into(model, folder / file, rename=RULES[file])
    assert_images(model, file, answers)
    assert {one.name: one.axes for one in report.layouts} == {
        "conv.weight": (3, 2, 0, 1),
        "square.weight": (1, 0),
        "head.weight": (1, 0),
    }
    assert report.fits
    assert dict(report.kept).keys() == {"norm.num_batches_tracked"}


@pytest.mark.parametrize("make", [Words, lambda: torch.nn.DataParallel(Words())])
def test_kernels_of_one_and_three_dimensions_and_embeddings(folder, answers, make):
    model = make()
    ckptool.load_into(model, folder / "words.msgpack")
    assert_words(getattr(model, "module", model), answers)


def test_a_model_on_the_meta_device_takes_them_too(folder, answers):
    with torch.device("meta"):
        model = Words()
    ckptool.load_into(model, folder / "words.msgpack")
    assert_words(model, answers)


def test_match_gives_a_state_dict_that_torch_loads(folder, answers):
    state, report = ckptool.match(folder / "images.msgpack", Images())
    assert report.fits
    assert_images(state, "images.msgpack", answers)


@every_file
def test_a_file_converted_like_a_model_loads_in_torch(folder, answers, file, tmp_path):
    model = Images()
    for like, target in ((model, "a.safetensors"), (model, "b.pth")):
        ckptool.convert(
            folder / file, tmp_path / target, ckptool.Rename(RULES[file]), ckptool.Fit(like)
        )
    assert_images(load_file(tmp_path / "a.safetensors"), file, answers)
    assert_images(torch.load(tmp_path / "b.pth"), file, answers)


def test_without_types_the_axes_are_asked_for(folder, answers, tmp_path):
    torch.save(Images().state_dict(), tmp_path / "state.pth")
    source, target, like = folder / "images.msgpack", tmp_path / "a.pth", tmp_path / "state.pth"
    with pytest.raises(MatchError, match="modules of unknown type") as refused:
        ckptool.convert(source, target, ckptool.Fit(like))
    assert "transpose=['conv.weight', 'square.weight', 'head.weight']" in refused.value.hint
    assert not target.exists()
    ckptool.convert(source, target, ckptool.Fit(like, transpose=["*"]))
    assert_images(torch.load(target), "images.msgpack", answers)
    with pytest.raises(MatchError, match=r"head.weight \(file \[4, 5\], model \[5, 4\]\)"):
        ckptool.convert(source, tmp_path / "b.pth", ckptool.Fit(like, no_transpose=["*"]))


def changed(**modules):
    model = Images()
    for name, module in modules.items():
        setattr(model, name, module)
    return model


def refusal(model, path, **options):
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with pytest.raises(MatchError) as refused:
        ckptool.load_into(model, path, **options)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    return refused


class Linear(nn.Module):
    """No Linear of torch, whatever it is called."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4))


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ({"conv": nn.ConvTranspose2d(4, 3, (3, 2))}, "a ConvTranspose2d, which Flax mirrors"),
        ({"conv": nn.Conv2d(6, 4, (3, 2), groups=2)}, "a Conv2d with 2 groups"),
        ({"square": Linear()}, r"a .*test_layouts\.Linear"),
    ],
)
def test_what_types_do_not_decide_is_asked_for(folder, modules, reason):
    refused = refusal(changed(**modules), folder / "images.msgpack", allow_mismatched=True)
    (row,) = refused.value.report.undecided
    name = f"{next(iter(modules))}.weight"
    assert row.name == name
    refused.match(f"{name} .*{reason}")
    assert f"`transpose=['{name}']`" in refused.value.hint
    assert f"`no_transpose=['{name}']`" in refused.value.hint


def test_a_linear_that_may_be_behind_a_flatten_is_asked_for(fixtures):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv2d, self.dense = nn.Conv2d(3, 5, 3), nn.Linear(20, 3)
            self.batch_normalization = nn.BatchNorm2d(5)

    refused = refusal(Net(), fixtures / "keras" / "model.keras")
    assert [one.name for one in refused.value.report.undecided] == ["dense.weight"]
    refused.match("may follow a Flatten")
    ckptool.load_into(Net(), fixtures / "keras" / "model.keras", transpose=["dense.*"])


def test_a_linear_as_wide_as_an_earlier_convolution_may_be_behind_a_flatten(keras_file):
    path = keras_file(kernel=torch.randn(8, 3), bias=torch.randn(3))
    for convolutions, count in (
        ((nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 3)), 1),
        ((nn.Conv2d(3, 8, 3),), 0),
    ):
        model = nn.Module()
        model.before, model.dw = nn.Sequential(*convolutions), nn.Linear(8, 3)
        report = ckptool.match(path, model)[1]
        assert len(report.undecided) == count


def test_axes_may_be_given_and_must_be_axes(folder):
    model = changed(square=Linear())
    ckptool.load_into(model, folder / "images.msgpack", transpose=["square.weight=0,1"])
    kept = model.square.weight.clone()
    ckptool.load_into(model, folder / "images.msgpack", transpose=["square.weight"])
    assert torch.equal(model.square.weight, kept.T)
    assert not torch.equal(kept, kept.T)
    for wrong in ("square.weight=1,2", "square.weight=0,x", "square.weight=0,1,2"):
        with pytest.raises(UsageError, match="axes"):
            ckptool.load_into(model, folder / "images.msgpack", transpose=[wrong])


def test_a_name_that_is_no_kernels_is_asked_for(folder):
    rules = ["square.kernel=>square.weight"]
    model = Images()
    ckptool.load_into(model, folder / "images.msgpack", rename=rules)  # it was called kernel
    rules = ["params.embed.embedding=>head.weight"]
    refused = refusal(model, folder / "words.msgpack", rename=rules)
    assert [one.reason for one in refused.value.report.undecided] == [
        "'embedding' is not the usual name of a kernel"
    ]


def test_another_shape_is_told_in_torchs_order(folder):
    refused = refusal(changed(head=nn.Linear(4, 6)), folder / "images.msgpack")
    refused.match(r"head.weight \(file \[5, 4\], model \[6, 4\]\)")


def test_numbered_variables_are_as_many_as_the_modules(folder):
    model = changed(norm=nn.GroupNorm(2, 4))
    rules = RULES["keras.keras"]
    refused = refusal(model, folder / "keras.keras", rename=rules, allow_unexpected=True)
    assert refused.value.report.missing_keys == ["norm.weight", "norm.bias"]
    (note,) = refused.value.report.notes
    assert note.endswith("has 4 tensors, but norm has 2: rename each with a rule")
    numbered = zip((0, 1), ("weight", "bias"), strict=True)
    rules = [f"^layers/batch_normalization/vars/{at}=>norm.{name}" for at, name in numbered]
    rules = [*RULES["keras.keras"][:1], *rules, *RULES["keras.keras"][2:]]
    ckptool.load_into(model, folder / "keras.keras", rename=rules, allow_unexpected=True)


def test_names_that_would_become_one_stay(folder, tmp_path):
    rules = [r"^params\.norm\.bias=>params.norm.kernel"]  # norm.scale is a weight too
    refused = refusal(Images(), folder / "images.msgpack", rename=rules)
    assert refused.value.report.missing_keys == ["norm.weight", "norm.bias"]


def test_info_says_whose_layout_it_is(folder):
    for file, whose in (("keras.keras", "Keras"), ("images.msgpack", "Flax")):
        assert any(f"the layout of {whose}" in note for note in ckptool.info(folder / file).notes)


def test_tensors_of_other_files_are_transposed_where_the_user_says_so(tmp_path):
    model = nn.Linear(4, 4)
    state = {"weight": torch.arange(16.0).reshape(4, 4), "bias": torch.zeros(4)}
    torch.save(state, tmp_path / "a.pth")
    for source in (state, tmp_path / "a.pth"):
        ckptool.load_into(model, source, transpose=["weight"])
        assert torch.equal(model.weight, state["weight"].T)
        ckptool.load_into(model, source, no_transpose=["weight"])
        assert torch.equal(model.weight, state["weight"])


def test_a_tied_head_takes_the_table_as_it_is(folder):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.embed = nn.Linear(4, 9, bias=False), nn.Embedding(9, 4)
            self.head.weight = self.embed.weight

    model, plain = Tied(), nn.ModuleDict({"embed": nn.Embedding(9, 4)})
    options = {"allow_unexpected": True}
    ckptool.load_into(plain, folder / "words.msgpack", **options)
    ckptool.load_into(model, folder / "words.msgpack", **options)
    assert torch.equal(model.head.weight, plain["embed"].weight)
    rules = ["params.embed.embedding=>head.kernel"]
    refusal(model, folder / "words.msgpack", rename=rules, **options)


@pytest.fixture
def keras_file(tmp_path):
    """A file of one layer, as Keras 2 spells it."""
    h5py = pytest.importorskip("h5py")

    def write(**arrays):
        with h5py.File(tmp_path / "layer.h5", "w") as file:
            for name, array in arrays.items():
                file[f"dw/{name}:0"] = array.numpy()
        return tmp_path / "layer.h5"

    return write


def test_a_depthwise_kernel_takes_the_axes_that_are_given(keras_file):
    kernel, images = torch.randn(3, 2, 5, 1), torch.randn(1, 5, 6, 7)  # height, width, in, 1
    path = keras_file(depthwise_kernel=kernel, bias=torch.randn(5))
    model = nn.ModuleDict({"dw": nn.Conv2d(5, 5, (3, 2), groups=5)})
    rules = ["depthwise_kernel=>kernel"]
    refused = refusal(model, path, rename=rules)
    assert refused.value.report.undecided[0].reason == "in a Conv2d with 5 groups"
    refused = refusal(model, path, rename=rules, transpose=["dw.weight"])
    refused.match(r"dw.weight \(file \[1, 5, 3, 2\], model \[5, 1, 3, 2\]\)")
    ckptool.load_into(model, path, rename=rules, transpose=["dw.*=2,3,0,1"])
    with torch.no_grad():
        out = model["dw"](images)
        for channel in range(5):
            one = images[:, channel : channel + 1], kernel[None, None, :, :, channel, 0]
            alone = nn.functional.conv2d(*one, model["dw"].bias[channel : channel + 1])
            torch.testing.assert_close(out[:, channel], alone[:, 0])


def test_a_square_kernel_is_transposed_though_its_shape_says_nothing(keras_file):
    kernel = torch.arange(9.0).reshape(3, 3)
    path = keras_file(kernel=kernel, bias=torch.zeros(3))
    model = nn.ModuleDict({"dw": nn.Linear(3, 3)})
    ckptool.load_into(model, path)
    assert torch.equal(model["dw"].weight, kernel.T)
    refusal(model, keras_file(output_weights=kernel), rename=["output_weights:0=>weight"],
            allow_missing="*.bias")  # fmt: skip


def test_names_of_keras_3_in_checkpoints_of_tensorflow(keras_file):
    kernel, table = torch.randn(2, 3), torch.randn(5, 4)
    model = nn.ModuleDict({"dw": nn.Linear(2, 3, bias=False)})
    ckptool.load_into(model, keras_file(_kernel=kernel))
    assert torch.equal(model["dw"].weight, kernel.T)
    model = nn.ModuleDict({"dw": nn.Embedding(5, 4)})
    ckptool.load_into(model, keras_file(_embeddings=table))
    assert torch.equal(model["dw"].weight, table)


def test_a_name_that_the_model_has_is_left(folder):
    model = nn.ModuleDict({"norm": nn.Module()})
    for name in ("scale", "bias"):
        model["norm"].register_parameter(name, nn.Parameter(torch.zeros(4)))
    ckptool.load_into(model, folder / "words.msgpack", allow_unexpected=True)
    assert model["norm"].scale.all()


def test_a_file_written_in_that_layout_says_so(folder, tmp_path):
    kept = ckptool.convert(folder / "images.msgpack", tmp_path / "a.safetensors")
    assert "kernels have the layout of Flax" in kept.notes[0]
    turned = ckptool.convert(folder / "images.msgpack", tmp_path / "b.pth", ckptool.Fit(Images()))
    assert turned.notes == ()
