"""`make docs`: writes the pages that follow from the code."""

from pathlib import Path
from tempfile import TemporaryDirectory

from tests.pages import api_page, cli_page, cookbook, pictures, steps_page
from tests.pages.prepared import prepare
from tests.sources import PROJECT

PAGES = {"cli.md": cli_page.page, "api.md": api_page.page, "steps.md": steps_page.page}


def _cookbook() -> str:
    parts = []
    for entry in cookbook.entries(cookbook.SOURCE.read_text(encoding="utf-8")):
        with TemporaryDirectory() as folder:
            if entry.fences("console"):
                prepare(Path(folder))
            parts.append(cookbook.filled(entry, Path(folder)))
    return "".join(parts)


if __name__ == "__main__":
    for name, page in {**PAGES, "cookbook.md": _cookbook}.items():
        (PROJECT / "docs" / name).write_text(page(), encoding="utf-8")
        print(f"docs/{name}")
    with TemporaryDirectory() as folder:
        prepare(Path(folder))
        for name in pictures.COMMANDS:
            page = PROJECT / "docs" / "pictures" / f"{name}.svg"
            page.write_text(pictures.picture(name, folder), encoding="utf-8")
            print(f"docs/pictures/{name}.svg")
        for path in pictures.looks(folder, PROJECT / "docs" / "pictures"):
            print(f"docs/pictures/{path.name}")
