"""Bars for what two checkpoints have otherwise."""

from ckptool.comparison.aligning import align
from ckptool.comparison.diff import diff
from ckptool.comparison.report import bars
from tests.inspection.handmade import checkpoint, floats, tensor


def made(**tensors):
    over = {name: floats(*numbers, key=name) for name, numbers in tensors.items()}
    return checkpoint({name: tensor(one, (one.nbytes // 4,)) for name, one in over.items()})


def drawn(a, b):
    found = bars(a, b, align(a, b), diff(a, b, structure=True))
    return [(bar.name, bar.status) for bar in found]


def test_the_bars_are_in_the_order_of_the_first_file():
    a = made(z=[1], m=[2], a=[3])
    assert drawn(a, made(a=[3], m=[2], z=[1])) == [("z", "="), ("m", "="), ("a", "=")]


def test_what_only_the_second_has_stands_where_it_does_there():
    a, b = made(one=[1], two=[2]), made(zero=[0], one=[1], extra=[9], more=[9], two=[2])
    names = [name for name, _ in drawn(a, b)]
    assert names == ["zero", "one", "extra", "more", "two"]
    assert dict(drawn(a, b))["extra"] == "A"


def test_what_only_the_first_has_is_gone_and_another_shape_is_another_type():
    assert drawn(made(a=[1], b=[1]), made(b=[1, 2])) == [("a", "D"), ("b", "T")]


def test_wrappers_are_off_the_names():
    over = floats(1.0)
    a = checkpoint({"state_dict": {"module.fc": tensor(over, (1,))}})
    b = checkpoint({"state_dict": {"fc": tensor(over, (1,))}})
    (bar,) = bars(a, b, align(a, b), diff(a, b, structure=True))
    assert (bar.name, bar.status) == ("state_dict/fc", "=")


def test_the_change_of_a_tensor_is_relative_to_its_norm():
    a, b = made(one=[3, 4], same=[1]), made(one=[3, 3], same=[1])
    assert [bar.change for bar in bars(a, b, align(a, b), diff(a, b))] == [0.2, None]
