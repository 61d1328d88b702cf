import io
import json
import zipfile

import pytest
import torch
from torch import nn
from torch.export.pt2_archive._package import package_pt2
from torch.export.pt2_archive._package_weights import TensorProperties, Weights

from ckptool.errors import CorruptFile
from ckptool.formats.base import Probe
from ckptool.formats.pt2 import PT2
from ckptool.formats.torch_zip import TORCH_ZIP
from ckptool.limits import DEFAULT_LIMITS
from tests.formats.contract import FormatContract
from tests.formats.zips import assert_as_told, build, changed, read, save, written


class TestContract(FormatContract):
    name = "pt2"
    sample = "torchscript/exported.pt2"
    is_covered = True


pytestmark = pytest.mark.filterwarnings("ignore:No complete tensor found:UserWarning")
CONFIG = "data/weights/model_weights_config.json"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.emb.weight
        self.bn = nn.BatchNorm1d(4)
        self.transposed = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
        self.register_buffer("passing", torch.full((2,), 7.0), persistent=False)
        self.register_buffer("part", torch.ones(3, dtype=torch.bfloat16)[1:])
        self.constant = torch.tensor([1, 2, 3])
        self.empty = nn.Parameter(torch.zeros(0, 4), requires_grad=False)

    def forward(self, x):
        hidden = self.bn(self.emb(x))
        rest = self.passing.sum() + self.part.sum() + self.constant.sum() + self.empty.sum()
        return self.head(hidden) + (self.transposed @ hidden.t()[:3]).sum() + rest


@pytest.fixture(scope="module")
def program():
    torch.manual_seed(0)
    return torch.export.export(Model().eval(), (torch.tensor([1, 2, 3]),))


@pytest.fixture(scope="module")
def exported(program, tmp_path_factory):
    path = tmp_path_factory.mktemp("pt2") / "model.pt2"
    torch.export.save(program, path)
    return path


def with_config(edit):
    def change(records):
        config = json.loads(records[CONFIG])
        records[CONFIG] = json.dumps(edit(config["config"]) or config).encode()

    return change


def with_bias(**changes):
    """Return a change of what the configuration says of `bn.bias`."""
    return with_config(lambda config: config["bn.bias"]["tensor_meta"].update(changes))


def raw(tensor):
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("version", ["2.2.2", "2.6.0"])
def test_archives_of_older_torch_read_as_torch_reads_them(fixtures, version):
    path = fixtures / f"torch-{version}" / "exported.pt2"
    oracle = json.loads(path.with_name("exported.pt2.oracle.json").read_text())
    with read(PT2, path) as checkpoint:
        assert_as_told(checkpoint, oracle)
        assert checkpoint.details.writer == "torch.export of torch 2.1 to 2.7"
        assert checkpoint.details.dead_bytes == 0


def test_the_weights_are_those_of_the_program_in_its_order(exported):
    judge = torch.export.load(exported).state_dict
    with read(PT2, exported) as checkpoint:
        found = checkpoint.root
        assert list(found) == list(judge)
        for name, tensor in judge.items():
            ref = found[name]
            assert ref.read() == raw(tensor)
            assert (ref.shape, ref.stride) == (tuple(tensor.shape), tensor.stride())
            assert ref.dtype == str(tensor.dtype).removeprefix("torch.")
            assert ref.is_parameter is isinstance(tensor, nn.Parameter)
            assert ref.requires_grad is tensor.requires_grad
        assert found["emb.weight"].storage is found["head.weight"].storage
        assert checkpoint.details.torch_version == torch.__version__
        assert any("2 records of constants" in note for note in checkpoint.details.left_behind)
        assert checkpoint.details.dead_bytes == 0


def test_the_weights_can_be_saved_as_a_state_dict(exported):
    with read(PT2, exported) as checkpoint:
        data = written(TORCH_ZIP.plan(checkpoint))
    found = torch.load(io.BytesIO(data), weights_only=True)
    for name, tensor in torch.export.load(exported).state_dict.items():
        assert torch.equal(found[name], tensor)
    assert found["emb.weight"].data_ptr() == found["head.weight"].data_ptr()


def test_every_element_type_of_the_schema_is_torchs():
    from torch._export.serde.schema import ScalarType
    from torch._export.serde.serialize import deserialize_scalar_type

    from ckptool.formats.pt2 import _DTYPE_BY_CODE

    judge = {
        kind.value: str(deserialize_scalar_type(kind)).removeprefix("torch.")
        for kind in ScalarType
        if kind is not ScalarType.UNKNOWN
    }
    assert judge == _DTYPE_BY_CODE


def test_several_models_stand_under_their_names(program, tmp_path):
    path = str(tmp_path / "both.pt2")
    package_pt2(path, exported_programs={"one": program, "two": program})
    with read(PT2, path) as checkpoint:
        assert list(checkpoint.root) == ["one", "two"]
        assert list(checkpoint.root["two"]) == list(program.state_dict)
        assert checkpoint.root["two"]["bn.bias"].read() == raw(program.state_dict["bn.bias"])


def test_a_weight_that_is_a_saved_file_of_its_own_is_read(tmp_path, exported):
    special = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    buffer = io.BytesIO()
    torch.save(special, buffer)

    def edit(records):
        config = json.loads(records[CONFIG])
        config["config"]["bn.bias"].update(path_name="weight_99", use_pickle=True)
        records[CONFIG] = json.dumps(config).encode()
        records["data/weights/weight_99"] = buffer.getvalue()

    with read(PT2, changed(exported, edit, tmp_path)) as checkpoint:
        assert checkpoint.root["bn.bias"].kind == "nested"
        assert checkpoint.root["bn.weight"].kind == "strided"


def test_the_state_as_one_saved_file_is_read(tmp_path, exported, program):
    buffer = io.BytesIO()
    torch.save(program.state_dict, buffer)

    def edit(records):
        records["data/weights/model.pt"] = buffer.getvalue()
        del records[CONFIG]

    with read(PT2, changed(exported, edit, tmp_path)) as checkpoint:
        assert list(checkpoint.root) == list(program.state_dict)


def test_the_weights_of_a_compiled_package_are_read(tmp_path):
    base = torch.arange(12.0)
    tensors = {"base": base, "view": base[2:8].reshape(2, 3), "other": torch.ones(2)}
    weights = Weights({name: (t, TensorProperties(t)) for name, t in tensors.items()})
    path = str(tmp_path / "compiled.pt2")
    package_pt2(path, aoti_files={"fast": [weights]})
    with read(PT2, path) as checkpoint:
        assert set(checkpoint.root) == set(tensors)
        for name, tensor in tensors.items():
            assert checkpoint.root[name].read() == raw(tensor)
        assert checkpoint.root["view"].storage is checkpoint.root["base"].storage


def test_weights_that_were_fake_are_on_no_device(tmp_path, exported):
    def edit(records):
        for name in records:
            if name.startswith("data/weights/weight_"):
                records[name] = b""

    with read(PT2, changed(exported, edit, tmp_path)) as checkpoint:
        kinds = {name: ref.kind for name, ref in checkpoint.root.items()}
    assert kinds["bn.bias"] == "meta"
    assert kinds["empty"] == "strided"


def test_an_unzipped_archive_is_read(tmp_path, exported, program):
    with zipfile.ZipFile(exported) as source:
        source.extractall(tmp_path)
    assert list(read(PT2, tmp_path / "model").root) == list(program.state_dict)


def test_big_endian_weights_are_swapped(tmp_path, exported):
    def edit(records):
        records["byteorder"] = b"big"
        records["data/weights/weight_8"] = (5).to_bytes(8, "big")

    path = changed(exported, edit, tmp_path)
    with read(PT2, path) as checkpoint:
        ref = checkpoint.root["bn.num_batches_tracked"]
        assert ref.read() == (5).to_bytes(8, "little")


def test_a_description_that_breaks_the_form_is_refused(tmp_path, exported):
    for edit, said in [
        (with_config(lambda c: {"config": []}), "describes no tensors"),
        (
            with_config(lambda c: c.update({"bn.bias": 3})),
            r"weight 'bn\.bias' does not follow the format of PT2: AttributeError,",
        ),
        (
            with_config(lambda c: c["bn.bias"].update(path_name="gone")),
            "weight 'bn.bias' .*KeyError.*gone",
        ),
        (with_bias(dtype=99), "weight 'bn.bias' .*KeyError, 99"),
        (with_bias(dtype="7"), "weight 'bn.bias' .*KeyError, '7'"),
        (with_bias(sizes=[{}]), "weight 'bn.bias' .*TypeError"),
        (with_bias(sizes=None), "ValueError, not a shape"),
        (with_bias(device="cpu"), "weight 'bn.bias' .*TypeError"),
        (with_bias(sizes=[{"as_int": 99}]), "outside its storage"),
        (lambda records: records.update({CONFIG: b"{"}), "not JSON"),
        (lambda records: records.pop(CONFIG) and None, "weights_config.json. is missing"),
        (lambda records: records.update(byteorder=b"?"), "byte order"),
    ]:
        path = changed(exported, edit, tmp_path)
        with pytest.raises(CorruptFile, match=said):
            read(PT2, path)


def test_other_zips_are_not_taken_for_pt2(fixtures, tmp_path):
    assert not PT2.recognize(Probe(fixtures / "torch-2.13.0/scripted.pt", DEFAULT_LIMITS))
    keras = save(tmp_path, build([("archive_format", b"keras"), ("config.json", b"{}")]))
    assert not PT2.recognize(Probe(keras, DEFAULT_LIMITS))
