"""Options of before are refused, and the error names those that took their place."""

import pytest

from ckptool.renamed import RENAMED_OPTIONS


@pytest.mark.parametrize(("verb", "option"), RENAMED_OPTIONS)
def test_an_option_of_before_is_refused_with_the_new_one(ckptool, verb, option):
    done = ckptool(verb, "a.pth", "b.pth", option, "x")
    assert done.code == 2
    assert done.out == ""
    assert f"hint: use {RENAMED_OPTIONS[verb, option]}" in done.err
