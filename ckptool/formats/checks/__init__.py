"""Checks of a file that its reader does not need.

`check_structure` looks at a file before it is opened, `check_content` at an opened checkpoint.
Checksums are listed here; the caller computes them, because that reads the whole file.
"""

from ckptool.formats.checks.contents import (
    check_content as check_content,
    check_structure as check_structure,
)
