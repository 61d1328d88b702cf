"""Rules for names: what each makes of a name, and what is not a rule."""

from __future__ import annotations

import json

import pytest

from ckptool.core.names import find_similar
from ckptool.errors import FileDenied, FileMissing, UsageError
from ckptool.transforms import prefix_rule, read_map_file, regex_rule, table_rule
from ckptool.transforms.name_rules import convert_prefix_to_regex, parse_rules


def test_a_regular_expression():
    for rule, name, new in [
        (r"^backbone\.=>encoder.", "backbone.0.w", "encoder.0.w"),
        (r"^backbone\.=>encoder.", "my.backbone.w", None),
        (r"gamma=>weight", "a.gamma.gamma", "a.weight.weight"),
        (r"layers\.(\d+)\.=>\1.", "layers.3.w", "3.w"),
        (r"(?P<at>\d+)=>n\g<at>x", "1.2", "n1x.n2x"),
        (r"\.(a)?w$=>\1.v", "x.w", "x.v"),
        (r"^=>model.", "w", "model.w"),
        (r"^model\.=>", "model.w", "w"),
        (r"w=>w", "w", "w"),
        (r"(?=\.)=>_", "a.w", "a_.w"),
        (r" =>=>", "a b", "a=>b"),
    ]:
        assert regex_rule(rule).apply(name) == new, rule


def test_what_is_no_regular_expression_is_shown():
    for rule, message in [
        ("a.b", r"'a\.b' is not a rule of the form REGEX=>REPL"),
        ("=>b", "is not a rule"),
        ("", "is not a rule"),
        ("(a=>b", r"'\(a' is not a regular expression: .*parenthesis|unterminated"),
        (r"a=>\1", r"'\\1' is not a replacement for 'a': invalid group reference 1"),
        (r"(a)=>\g<name>", "unknown group name"),
        (r"(a)=>\q", r"bad escape"),
        ("a{99999999999}=>b", "is not a regular expression"),
    ]:
        with pytest.raises(UsageError, match=message) as caught:
            regex_rule(rule)
        assert caught.value.hint, rule


def test_a_prefix():
    for rule, name, new in [
        ("backbone=encoder", "backbone.0.w", "encoder.0.w"),
        ("backbone.=encoder.", "backbone.0.w", "encoder.0.w"),
        ("backbone=encoder", "backbone2.w", None),
        ("backbone=encoder", "my.backbone.w", None),
        ("backbone=encoder", "backbone", "encoder"),
        ("a.b=c", "a.b.w", "c.w"),
        ("a=b.c", "a.a.w", "b.c.a.w"),
        ("model.=", "model.model.w", "model.w"),
        ("model=", "modelling.w", None),
        ("=model.", "w", "model.w"),
        ("=model", "a.w", "model.a.w"),
        ("=model", "", "model."),
        ("a=b=c", "a.w", "b=c.w"),
        (" a = b ", "a.w", "b.w"),
        ("(x)=y", "(x).w", "y.w"),
    ]:
        assert prefix_rule(rule).apply(name) == new, rule


@pytest.mark.parametrize("rule", ["backbone", "", "=", ".=."])
def test_what_is_no_prefix_rule(rule):
    with pytest.raises(UsageError, match="is not a rule of the form OLD=NEW"):
        prefix_rule(rule)


def test_a_table_is_of_whole_names_all_at_once():
    rule = table_rule({"a": "b", "b": "a"})
    assert [rule.apply(name) for name in ("a", "b", "a.w")] == ["b", "a", None]


def written(tmp_path, text):
    path = tmp_path / "names.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_table_in_a_file(tmp_path):
    for text in [
        '{"a.w": "b.w", "c": "d"}',
        '\n {\n"a.w": "b.w",\n"c":"d", "c": "d"}',
        "a.w b.w\nc d\n",
        "a.w\tb.w\r\nc\td",
        "a.w,b.w\nc , d",
        "# old new\n\n  a.w   b.w  # a comment\n#c e\nc d\nc d",
        b"\xef\xbb\xbfa.w b.w\nc d",
    ]:
        path = written(tmp_path, text)
        assert list(read_map_file(path).items()) == [("a.w", "b.w"), ("c", "d")], text
        assert read_map_file(str(path)) == read_map_file(path), text


def test_names_with_blanks_are_parted_by_a_tab_or_a_comma(tmp_path):
    text = "with space.w\tno_space.w\na b.w , c d.w\nx,y\tz # a comment\n"
    assert read_map_file(written(tmp_path, text)) == {
        "with space.w": "no_space.w", "a b.w": "c d.w", "x,y": "z",
    }  # fmt: skip


def test_a_hash_inside_a_name_is_no_comment(tmp_path):
    assert read_map_file(written(tmp_path, "a#1 b#1")) == {"a#1": "b#1"}


def test_an_empty_table_is_one(tmp_path):
    assert read_map_file(written(tmp_path, "# nothing\n")) == {}
    assert read_map_file(written(tmp_path, "{}")) == {}


def test_a_table_with_a_mistake_names_the_file_and_what_is_wrong(tmp_path):
    for text, fact in [
        ("a b\n\nc\n", "line 3: 'c' is not a pair of an old and a new key"),
        ("a b c", "line 1: 'a b c' is not a pair of an old and a new key"),
        ("a b\na,", "line 2: 'a,' is not a pair of an old and a new key"),
        ("a b\nx y\na c", "line 3: 'a' already has another new key"),
        ('{"a": "b",\n "c": }', "the file is not valid JSON: Expecting value: line 2 column 7"),
        ('{"a": "c",\n "b": "a",\n "c": 3}', "the new key of 'c' is not a string"),
        ('{"a": {"b": "c"}}', "the new key of 'a' is not a string"),
        ('{"a": "b",\n\n "a": "c"}', "'a' already has another new key"),
        ('["a", "b"]', "expected a JSON object"),
        ("[" * 100_000, "the file is not valid JSON: "),
    ]:
        path = written(tmp_path, text)
        with pytest.raises(UsageError) as caught:
            read_map_file(path)
        assert str(caught.value).startswith(f"{path}: {fact}"), text
        assert caught.value.hint, text


def test_a_table_that_cannot_be_read(tmp_path):
    with pytest.raises(FileMissing, match="no such file"):
        read_map_file(tmp_path / "nowhere")
    with pytest.raises(FileDenied, match="cannot be read: Is a directory"):
        read_map_file(tmp_path)
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        read_map_file(written(tmp_path, b"\xff\xfe\x00"))


def test_a_json_table_may_say_names_in_escapes(tmp_path):
    assert read_map_file(written(tmp_path, json.dumps({"é": "ü"}))) == {"é": "ü"}


@pytest.mark.parametrize("given", ["a=>b", regex_rule("a=>b")])
def test_one_rule_is_no_list_of_them(given):
    with pytest.raises(UsageError, match="expected a list of rules, "):
        parse_rules(given)


def test_a_prefix_as_a_regex_does_the_same():
    for text in ["a=b", "a.=", "=m.", "a.b=c", "a=b.c", "(=[", r"a=\1"]:
        prefix, regex = prefix_rule(text), regex_rule(convert_prefix_to_regex(text))
        for name in ("a.w", "a.a.w", "a.b.w", "ab.w", "x.a.w", "(.w", "w"):
            assert regex.apply(name) == prefix.apply(name), text


NEARBY = ["encoder.layers.0.weight", "encoder.layers.0.bias", "decoder.norm.weight", "head/fc.bias"]


def test_the_closest_name_comes_first():
    assert find_similar("encoder.layer.0.weigth", NEARBY)[0] == "encoder.layers.0.weight"
    assert find_similar("decoder.norms.weight", NEARBY, max_count=1) == ["decoder.norm.weight"]


def test_a_word_finds_the_names_that_have_a_component_like_it():
    assert find_similar("decodr.*", NEARBY)[0] == "decoder.norm.weight"
    assert find_similar("encodr", NEARBY) == NEARBY[:3]
    assert find_similar("heads", NEARBY) == ["head/fc.bias"]


def test_numbers_and_single_letters_are_like_nothing():
    assert find_similar("0.x", NEARBY) == []
    assert find_similar("", NEARBY) == []
    assert find_similar("something", []) == []


def test_names_that_take_long_to_compare_are_few():
    many = [f"{'ab.' * 38}{at}" for at in range(5000)]
    assert len(find_similar("ba." * 39, many)) <= 3
    assert find_similar("x" * 10**6, ["x" * 10**6]) == []
