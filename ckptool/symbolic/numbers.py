"""Integers of a pickle, bounded."""

from __future__ import annotations

from ckptool.errors import LimitExceeded
from ckptool.limits import Limits

__all__ = ["decimal", "little_endian"]


def little_endian(raw: bytes, limits: Limits) -> int:
    """A little-endian two's complement integer of any size that the limits allow."""
    if len(raw) > limits.max_integer_bytes:
        raise LimitExceeded(
            f"an integer of {len(raw):,} bytes is beyond the limit of {limits.max_integer_bytes:,}"
        )
    return int.from_bytes(raw, "little", signed=True)


def decimal(text: bytes, limits: Limits) -> int:
    """A decimal integer of no more digits than the limits allow."""
    most = limits.max_integer_bytes * 12 // 5  # digits of a number of so many bytes
    if len(text) > most:
        raise LimitExceeded(f"an integer of {len(text):,} digits is beyond the limit of {most:,}")
    return int(text)
