"""From a checkpoint to a file: the plan, its refusals, its execution, what is told of it."""

from ckptool.writing.save import Receipt as Receipt, save as save
from ckptool.writing.target import (
    goes_to_folder as goes_to_folder,
    target_file as target_file,
    target_format as target_format,
)
