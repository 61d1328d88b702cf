"""What is right or wrong with a file beyond what its reader must know.

`structure` looks at a file before it is opened, `content` at what has been opened. Checksums are
named here and computed by who asks: that reads the whole file.
"""

from ckptool.formats.checks.contents import content as content, structure as structure
