"""What a hostile file may cost. Each field is checked before memory or time is taken for it."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, repr=False)
class Limits:
    """Bounds that every reader keeps; far above what real checkpoints need."""

    max_pickle_bytes: int = 4 << 30
    """Length of one pickle (numpy payloads may lie inside it)."""

    max_header_bytes: int = 100_000_000
    """Length of a safetensors header: the reference reader's own bound."""

    max_json_bytes: int = 256 << 20
    """Length of any other JSON document in or beside a checkpoint."""

    max_code_bytes: int = 64 << 20
    """TorchScript source read to learn parameter names, inflated, in all."""

    max_far_shards: int = 4096
    """Files that an index on another machine names: each is a request, and 128 KiB."""

    max_records: int = 5_000_000
    """Entries of a zip directory, members of a tar."""

    max_depth: int = 250
    """Nesting of containers and objects."""

    max_integer_bytes: int = 1785
    """Size of one integer (Python refuses to print those beyond 4,300 digits)."""

    max_large_keys: int = 10_000
    """Integers beyond 2**61 among dict keys: such can be chosen to collide, at quadratic cost."""

    max_repeats: int = 350_000
    """Visits to containers already seen: a small pickle can mention one list a billion times."""

    max_key_parts: int = 64
    """Items of a tuple used as a dict key, nested ones included (hashing it visits each)."""

    max_nested_pickles: int = 4
    """Depth of a pickle inside a pickle (`torch.storage._load_from_bytes`)."""

    max_inflation: int = 1100
    """Inflated over stored bytes of one zip record; deflate itself cannot exceed 1,032."""

    max_header_inflation: int = 40
    """The same of a pickle or JSON record beyond 128 KiB, as each byte may become an object."""

    max_repeated_bytes: int = 1 << 30
    """Bytes read more than once because strides repeat them (a 4-byte storage can say exabytes)."""

    max_dimensions: int = 64
    """Dimensions of a tensor (torch itself stops at 64)."""

    def __repr__(self) -> str:
        """Return the call with the bounds that are not the default."""
        given = ((one.name, getattr(self, one.name), one.default) for one in fields(self))
        return f"Limits({', '.join(f'{n}={value}' for n, value, usual in given if value != usual)})"


DEFAULT_LIMITS = Limits()
