"""From a checkpoint to a file: the plan, its refusals, its execution, what is told of it."""

from ckptool.writing.receipt import Receipt
from ckptool.writing.save import save
from ckptool.writing.target import FLAT, target_format

__all__ = ["FLAT", "Receipt", "save", "target_format"]
