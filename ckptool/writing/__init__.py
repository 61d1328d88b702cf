"""From a checkpoint to a file: the plan, its refusals, its execution, what is told of it."""

from ckptool.writing.save import Receipt, save
from ckptool.writing.target import in_folder, is_folder, target_format

__all__ = ["Receipt", "in_folder", "is_folder", "save", "target_format"]
