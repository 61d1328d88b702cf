import io
import json
import zipfile

import pytest
import torch
from torch import nn

import ckptool
from ckptool.cli import main
from ckptool.errors import CorruptFile, LimitExceeded, NotRepresentable
from ckptool.formats.base import Probe
from ckptool.formats.torch_zip import TORCH_ZIP
from ckptool.formats.torchscript import TORCHSCRIPT
from ckptool.limits import DEFAULT_LIMITS, Limits
from tests.formats.contract import FormatContract
from tests.formats.zips import assert_as_told, build, changed, read, records_of, save, written


class TestContract(FormatContract):
    name = "torchscript"
    sample = "torchscript/scripted.pt"
    is_covered = True


FILES = [
    "torch-1.0.1/traced.pt", "torch-1.2.0/traced.pt", "torch-1.6.0/scripted.pt",
    "torch-1.8.1/scripted.pt", "torch-1.12.1/scripted.pt", "torch-2.0.1/scripted.pt",
    "torch-2.6.0/scripted.pt", "torch-2.13.0/scripted.pt",
]  # fmt: skip


def scripted(tmp_path, module, **options):
    path = tmp_path / "scripted.pt"
    torch.jit.save(torch.jit.script(module), path, **options)
    return path


@pytest.mark.parametrize("name", FILES)
def test_archives_of_every_torch_read_as_torch_reads_them(fixtures, name):
    path = fixtures / name
    oracle = json.loads(path.with_name(f"{path.name}.oracle.json").read_text())
    with read(TORCHSCRIPT, path) as checkpoint:
        assert_as_told(checkpoint, oracle)
        assert [list(p) for p, _ in checkpoint.tensors()] == [t["path"] for t in oracle["tensors"]]
        assert checkpoint.details.dead_bytes == 0
        assert checkpoint.details.writer.startswith("torch.jit of torch ")


@pytest.mark.parametrize("version", ["1.4.0", "1.5.0"])
def test_where_old_torch_wrote_no_buffer_names_every_tensor_is_listed(fixtures, version):
    path = fixtures / f"torch-{version}" / "scripted.pt"
    oracle = json.loads(path.with_name("scripted.pt.oracle.json").read_text())
    with read(TORCHSCRIPT, path) as checkpoint:
        assert_as_told(checkpoint, oracle)
        names = list(checkpoint.root)
    assert {f"bn1.{name}" for name in ("running_mean", "running_var", "weight")} < set(names)


def test_a_saved_file_is_not_taken_for_torchscript(fixtures):
    assert not TORCHSCRIPT.recognize(Probe(fixtures / "torch-2.13.0/odd.pth", DEFAULT_LIMITS))
    assert not TORCHSCRIPT.recognize(Probe(fixtures / "torch-1.4.0/odd.pth", DEFAULT_LIMITS))


class Inner(nn.Module):
    def __init__(self, value: float):
        super().__init__()
        self.register_buffer("seen", torch.full((2,), value))
        self.linear = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.tensor(value), requires_grad=False)

    def forward(self, x):
        return self.linear(x) * self.scale + self.seen


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Inner(1.0), nn.ReLU(), Inner(2.0))
        self.same = self.blocks[0]
        self.bias = nn.Parameter(torch.arange(4.0).reshape(2, 2).t())
        self.loose = torch.ones(3)
        self.nothing = nn.Linear(2, 2, bias=False)
        self.register_buffer("passing", torch.zeros(1), persistent=False)
        self.list = nn.ParameterList([nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))])
        self.classes = ["a", 'b"c']

    def forward(self, x):
        x = self.blocks(x) + self.bias + self.loose.sum() + self.passing
        for extra in self.list:
            x = x + extra
        return self.nothing(self.same(x))


def test_nested_shared_and_loose_tensors_are_named_as_torch_names_them(tmp_path):
    path = scripted(tmp_path, Outer(), _extra_files={"notes.txt": "hello"})
    judge = torch.jit.load(path)
    with read(TORCHSCRIPT, path) as checkpoint:
        found = checkpoint.root
        assert list(found) == list(judge.state_dict())
        assert list(checkpoint.root.metadata) == list(judge.state_dict()._metadata)
        for name, tensor in judge.state_dict().items():
            assert found[name].read() == tensor.contiguous().numpy().tobytes()
            assert found[name].stride == tensor.stride()
        grads = {name: p.requires_grad for name, p in judge.named_parameters()}
        assert grads == {name: found[name].requires_grad for name in grads}
        notes = " ".join(checkpoint.details.left_behind)
    assert found["same.scale"].storage is found["blocks.0.scale"].storage
    assert "1 tensors that are neither parameters nor buffers" in notes
    assert "1 other record of the archive: 'extra/notes.txt'" in notes
    assert "code records" in notes


def test_names_that_are_no_identifiers_are_read(tmp_path):
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.BatchNorm1d(3)))
    path = scripted(tmp_path, model)
    with read(TORCHSCRIPT, path) as checkpoint:
        assert list(checkpoint.root) == list(torch.jit.load(path).state_dict())


@pytest.mark.parametrize("version", ["1.6.0", "1.12.1", "2.13.0"])
def test_metadata_is_that_of_the_scripted_module(fixtures, version):
    path = fixtures / f"torch-{version}" / "scripted.pt"
    theirs = torch.jit.load(path).state_dict()._metadata
    with read(TORCHSCRIPT, path) as checkpoint:
        assert checkpoint.root.metadata == theirs
        assert list(checkpoint.root.metadata) == list(theirs)


def test_the_weights_alone_can_be_saved(tmp_path, fixtures):
    path = fixtures / "torch-2.13.0" / "scripted.pt"
    with read(TORCHSCRIPT, path) as checkpoint:
        data = written(TORCH_ZIP.plan(checkpoint))
    found = torch.load(io.BytesIO(data), weights_only=True)
    for name, tensor in torch.jit.load(path).state_dict().items():
        assert torch.equal(found[name], tensor)


def test_an_archive_without_source_lists_every_tensor(tmp_path):
    path = scripted(tmp_path, Outer())

    def drop_code(records):
        return {name: data for name, data in records.items() if not name.startswith("code/")}

    with read(TORCHSCRIPT, changed(path, drop_code, tmp_path)) as checkpoint:
        assert set(torch.jit.load(path).state_dict()) < set(checkpoint.root)
        assert "loose" in checkpoint.root


def test_an_unzipped_archive_is_read(tmp_path, fixtures):
    for name in ("torch-1.0.1/traced.pt", "torch-2.13.0/scripted.pt"):
        path = fixtures / name
        with zipfile.ZipFile(path) as source:
            source.extractall(tmp_path / name)
        oracle = json.loads(path.with_name(f"{path.name}.oracle.json").read_text())
        assert_as_told(read(TORCHSCRIPT, tmp_path / name), oracle)


def test_source_is_never_run(tmp_path):
    path = scripted(tmp_path, nn.Linear(2, 2))
    witness = tmp_path / "witness"

    def edit(records):
        for name in records:
            if name.endswith(".py"):
                records[name] += f"\nopen({str(witness)!r}, 'w')\n".encode()

    read(TORCHSCRIPT, changed(path, edit, tmp_path))
    assert not witness.exists()


@pytest.mark.parametrize(
    "source", [b"", b"class", b"class (", b'class :\n  __parameters__ = ["', b"\x00" * 100]
)
def test_source_that_is_none_gives_every_tensor(tmp_path, source):
    path = scripted(tmp_path, nn.Linear(2, 2))

    def edit(records):
        return {n: source if n.endswith(".py") else data for n, data in records.items()}

    assert set(read(TORCHSCRIPT, changed(path, edit, tmp_path)).root) == {"weight", "bias"}


def test_more_source_than_allowed_is_refused(tmp_path):
    path = scripted(tmp_path, Outer())
    with pytest.raises(LimitExceeded, match="more than the limit of"):
        read(TORCHSCRIPT, path, Limits(max_code_bytes=500))


class Module:
    """Pickled as TorchScript pickles a module: a class that exists nowhere, and a state."""

    def __init__(self, **state):
        self.state = state


def module_pickle(root):
    """Opcodes for a tree of `Module`, written by hand: the class cannot be imported."""

    def text(value):
        data = value.encode()
        return b"X" + len(data).to_bytes(4, "little") + data

    memo = {}

    def node(value):
        if isinstance(value, str):
            return text(value)
        if id(value) in memo:
            return b"j" + memo[id(value)].to_bytes(4, "little")
        state = b"".join(text(name) + node(child) for name, child in value.state.items())
        memo[id(value)] = len(memo)
        put = b"r" + memo[id(value)].to_bytes(4, "little")
        return b"c__torch__\nM\n)\x81}(" + state + b"ub" + put

    return b"\x80\x02" + node(root) + b"."


def test_a_tree_that_mentions_modules_without_end_is_refused(tmp_path):
    node = Module()
    for _ in range(40):
        node = Module(a=node, b=node)
    records = [("a/data.pkl", module_pickle(node)), ("a/constants.pkl", b"\x80\x02).")]
    path = save(tmp_path, build(records))
    with pytest.raises(
        LimitExceeded, match="the same containers occur repeatedly, with more than 1,000 entries in"
    ):
        read(TORCHSCRIPT, path, Limits(max_repeats=1000))


def test_a_tree_deeper_than_allowed_is_refused(tmp_path):
    node = Module()
    for _ in range(300):
        node = Module(a=node)
    records = [("a/data.pkl", module_pickle(node)), ("a/constants.pkl", b"\x80\x02).")]
    with pytest.raises(LimitExceeded, match="nested deeper than 250") as caught:
        read(TORCHSCRIPT, save(tmp_path, build(records)))
    assert "ckptool.Limits(...)" in caught.value.hint


def test_a_pickle_without_module_is_refused(tmp_path):
    path = save(tmp_path, build([("a/data.pkl", b"\x80\x02]."), ("a/constants.pkl", b"N.")]))
    with pytest.raises(CorruptFile, match="no TorchScript module"):
        read(TORCHSCRIPT, path)


def model_json(fixtures, tmp_path, edit):
    """The archive of torch 1.0.1 with its JSON put through `edit`."""
    path = fixtures / "torch-1.0.1" / "traced.pt"
    records = records_of(path.read_bytes())
    document = json.loads(records["model.json"])
    records["model.json"] = json.dumps(edit(document) or document).encode()
    return save(tmp_path, build([(f"a/{name}", data) for name, data in records.items()]))


def set_tensor(**fields):
    def edit(document):
        document["tensors"][0].update(fields)

    return edit


def test_model_json_that_breaks_the_form_is_refused(fixtures, tmp_path):
    for edit, said in [
        (
            lambda document: document.update(mainModule=None),
            "does not follow the format of TorchScript",
        ),
        (lambda document: document.update(tensors={}), "does not follow the format of TorchScript"),
        (lambda document: document.update(tensors=[]), "does not follow the format of TorchScript"),
        (
            lambda document: document["mainModule"].update(submodules=[{}]),
            r"record 'model\.json' does not follow the format of TorchScript:",
        ),
        (set_tensor(dataType="STRING"), "KeyError, 'STRING'"),
        (set_tensor(data={"key": "tensors/99"}), "KeyError, 'tensors/99'"),
        (set_tensor(dims=["-1"]), "-1 is not a count"),
        (set_tensor(dims=["9" * 30]), "does not follow the format of TorchScript: TypeError"),
        (set_tensor(dims=["1"] * 65), "not a shape"),
        (set_tensor(offset=1.5), "does not follow the format of TorchScript: TypeError"),
        (set_tensor(device=3), "a device is not text"),
        (set_tensor(dims=["1000000"], strides=["1"]), "outside its storage"),
    ]:
        with pytest.raises(CorruptFile, match=said):
            read(TORCHSCRIPT, model_json(fixtures, tmp_path, edit))


def test_attributes_of_model_json_that_break_the_form_are_refused(fixtures, tmp_path):
    records = records_of((fixtures / "torch-1.2.0" / "traced.pt").read_bytes())
    for edit, error in [
        (lambda attributes: attributes[0].update(id="7"), "IndexError"),
        (lambda attributes: attributes[0].update(name=None), "TypeError"),
        (lambda attributes: attributes.append(3), "AttributeError"),
    ]:
        document = json.loads(records["model.json"])
        edit(document["mainModule"]["submodules"][1]["attributes"])
        broken = {**records, "model.json": json.dumps(document).encode()}
        path = save(tmp_path, build([(f"a/{name}", data) for name, data in broken.items()]))
        with pytest.raises(
            CorruptFile, match=f"does not follow the format of TorchScript: {error}"
        ):
            read(TORCHSCRIPT, path)


def test_model_json_deeper_than_allowed_is_refused(fixtures, tmp_path):
    def edit(document):
        module = document["mainModule"]
        for _ in range(300):
            module = {"name": "a", "submodules": [module]}
        document["mainModule"] = module

    with pytest.raises(LimitExceeded, match="nested deeper"):
        read(TORCHSCRIPT, model_json(fixtures, tmp_path, edit))


def test_the_version_of_an_old_writer_is_told(fixtures):
    with read(TORCHSCRIPT, fixtures / "torch-1.0.1" / "traced.pt") as checkpoint:
        assert checkpoint.details.writer == "torch.jit of torch 1.0"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lite", [False, True])
@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.Conv2d(3, 4, 2)], ids=["linear", "conv"])
def test_packed_weights_are_not_written_without_their_program(layer, lite, tmp_path):
    net = nn.Sequential(torch.ao.quantization.QuantStub(), layer).eval()
    if isinstance(layer, nn.Linear):
        net = torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)
    else:
        net.qconfig = torch.ao.quantization.default_qconfig
        prepared = torch.ao.quantization.prepare(net)
        prepared(torch.ones(1, 3, 4, 4))
        net = torch.ao.quantization.convert(prepared)
    program, path, out = torch.jit.script(net), tmp_path / "a.ptl", tmp_path / "out.pth"
    program._save_for_lite_interpreter(str(path)) if lite else program.save(path)
    for words in ("remap --to cpu", "strip-module", "add-module", "convert", "compact"):
        with pytest.raises(NotRepresentable, match="packed for quantized layers"):
            ckptool.open(path).save(out)
        assert main([*words.split(), str(path), "-o", str(out)]) == 2
        assert not out.exists()
    if isinstance(layer, nn.Linear):  # which are plain weights after it
        assert main(["convert", str(path), str(out), "--dequantize", "float32"]) == 0
        made = torch.load(out)
        assert torch.equal(made["1.weight"], net[1].weight().dequantize())
