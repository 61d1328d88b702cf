"""A page as a real browser has it: Debian's chromium, without a screen."""

import shutil
import subprocess
from urllib.parse import quote

import pytest

from tests.render.page.pages import Page

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
VIRTUAL_MS = 5_000
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
    "--enable-logging=stderr", "--v=0", "--hide-scrollbars",
)  # fmt: skip


def looked_at(page, folder, *, size=(1280, 2000), **state):
    """The page's elements once its script has run, with `state` in the address.

    Whatever the browser says on its console is a failure.
    """
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    path = folder / "page.html"
    path.write_bytes(page)
    fragment = "&".join(f"{key}={quote(value)}" for key, value in state.items())
    done = subprocess.run(
        [
            CHROMIUM,
            *FLAGS,
            f"--user-data-dir={folder / 'profile'}",
            f"--virtual-time-budget={VIRTUAL_MS}",
            f"--window-size={size[0]},{size[1]}",
            "--dump-dom",
            f"{path.as_uri()}#{fragment}",
        ],
        capture_output=True,
        check=True,
        timeout=120,
    )
    said = [line for line in done.stderr.decode().splitlines() if "CONSOLE" in line]
    assert not said, said
    return Page(done.stdout)
