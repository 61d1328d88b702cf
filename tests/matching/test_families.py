"""Names of modules taken apart."""

import pytest

from ckptool.matching.families import Families


@pytest.mark.parametrize(
    ("name", "family", "numbers"),
    [
        ("layers.0.attn.12.weight", ("layers", None, "attn", None), ("0", "12")),
        ("0.1.2.weight", (None, None, None), ("0", "1", "2")),
        ("layers.0", ("layers",), ()),
        ("weight", (), ()),
        (".weight", ("",), ()),
        ("..weight", ("", ""), ()),
        ("a..0.weight", ("a", "", None), ("0",)),
        ("layer1.x2.weight", ("layer", None, "x", None), ("1", "2")),
        ("layer_1.ln-2.weight", ("layer", None, "ln", None), ("1", "2")),
        ("i2h.weight", ("i", None, "h"), ("2",)),
        ("to_q.3_.weight", ("to_q", None), ("3",)),
        ("a.²³.w", ("a", "²³"), ()),
        ("a.٣.w", ("a", "٣"), ()),
    ],
)
def test_a_name_is_a_family_and_numbers(name, family, numbers):
    assert Families().of(name) == (family, numbers)


def test_a_family_is_made_once():
    families = Families()
    assert families.of("a.0.w")[0] is families.of("a.1.b")[0]
