"""Write a checkpoint to a file: the plan, its checks, its execution, the receipt."""

from ckptool.writing.save import Receipt as Receipt, save as save
from ckptool.writing.target import (
    goes_to_folder as goes_to_folder,
    target_file as target_file,
    target_format as target_format,
)
