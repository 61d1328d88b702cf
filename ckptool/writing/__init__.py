"""From a checkpoint to a file: the plan, its refusals, its execution, what is told of it."""

from ckptool.writing.save import Receipt as Receipt, save as save
from ckptool.writing.target import (
    in_folder as in_folder,
    is_folder as is_folder,
    target_format as target_format,
)
