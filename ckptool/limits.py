"""Limits against hostile files, each checked before memory or time is spent."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, repr=False)
class Limits:
    """Limits that every reader enforces, far above the needs of real checkpoints."""

    max_pickle_bytes: int = 4 << 30
    """Length of one pickle, including numpy data inside it."""

    max_header_bytes: int = 100_000_000
    """Length of a safetensors header (the limit of the reference reader)."""

    max_json_bytes: int = 256 << 20
    """Length of any other JSON document in or next to a checkpoint."""

    max_code_bytes: int = 64 << 20
    """Total length of the inflated TorchScript source that is read for parameter names."""

    max_far_shards: int = 4096
    """Files listed by a remote index: each costs a request and 128 KiB."""

    max_records: int = 5_000_000
    """Entries of a zip directory, or members of a tar."""

    max_depth: int = 250
    """Nesting depth of containers and objects."""

    max_integer_bytes: int = 1785
    """Size of one integer (Python refuses to print more than 4,300 digits)."""

    max_large_keys: int = 10_000
    """Integers beyond 2**61 among dict keys: they can be chosen to collide, at quadratic cost."""

    max_repeats: int = 350_000
    """Repeated visits to containers: a small pickle can refer to one list a billion times."""

    max_key_parts: int = 64
    """Items of a tuple used as a dict key, including nested ones (hashing visits each)."""

    max_nested_pickles: int = 4
    """Depth of pickles inside pickles (`torch.storage._load_from_bytes`)."""

    max_inflation: int = 1100
    """Ratio of inflated to stored bytes in one zip record; deflate cannot exceed 1,032."""

    max_header_inflation: int = 40
    """This ratio for pickles and JSON beyond 128 KiB, where each byte may become an object."""

    max_repeated_bytes: int = 1 << 30
    """Bytes read repeatedly because of strides (4 bytes can stand for exabytes)."""

    max_dimensions: int = 64
    """Dimensions of a tensor (torch itself stops at 64)."""

    def __repr__(self) -> str:
        """Return the constructor call with the limits that differ from the default."""
        limits = ((limit.name, getattr(self, limit.name), limit.default) for limit in fields(self))
        return (
            f"Limits({', '.join(f'{n}={value}' for n, value, usual in limits if value != usual)})"
        )


DEFAULT_LIMITS = Limits()
