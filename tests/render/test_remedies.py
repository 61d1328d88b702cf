"""What helps, as options of the command line."""

import shlex
from itertools import product

from ckptool.remedies import Remedy
from ckptool.render.text import to_option_words, to_options_text
from tests.test_remedies import ODD


def test_each_text_has_an_option():
    remedy = Remedy(
        (
            ("rename", (r"^q\.=>k.", "a=>b")),
            ("allow_unexpected", "unused"),
            ("allow_missing", ("a", "it's")),
            ("allow_lossy_cast", True),
            ("min_coverage", 0),
        )
    )
    assert to_options_text(remedy) == (
        r"--rename '^q\.=>k.' --rename 'a=>b' --allow-unexpected=unused --allow-missing=a "
        "--allow-missing='it'\"'\"'s' --allow-lossy-cast --min-coverage=0"
    )
    assert to_option_words(remedy)[:4] == [
        "--rename", r"^q\.=>k.", "--rename", "a=>b",
    ]  # fmt: skip


def test_a_shell_gives_back_the_words():
    for text, name in product(
        [text for text in ODD if text.isprintable()], ["rename", "allow_missing", "key"]
    ):
        remedy = Remedy(((name, (text, "--json", "a=b")),))
        assert shlex.split(to_options_text(remedy)) == to_option_words(remedy), (text, name)


def test_what_does_not_print_is_as_a_shell_takes_it():
    remedy = Remedy((("allow_missing", ("a\x1b[0m",)),))
    assert to_options_text(remedy) == r"--allow-missing=$'a\033[0m'"
    assert to_option_words(remedy) == ["--allow-missing=a\x1b[0m"]


def test_what_looks_like_an_option_is_given_to_one():
    assert to_option_words(Remedy((("key", "--json"),))) == ["--key=--json"]


def test_words_are_words_whatever_they_look_like():
    said = "allow_missing=True, rename=['a=>b']; min_coverage is"
    remedy = Remedy((("key", "a"),), f" {said}", f"{said}: ", (Remedy(note=said),))
    assert to_options_text(remedy) == f"{said}: `--key a` {said}; or {said}"
