"""Frames of protocols 4 and 5 are where Python's own picklers put them, or told."""

import io
import pickle
import pickletools
from itertools import product

from hypothesis import given, strategies as st

from ckptool.symbolic.machine import has_regular_frames

LONG = 1 << 16
MAKERS = {"bytes": bytes, "text": lambda length: "t" * length, "array": bytearray, "number": int}
leaves = st.tuples(
    st.sampled_from(list(MAKERS)),
    st.sampled_from([0, 1, 5, LONG - 20, LONG - 1, LONG, LONG + 1, 3 * LONG]),
)
trees = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4), max_leaves=8)


def made(tree):
    """A tree of values for one of what they are."""
    if isinstance(tree, list):
        return [made(one) for one in tree]
    kind, length = tree
    return MAKERS[kind](length)


def dumped(tree, protocol, pickler):
    out = io.BytesIO()
    pickler(out, protocol).dump(tree)
    return out.getvalue()


@given(trees, st.sampled_from([4, 5]), st.sampled_from([pickle.Pickler, pickle._Pickler]))
def test_what_a_pickler_writes_fits(tree, protocol, pickler):
    data = dumped(made(tree), protocol, pickler)
    assert has_regular_frames(data, len(data))
    assert has_regular_frames(data + b"more", len(data))
    optimized = pickletools.optimize(data)
    assert has_regular_frames(optimized, len(optimized))


def test_another_length_does_not():
    for protocol, tree in product(
        [4, 5], [list(range(1000)), [str(n) for n in range(50_000)], ["a", b"b" * LONG, "c" * 10]]
    ):
        data = pickle.dumps(tree, protocol)
        frames = [place for opcode, _, place in pickletools.genops(data) if opcode.name == "FRAME"]
        for place in frames:
            for bit in range(64):
                changed = bytearray(data)
                changed[place + 1 + bit // 8] ^= 1 << bit % 8
                assert not has_regular_frames(bytes(changed), len(changed)), (place, bit)


def test_a_frame_that_reaches_the_end_of_another_is_none():
    data = pickle.dumps([1, 2, 3], 4)
    assert not has_regular_frames(data, len(data) - 1)
    assert not has_regular_frames(data + b"N" * 4, len(data) + 4)
