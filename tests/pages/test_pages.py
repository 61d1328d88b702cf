"""The pages that are made from the code are those that lie in docs/."""

import re

import griffe
import pytest

import ckptool
import ckptool.errors
import ckptool.trainer
from ckptool.cli.group import VERBS
from tests.forks import in_shell
from tests.pages import api_page, cli_page
from tests.pages.__main__ import PAGES
from tests.sources import PROJECT

GROUPED = [name for names in api_page.PARTS.values() for name in names]
CLASSES = [
    path
    for path in [
        "errors.CheckpointError",
        *GROUPED,
        *(f"trainer.{name}" for name in ckptool.trainer.__all__),
    ]
    if isinstance(api_page.at(path), griffe.Class)
]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_current(name):
    lies = (PROJECT / "docs" / name).read_text(encoding="utf-8")
    assert lies == PAGES[name](), "make docs writes it anew"


def test_every_public_name_is_told_once():
    page = PAGES["api.md"]()
    errors = {name for name in ckptool.errors.__all__ if name[0].isupper()}
    told = [name for name in GROUPED if "." not in name]
    public = {*ckptool.__all__, *ckptool.results.__all__} - {"__version__"}
    assert sorted(told) == sorted(public)
    for name in told:
        assert page.count(f"### ckptool.{api_page.address(name)}\n") == 1
    for name in errors:
        assert page.count(f"\n| `{name}` |") == 1
    for name in ckptool.trainer.__all__:
        assert page.count(f"### ckptool.trainer.{name}\n") == 1


WITHOUT_FIELDS = (
    "trainer.Observer", "trainer.Trainer", "Step", "Untie", "Compact", "Masters", "Salvage",
    "InertObject",
)  # fmt: skip


@pytest.mark.parametrize("path", CLASSES)
def test_every_field_of_a_public_class_is_told(path):
    thing = api_page.at(path)
    text = thing.docstring.value
    fields = api_page.fields_of(thing)
    assert fields or path in WITHOUT_FIELDS
    for name, member in fields:
        own = member.docstring and member.docstring.value
        assert own or f"`{name}`" in text or f" {name}:" in text, name


@pytest.mark.parametrize("path", [path for path in GROUPED if path not in CLASSES])
def test_every_argument_is_told_and_every_error_is_one(path):
    """By its own line or in the text; what a transform takes is a checkpoint, unsaid."""
    thing = api_page.at(path)
    text = thing.docstring.value
    for section in thing.docstring.parsed:
        if section.kind is griffe.DocstringSectionKind.parameters:
            told = {item.name.lstrip("*") for item in section.value}
            assert told <= {parameter.name for parameter in thing.parameters}
        if section.kind is griffe.DocstringSectionKind.raises:
            for item in section.value:
                for error in re.findall(r"\w+", str(item.annotation)):
                    assert issubclass(getattr(ckptool, error), ckptool.CheckpointError)
    for parameter in thing.parameters:
        if parameter.name != "checkpoint":
            assert re.search(rf"\b{parameter.name}\b", text, re.IGNORECASE), parameter.name


def test_the_help_on_the_page_is_what_a_command_prints(tmp_path):
    printed = in_shell("ckptool convert --help-all", tmp_path).stdout
    assert printed.split() == cli_page.help_of("convert").split()


def test_every_command_is_on_the_page():
    page = PAGES["cli.md"]()
    for verbs in VERBS.values():
        for name in verbs:
            assert page.count(f"\n## {name}\n") == 1
            assert f"Usage: ckptool {name} " in page
