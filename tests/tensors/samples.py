"""Everything that torch.save can write, a function a sample."""

import warnings
from collections import OrderedDict

import torch

DTYPES = [
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "complex64", "complex128", "complex32", "uint16", "uint32", "uint64", "float8_e4m3fn",
    "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
    "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2",
]  # fmt: skip


def of_dtype(name):
    """Six elements of any type that this torch has, from fixed bytes; None for one it has not."""
    dtype = getattr(torch, name, None)
    if dtype is None:
        return None
    size = torch.empty((), dtype=dtype).element_size()
    raw = (
        torch.arange(6 * size, dtype=torch.uint8) % 2
        if name == "bool"
        else torch.arange(6 * size, dtype=torch.uint8).mul(7)
    )
    return torch.empty((0,), dtype=dtype).set_(raw.untyped_storage(), 0, (2, 3), (3, 1))


def views():
    base = torch.arange(60.0).reshape(6, 10)
    return {
        "base": base, "row": base[2], "column": base[:, 3], "transposed": base.t(),
        "expanded": base[0, :1].expand(4, 1), "scalar": base[1, 1], "empty": base[:0],
        "alone": torch.arange(1000)[990:], "zero": torch.empty(0), "same": base,
    }  # fmt: skip


def ties():
    weight = torch.nn.Parameter(torch.randn(3, 4))
    shared = [1, 2]
    tree = OrderedDict(a=weight, b=weight, c=weight.detach(), l1=shared, l2=shared)
    tree["circle"] = [tree["l1"]]
    tree["circle"].append(tree["circle"])
    return tree


def parameters():
    state = torch.nn.Parameter(torch.randn(2), requires_grad=False)
    state.note = {"partition": torch.arange(2), "of": "tensor"}
    buffer = torch.nn.Buffer(torch.randn(2), persistent=False)
    grad = torch.randn(2, requires_grad=True)
    return {"p": torch.nn.Parameter(torch.randn(3)), "state": state, "buffer": buffer, "grad": grad}


def flagged():
    base = torch.randn(3, dtype=torch.complex64)
    return {"conj": base.conj(), "base": base, "neg": torch._neg_view(torch.randn(3))}


def quantized():
    values = torch.randn(4, 6)
    scales, zeros = torch.rand(4, dtype=torch.float64) + 0.1, torch.arange(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "tensor": torch.quantize_per_tensor(values, 0.1, 3, torch.quint8),
            "signed": torch.quantize_per_tensor(values, 0.1, 0, torch.qint8).t(),
            "wide": torch.quantize_per_tensor(values, 0.1, 0, torch.qint32),
            "channel": torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8),
            "floats": torch.quantize_per_channel(
                values, scales.float(), zeros.float(), 0, torch.quint8
            ),
            "nibbles": torch.quantize_per_channel(
                values, scales.float(), zeros.float(), 0, torch.quint4x2
            ),
        }


def sparse():
    dense = torch.eye(4, 6)
    loose = torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 3))
    return {
        "coo": dense.to_sparse(), "loose": loose, "hybrid": torch.randn(3, 2).to_sparse(1),
        "csr": dense.to_sparse_csr(), "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((2, 3)), "bsc": dense.to_sparse_bsc((2, 3)),
        "none": torch.zeros(2, 2).to_sparse(),
    }  # fmt: skip


def nested():
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    return {
        "strided": torch.nested.nested_tensor(parts), "jagged": jagged,
        "turned": jagged.transpose(1, 2),
        "narrowed": torch.nested.narrow(
            torch.randn(3, 5, 2), 1, torch.tensor([0, 1, 2]), torch.tensor([2, 3, 1]), torch.jagged
        ),
    }  # fmt: skip


def meta():
    return {
        "m": torch.empty(3, 4, device="meta").t(),
        "p": torch.nn.Parameter(torch.empty(2, device="meta")),
    }


def storages():
    values = torch.arange(5, dtype=torch.int16)
    whole = torch.arange(3, dtype=torch.uint8)
    return {
        "tensor": values[2:], "typed": values.storage(), "of_bytes": whole[1:],
        "untyped": whole.untyped_storage(),
    }  # fmt: skip


def model():
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(2, 1, 5, 5)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
    return {
        "state_dict": net.state_dict(), "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(), "epoch": 3, "size": torch.Size([2, 3]),
        "device": torch.device("cuda", 1), "dtype": torch.bfloat16, "layout": torch.sparse_csr,
        "set": {1, "a"}, "frozen": frozenset([2]), "bytes": b"\x00\xff", "none": b"",
        "complex": 1 + 2j, "big": 1 << 80, "bytearray": bytearray(b"ab"),
        "scheme": torch.per_tensor_affine,
    }  # fmt: skip


SAMPLES = {
    function.__name__: function
    for function in (
        views,
        ties,
        parameters,
        flagged,
        quantized,
        sparse,
        nested,
        meta,
        storages,
        model,
    )
}
