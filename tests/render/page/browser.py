"""A page as a real browser has it: Debian's chromium, without a screen."""

import json
import re
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
        timeout=60,
    )
    said = [line for line in done.stderr.decode().splitlines() if "CONSOLE" in line]
    assert not said, said
    return Page(done.stdout)


def used(page, folder, steps, *, size=(1280, 2000)):
    """What `steps`, lines of JavaScript, give by `tell(name, value)` as somebody who uses the page.

    The policy of the page, which allows no other script than its own, is taken out for it.
    """
    script = """<script>
    const told = {}, tell = (name, value) => { told[name] = value; };
    const at = (query) => document.querySelector(query);
    const soon = () => new Promise((done) => setTimeout(done, 100));
    const fire = (target, event) => target.dispatchEvent(event);
    const bubbling = { bubbles: true, cancelable: true };
    const click = (target) => fire(target, new MouseEvent("click", bubbling));
    addEventListener("load", async () => {
      await soon();
      STEPS
      document.title = JSON.stringify(told);
    });
    </script></body>"""
    policy = re.compile(rb'<meta http-equiv="Content-Security-Policy"[^>]*>')
    open_page = policy.sub(b"", page).replace(b"</body>", script.replace("STEPS", steps).encode())
    return json.loads(looked_at(open_page, folder, size=size).one("title").text)
