"""Parts that do not fit together are refused before torch's C++ would read beyond them."""

import pytest
import torch

from ckptool.errors import CorruptFile, DeviceError, UnsupportedFormat
from ckptool.tensors import materialise
from tests.tensors.refs import composed, floats, ints, tensor, torch_global

pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")


def quantized(quantizer, shape=(2, 3)):
    return tensor(bytes(6), "qint8", shape, kind="quantized", parts={"quantizer": quantizer})


PER_CHANNEL = torch_global("per_channel_affine")


@pytest.mark.parametrize(
    ("ref", "reason"),
    [
        (quantized((PER_CHANNEL, [0.1, 0.2], [0, 0], 5)), "axis 5"),
        (quantized((PER_CHANNEL, [0.1, 0.2], [0, 0], "0")), "axis '0'"),
        (quantized((PER_CHANNEL, [0.1], [0], 0)), "1 scales for 2 channels"),
        (quantized((PER_CHANNEL, floats(1, 2, 3), ints(0, 0), 0)), "3 scales"),
        (quantized((torch_global("nonsense"), 1)), "scheme nonsense"),
        (quantized((torch_global("per_tensor_affine"), 0.1)), "not enough values"),
        (
            composed(
                "sparse_coo", (2, 2), {"indices": ints(0, 9, shape=(2, 1)), "values": floats(1)}
            ),
            "inconsistent with indices",
        ),
        (
            composed(
                "sparse_csr",
                (2, 2),
                {
                    "compressed_indices": ints(0, 1, 1),
                    "plain_indices": ints(7),
                    "values": floats(1),
                },
            ),
            "col_indices < ncols",
        ),
    ],
)
def test_parts_that_do_not_fit(ref, reason):
    with pytest.raises(CorruptFile, match=reason) as caught:
        materialise(ref)
    assert "made.pt" in str(caught.value)


def nested(sizes, strides, offsets, buffer=None):
    parts = {"sizes": sizes, "strides": strides, "offsets": offsets}
    parts["buffer"] = buffer if buffer is not None else floats(*range(6))
    return composed("nested", (2, None), parts)


def test_a_nested_tensor_inside_its_buffer_is_made():
    ref = nested(ints(2, 4, shape=(2, 1)), ints(1, 1, shape=(2, 1)), ints(0, 2))
    assert [part.tolist() for part in materialise(ref).unbind()] == [[0, 1], [2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("ref", "reason"),
    [
        (nested(ints(2, 4, shape=(2, 1)), ints(1, 1, shape=(2, 1)), ints(0, 3)), "element 6 of 6"),
        (nested(ints(2, 4, shape=(2, 1)), ints(1, 9, shape=(2, 1)), ints(0, 0)), "element 27"),
        (nested(ints(2, 4, shape=(2, 1)), ints(1, 1, shape=(2, 1)), ints(-1, 2)), "negative"),
        (nested(ints(2, -4, shape=(2, 1)), ints(1, 1, shape=(2, 1)), ints(0, 2)), "negative"),
        (nested(ints(2, 4, shape=(2, 1)), ints(1, shape=(1, 1)), ints(0, 2)), "do not fit"),
        (nested(ints(2, 4, shape=(2, 1)), ints(1, 1, shape=(2, 1)), ints(0)), "do not fit"),
        (nested(floats(2, 4, shape=(2, 1)), ints(1, 1, shape=(2, 1)), ints(0, 2)), "not int64"),
        (
            nested(
                ints(2, 4, shape=(2, 1)), ints(1, 1, shape=(2, 1)), ints(0, 2),
                buffer=floats(*range(6), shape=(2, 3)),
            ),
            "one run",
        ),
    ],
)  # fmt: skip
def test_a_nested_tensor_may_not_leave_its_buffer(ref, reason):
    with pytest.raises(CorruptFile, match=reason):
        materialise(ref)


def jagged(offsets, *, lengths=None, ragged=1):
    values = floats(*range(8), shape=(4, 2))
    state = {"values": values, "offsets": offsets, "lengths": lengths, "_ragged_idx": ragged}
    return composed("nested", (2, None, 2), {"state": state})


def test_a_jagged_tensor_inside_its_values_is_made():
    assert [len(part) for part in materialise(jagged(ints(0, 1, 4))).unbind()] == [1, 3]


@pytest.mark.parametrize(
    ("ref", "reason"),
    [
        (jagged(ints(0, 1, 5)), "leave the 4 rows"),
        (jagged(ints(0, 5, 4)), "leave the 4 rows"),
        (jagged(ints(-1, 1, 4)), "leave the 4 rows"),
        (jagged(ints(0, 1, 4), ragged=3), "ragged dimension 3"),
        (jagged(ints(0, 1, 4), ragged="x"), "ragged dimension 'x'"),
        (jagged(ints(0, 2, 4), lengths=ints(1, 3)), "leave the 4 rows"),
        (jagged(ints(0, 2, 4), lengths=ints(1)), "lengths do not fit"),
        (jagged(ints(0, 2, 4), lengths=ints(1, -1)), "lengths do not fit"),
    ],
)
def test_a_jagged_tensor_may_not_leave_its_values(ref, reason):
    with pytest.raises(CorruptFile, match=reason):
        materialise(ref)


def test_scales_as_lists_are_those_of_old_files():
    made = materialise(quantized((PER_CHANNEL, [0.5, 2.0], [0, 1], 0)))
    assert made.q_per_channel_scales().tolist() == [0.5, 2.0]
    assert made.q_per_channel_zero_points().tolist() == [0, 1]


def test_a_zero_stride_costs_no_memory():
    """Four bytes that claim to be a tensor of 2**60 elements, quantised or not."""
    plain = tensor(bytes(4), "float32", (1 << 60,), stride=(0,))
    assert materialise(plain).shape == (1 << 60,)
    scale = (torch_global("per_tensor_affine"), 0.1, 0)
    ref = tensor(
        bytes(1), "qint8", (1 << 60,), stride=(0,), kind="quantized", parts={"quantizer": scale}
    )
    assert materialise(ref).shape == (1 << 60,)


def test_negative_strides_and_gradients_of_integers_are_refused():
    with pytest.raises(CorruptFile, match="stride"):
        materialise(tensor(bytes(8), "float32", (2,), stride=(-1,), offset=1))
    with pytest.raises(CorruptFile, match="floating"):
        materialise(tensor(bytes(8), "int32", (2,), requires_grad=True))


def test_what_torch_cannot_put_on_meta_says_so():
    ref = quantized((PER_CHANNEL, [0.1, 0.2], [0, 0], 0))
    with pytest.raises(DeviceError, match="quantized") as caught:
        materialise(ref, map_location="meta")
    assert "cpu" in caught.value.hint


def test_sparse_on_meta_keeps_its_shape():
    parts = {"indices": ints(0, 1, shape=(2, 1)), "values": floats(1)}
    made = materialise(composed("sparse_coo", (2, 2), parts), map_location="meta")
    assert (made.layout, made.shape, made.device.type) == (torch.sparse_coo, (2, 2), "meta")


def test_a_torch_without_jagged_tensors_says_so(monkeypatch):
    monkeypatch.delattr(torch.nested, "nested_tensor_from_jagged")
    with pytest.raises(UnsupportedFormat, match="jagged") as caught:
        materialise(jagged(ints(0, 1, 4)))
    assert "upgrade" in caught.value.hint
