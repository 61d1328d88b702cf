"""Rename rules that two sets of names suggest by themselves."""

from ckptool.matching.inference import inferred
from ckptool.matching.slots import Slot


def slots(names, shape=(4, 4)):
    return {name: Slot(shape, "float32") for name in names}


def found(have, want, pairs=None):
    """What is inferred where equal names that fit are met already."""
    if pairs is None:
        pairs = {name: name for name in want if name in have and want[name].takes(have[name])}
    return inferred(have, want, pairs)


BLOCKS = [f"layer{i}.{j}.{m}.weight" for i in (1, 2) for j in (0, 1) for m in ("conv1", "conv2")]
NET = [*BLOCKS, "conv1.weight", "fc.weight"]


def test_a_prefix_goes():
    result = found(slots(f"net.{name}" for name in NET), slots(NET))
    (rule,) = result.rules
    assert (rule.kind, rule.text, rule.rule) == ("prefix", "net. taken off", r"^net\.=>")
    assert rule.pairs == {name: f"net.{name}" for name in NET}
    assert result.ambiguous == ()


def test_a_prefix_is_put_on():
    (rule,) = found(slots(NET), slots(f"net.{name}" for name in NET)).rules
    assert (rule.kind, rule.text, rule.rule) == ("prefix", "net. put before", "^=>net.")


def test_two_prefixes_that_fit_are_not_chosen_between():
    have = slots(f"{side}.{name}" for side in ("student", "teacher") for name in NET)
    result = found(have, slots(NET))
    assert result.rules == ()
    (question,) = result.ambiguous
    assert set(question.names) == set(have)
    assert set(question.candidates) == set(NET)
    assert question.rules[:2] == (r"^student\.=>", r"^teacher\.=>")
