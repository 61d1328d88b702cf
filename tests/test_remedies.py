"""What helps, as data and as the arguments of a call."""

import pickle
import traceback

import pytest

from ckptool.errors import AmbiguousName, CheckpointError, MatchError, UsageError
from ckptool.remedies import Remedy, merge_remedies, to_literal

ODD = ["plain", "it's", 'a "b"', "back\\slash", "ends\\", "\x1b[31m", "x'], rename=['y", "\\d'", ""]


def called(text):
    """What a call would be given."""
    return eval(f"dict({text})")


@pytest.mark.parametrize("text", ODD)
def test_a_text_is_as_python_has_it(text):
    assert eval(to_literal(text)) == text
    assert to_literal(text).isprintable()


def test_a_pattern_keeps_its_backslashes():
    assert to_literal(r"^a\.=>b.") == r"r'^a\.=>b.'"


def test_the_text_is_the_arguments_of_a_call():
    remedy = Remedy(
        (("rename", tuple(ODD)), ("allow_missing", True), ("key", "a'b"), ("min_coverage", 0))
    )
    assert called(str(remedy)) == {
        "rename": ODD, "allow_missing": True, "key": "a'b", "min_coverage": 0,
    }  # fmt: skip


def test_what_is_said_stands_around_them():
    other = Remedy((("key", "b"),), " instead")
    remedy = Remedy((("key", "a"),), " is it", "choose one with ", (other, Remedy(note="ask")))
    assert str(remedy) == "choose one with `key='a'` is it; or `key='b'` instead; or ask"
    assert str(Remedy(lead="is it? ", instead=(other,))) == "is it? `key='b'` instead"
    assert str(Remedy()) == ""
    assert str(Remedy((("key", "a`b"),), " is it")) == "``key='a`b'`` is it"


def test_what_says_nothing_is_none():
    assert not Remedy()
    assert all([Remedy((("a", True),)), Remedy(note="b"), Remedy(instead=(Remedy(note="c"),))])


def test_a_function_may_call_an_argument_otherwise():
    remedy = Remedy((("key", "key"),), instead=(Remedy((("key", "b"),)),))
    assert str(remedy.with_names({"key": "like_key"})) == "`like_key='key'` or `like_key='b'`"


def test_several_are_given_at_once():
    one = Remedy((("rename", ("a=>b",)), ("allow_missing", "x.*")), " (so)")
    two = Remedy((("rename", ("c=>d",)), ("allow_missing", ("y", "x.*")), ("min_coverage", 0)))
    assert merge_remedies([one, two, Remedy(note="ask")]) == Remedy(
        (("rename", ("a=>b", "c=>d")), ("allow_missing", ("x.*", "y")), ("min_coverage", 0)),
        " (so), ask",
    )
    assert merge_remedies([Remedy((("allow_missing", True),)), two]).arguments[0][1] is True
    assert merge_remedies([two, Remedy((("allow_missing", True),))]).arguments[1][1] is True
    assert merge_remedies([]) == Remedy()


def every_class(kind):
    """An error class, and all below it."""
    yield kind
    for below in kind.__subclasses__():
        yield from every_class(below)


@pytest.mark.parametrize("kind", [CheckpointError, AmbiguousName, MatchError])
def test_an_error_has_them_as_data_and_as_text(kind):
    remedy = Remedy((("key", "a"),), lead="choose one with ")
    error = pickle.loads(pickle.dumps(kind("no", file="f", hint=remedy)))
    assert (error.hint, error.remedy) == ("choose one with `key='a'`", remedy)
    error.advise("ask")
    assert (error.hint, error.remedy) == ("ask", None)
    error = pickle.loads(pickle.dumps(error))
    assert (error.hint, error.remedy) == ("ask", None)
    assert kind("no").hint is None


@pytest.mark.parametrize(
    "kind", [one for one in every_class(CheckpointError) if one.__module__ == "ckptool.errors"]
)
def test_every_error_crosses_between_processes_with_all_that_it_knows(kind):
    error = kind("no", hint="ask")
    error.file, error.more = "f", ["something"]
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))


def test_what_is_to_be_filled_in_stands_in_no_backticks():
    remedy = Remedy((("key", "NAME"),), " takes another", to_fill_in=True)
    assert str(Remedy(instead=(remedy, Remedy((("key", "a"),))))) == (
        "key='NAME' takes another; or `key='a'`"
    )


def test_a_traceback_ends_with_the_hint_that_counts():
    error = UsageError("it does not go", file="a.pth", hint="try this")
    error.advise("try that")
    for one in (error, pickle.loads(pickle.dumps(error))):
        *_, sentence, hint = "".join(traceback.format_exception(one)).splitlines()
        assert sentence.endswith("UsageError: a.pth: it does not go")
        assert hint == "hint: try that"
    error.advise(None)
    assert "hint" not in "".join(traceback.format_exception(error))
