"""Safetensors files made by hand, and the dtypes that the reference writes."""

import json
import struct

import torch

BY_TORCH = [
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "complex64", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
]  # fmt: skip


def raw_file(path, header, body=b"", length=None):
    """A file of any header: a document, or bytes taken as they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)
    return path


def entry(shape=(2,), offsets=(0, 8), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def as_bytes(tensor):
    """The elements of a tensor in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1).clone()
    return plain.view(torch.uint8).numpy().tobytes()
