"""The table of dtypes: torch's name, storage class, safetensors code, size.

Sources: torch/storage.py (`_new_dtypes`, `_dtype_to_storage_type_map`), c10/core/ScalarType.h,
safetensors/src/tensor.rs (`Dtype`).
"""

from __future__ import annotations

from typing import NamedTuple


class DType(NamedTuple):
    """One dtype.

    `itemsize` is the size in bytes of one element as torch counts it: `float4_e2m1fn_x2` is a
    pair in one byte. In the `PACKED` dtypes several elements share it; torch has no float6, which
    safetensors packs in groups of four. `swap` is the unit that a change of byte order reverses.
    """

    name: str
    itemsize: int
    storage: str | None = None
    safetensors: str | None = None
    floating: bool = False
    swap: int = 0

    @property
    def swap_size(self) -> int:
        """The bytes that a change of byte order reverses: half an element for complex numbers."""
        return self.swap or self.itemsize


DTYPES: tuple[DType, ...] = (
    DType("float64", 8, "DoubleStorage", "F64", floating=True),
    DType("float32", 4, "FloatStorage", "F32", floating=True),
    DType("float16", 2, "HalfStorage", "F16", floating=True),
    DType("bfloat16", 2, "BFloat16Storage", "BF16", floating=True),
    DType("int64", 8, "LongStorage", "I64"),
    DType("int32", 4, "IntStorage", "I32"),
    DType("int16", 2, "ShortStorage", "I16"),
    DType("int8", 1, "CharStorage", "I8"),
    DType("uint8", 1, "ByteStorage", "U8"),
    DType("bool", 1, "BoolStorage", "BOOL"),
    DType("complex64", 8, "ComplexFloatStorage", "C64", swap=4),
    DType("complex128", 16, "ComplexDoubleStorage", swap=8),
    DType("complex32", 4, swap=2),
    DType("uint16", 2, None, "U16"),
    DType("uint32", 4, None, "U32"),
    DType("uint64", 8, None, "U64"),
    DType("float8_e4m3fn", 1, None, "F8_E4M3", floating=True),
    DType("float8_e5m2", 1, None, "F8_E5M2", floating=True),
    DType("float8_e4m3fnuz", 1, None, "F8_E4M3FNUZ", floating=True),
    DType("float8_e5m2fnuz", 1, None, "F8_E5M2FNUZ", floating=True),
    DType("float8_e8m0fnu", 1, None, "F8_E8M0", floating=True),
    DType("float4_e2m1fn_x2", 1, None, "F4", floating=True),
    DType("float6_e2m3fn", 3, None, "F6_E2M3", floating=True),
    DType("float6_e3m2fn", 3, None, "F6_E3M2", floating=True),
    DType("qint8", 1, "QInt8Storage"),
    DType("quint8", 1, "QUInt8Storage"),
    DType("qint32", 4, "QInt32Storage"),
    DType("quint4x2", 1, "QUInt4x2Storage"),
    DType("quint2x4", 1, "QUInt2x4Storage"),
    DType("bits1x8", 1),
    DType("bits2x4", 1),
    DType("bits4x2", 1),
    DType("bits8", 1),
    DType("bits16", 2),
)

PACKED = {"quint4x2": 2, "quint2x4": 4, "float6_e2m3fn": 4, "float6_e3m2fn": 4}
"""The number of elements in `itemsize` bytes, for dtypes with shapes that count elements."""

NOT_IN_TORCH = frozenset({"float6_e2m3fn", "float6_e3m2fn"})
"""Dtypes of safetensors that torch does not have."""

CODES = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}
"""The integer dtypes that store quantized elements."""

REAL_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
"""The dtype of the real and the imaginary part of complex elements."""

BY_NAME: dict[str, DType] = {dtype.name: dtype for dtype in DTYPES}
BY_STORAGE: dict[str, DType] = {dtype.storage: dtype for dtype in DTYPES if dtype.storage}
BY_SAFETENSORS: dict[str, DType] = {d.safetensors: d for d in DTYPES if d.safetensors}
