"""Names that are imported when they are first used."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptool._lazy import make_importer

HOMES = {"home": ("collected", "missing"), "broken": ("anything",)}


@pytest.fixture
def namespace() -> dict[str, Any]:
    return {}


@pytest.fixture
def lazy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespace: dict[str, Any]
) -> Iterator[Callable[[str], Any]]:
    """The `__getattr__` of a package of two modules, one of which cannot be imported."""
    package = tmp_path / "lazily"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "home.py").write_text("import gc\ncollected = gc.isenabled()\n")
    (package / "broken.py").write_text("raise ValueError('broken')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield make_importer("lazily", namespace, HOMES)
    for name in [name for name in sys.modules if name.partition(".")[0] == "lazily"]:
        del sys.modules[name]


@pytest.fixture
def collecting() -> Iterator[None]:
    """A garbage collector that is as it was when the test is over."""
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.usefixtures("collecting")
def test_nothing_is_collected_meanwhile_and_the_collector_is_as_it_was(
    lazy: Callable[[str], Any], enabled: bool
) -> None:
    (gc.enable if enabled else gc.disable)()
    assert lazy("collected") is False
    assert gc.isenabled() is enabled


@pytest.mark.usefixtures("collecting")
def test_the_collector_is_as_it_was_after_an_import_that_fails(lazy: Callable[[str], Any]) -> None:
    gc.enable()
    with pytest.raises(ValueError, match="broken"):
        lazy("anything")
    assert gc.isenabled()


def test_a_name_is_looked_up_once(lazy: Callable[[str], Any], namespace: dict[str, Any]) -> None:
    assert lazy("collected") is namespace["collected"]


def test_a_name_that_is_not_there_is_no_attribute(lazy: Callable[[str], Any]) -> None:
    with pytest.raises(AttributeError, match="module 'lazily' has no attribute 'other'"):
        lazy("other")
    with pytest.raises(AttributeError, match="missing"):
        lazy("missing")
