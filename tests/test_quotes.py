"""Each error of another library is written in one table, and a page shows each kind once."""

import re
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.diagnosis import doctor
from ckptool.quotes import TEXTS, quote

PACKAGE = Path(ckptool.__file__).parent
QUOTED = re.compile(r'quote\(\s*(?:kind|"([\w-]+)")')


def sources():
    return {path: path.read_text() for path in PACKAGE.rglob("*.py") if path.stem != "quotes"}


def test_every_text_is_used_and_written_nowhere_else():
    texts = "\n".join(sources().values())
    unused = [kind for kind in TEXTS if not re.search(rf"""["']{kind}["']""", texts)]
    assert not unused
    assert {found for found in QUOTED.findall(texts) if found} <= TEXTS.keys()
    for path, text in sources().items():
        assert not re.search(r"(torch\.load|load_state_dict)\S* (says|fails): ", text), path


def test_a_quote_has_what_the_file_decides():
    made = quote("unexpected-key", "a.b", call="load_state_dict on the inner model")
    assert str(made) == (
        'load_state_dict on the inner model fails: Unexpected key(s) in state_dict: ... "a.b"'
    )
    with pytest.raises(IndexError):
        quote("unexpected-key")


class Options:
    """A class that weights_only=True rejects."""


def test_a_page_quotes_a_kind_of_error_once(tmp_path):
    wrapped = {"module.w": torch.ones(2)}
    torch.save({"net": {"epoch": 3, **wrapped}}, tmp_path / "a.pth")
    page = str(doctor(tmp_path / "a.pth", quick=True, devices=["cpu"]))
    assert page.count("load_state_dict fails: Unexpected key(s) in state_dict: ...") == 1
    assert "load_state_dict fails as in 1" in page
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "net"'):
        torch.nn.Linear(2, 2).load_state_dict(torch.load(tmp_path / "a.pth"))
