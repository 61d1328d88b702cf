"""Write a checkpoint to a file: the plan, its checks, its execution, the receipt."""

from ckptool.writing.save import Receipt as Receipt, save as save
from ckptool.writing.target import (
    choose_file as choose_file,
    choose_format as choose_format,
    is_folder_target as is_folder_target,
)
