"""Which devices there are, told by files of the system."""

import pytest
import torch

from ckptool.diagnosis import contents
from ckptool.diagnosis.contents import detect_devices, parse_devices
from ckptool.errors import UsageError

CUDA = "cuda: Optional[str] = '12.4'\nhip: Optional[str] = None\n"
WITHOUT = "cuda: Optional[str] = None\nhip: Optional[str] = None\n"
ROCM = "cuda: Optional[str] = None\nhip: Optional[str] = '6.2'\n"


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A machine with so many GPUs, and a torch that was built for something."""

    def with_gpus(nvidia=0, amd=0, torch=CUDA):
        monkeypatch.setattr(contents, "_read_torch_version", lambda: torch)
        monkeypatch.setattr(contents.sys, "platform", "linux")
        (tmp_path / "dev").mkdir()
        for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{n}" for n in range(nvidia))):
            (tmp_path / "dev" / name).touch()
        for number in range(amd + 1):  # the first node is the processor
            node = tmp_path / "sys/class/kfd/kfd/topology/nodes" / str(number)
            node.mkdir(parents=True)
            (node / "properties").write_text(
                f"cpu_cores_count 8\nsimd_count {240 * (number > 0)}\n"
            )
        return str(tmp_path)

    return with_gpus


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ({}, ("cpu",)),
        ({"nvidia": 2}, ("cpu", "cuda:0", "cuda:1")),
        ({"nvidia": 2, "torch": ""}, ("cpu", "cuda:0", "cuda:1")),
        ({"nvidia": 2, "torch": WITHOUT}, ("cpu",)),
        ({"amd": 1, "torch": ROCM}, ("cpu", "cuda:0")),
        ({"amd": 1, "torch": CUDA}, ("cpu",)),
    ],
)
def test_gpus_are_counted_as_far_as_torch_can_use_them(system, gpus, expected):
    assert detect_devices(system(**gpus), {}) == expected


def test_the_environment_hides_gpus(system):
    machine = system(nvidia=3)
    for stated, count in (
        *(("", 0), ("-1", 0), ("1", 1), ("1,0", 2), ("0,-1,1", 1)),
        *(("GPU-8932f937", 1), ("0,1,2,3", 3)),
    ):
        here = detect_devices(machine, {"CUDA_VISIBLE_DEVICES": stated})
        assert here == ("cpu", *(f"cuda:{index}" for index in range(count))), stated


def test_the_torch_that_is_installed_is_read_and_not_run():
    text = contents._read_torch_version()
    assert f"'{torch.__version__}'" in text
    assert contents._is_torch_without("cuda") == (torch.version.cuda is None)


def test_devices_are_given_as_a_list():
    for text, tags in (
        ("cpu", ("cpu",)),
        ("cuda", ("cpu", "cuda:0")),
        ("cuda:1, cuda:0", ("cpu", "cuda:1", "cuda:0")),
        ("mps", ("cpu", "mps")),
        ("cuda:3", ("cpu", "cuda:3")),
        (["cuda", "npu:1"], ("cpu", "cuda:0", "npu:1")),
        ([torch.device("cpu"), torch.device("cuda", 1)], ("cpu", "cuda:1")),
        (torch.device("mps"), ("cpu", "mps")),
        ([], ("cpu",)),
    ):
        assert parse_devices(text) == tags, text


def test_words_that_are_no_device_are_refused():
    for text in ("", "GPU", "banana", "cuda:x", "cuda:0;cuda:1", ["cpu", "banana"], [0], 0):
        with pytest.raises(UsageError, match="is not a device"):
            parse_devices(text)
