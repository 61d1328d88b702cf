"""A report as one HTML page that needs nothing but itself."""

from ckptool.render.page.document import page
from ckptool.render.page.writing import PageReceipt, check_page_target, page_lines, write_page

__all__ = ["PageReceipt", "check_page_target", "page", "page_lines", "write_page"]
