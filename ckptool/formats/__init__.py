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
    opened as opened,
    read_probe as read_probe,
)
from ckptool.formats.registry import (
    REGISTRY as REGISTRY,
    TORCH_ENDINGS as TORCH_ENDINGS,
    WRITABLE as WRITABLE,
    RegisteredFormat as RegisteredFormat,
    candidates as candidates,
    format_of as format_of,
    shard_of as shard_of,
    writer as writer,
)
