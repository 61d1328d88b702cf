"""The formats, and how to open a file of one of them."""

from ckptool.formats.base import (
    EditableFormat as EditableFormat,
    Format as Format,
    NewFile as NewFile,
    Probe as Probe,
    WritableFormat as WritableFormat,
    WritePlan as WritePlan,
)
from ckptool.formats.opening import (
    Source as Source,
    open_checkpoint as open_checkpoint,
    open_or_reuse as open_or_reuse,
    read_probe as read_probe,
)
from ckptool.formats.registry import (
    REGISTRY as REGISTRY,
    TORCH_ENDINGS as TORCH_ENDINGS,
    WRITABLE as WRITABLE,
    RegisteredFormat as RegisteredFormat,
    find_candidate_formats as find_candidate_formats,
    load_format as load_format,
    load_writable_format as load_writable_format,
    shard_format_of as shard_format_of,
)
