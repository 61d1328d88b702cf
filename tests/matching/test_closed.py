"""Names in modules that load in a way of their own."""

import pytest

from ckptool.matching import Slot, matched


def named(*names, shape=(3, 3)):
    return {name: Slot(shape, "float32") for name in names}


def test_nothing_is_concluded_in_a_closed_module():
    have = named("enc.old.weight", "enc.old.bias", "head.weight")
    want = named("enc.proj.weight", "enc.proj.bias", "head.weight")
    found = matched(have, want, closed=["enc"])
    assert found.pairs == {"head.weight": "head.weight"}
    assert found.placed == {name: name for name in ("enc.old.weight", "enc.old.bias")}
    assert not found.report.ambiguous


def test_nor_is_a_known_spelling_taken():
    have, want = named("enc.gamma", "enc.beta", "w"), named("enc.weight", "enc.bias", "w")
    assert matched(have, want).report.fits
    assert matched(have, want, closed=["enc"]).report.missing_keys == ["enc.weight", "enc.bias"]


@pytest.mark.parametrize(
    ("file_front", "front"),
    [("", "module."), ("module.", ""), ("module.", "_orig_mod.module."), ("model.", "")],
)
def test_wrappers_and_a_front_come_and_go(file_front, front):
    have = named(*(f"{file_front}{name}" for name in ("enc.old", "enc.stays", "a.w", "b.w")))
    want = named(*(f"{front}{name}" for name in ("enc.new", "enc.stays", "a.w", "b.w")))
    found = matched(have, want, closed=[f"{front}enc"])
    assert found.placed == {f"{file_front}enc.old": f"{front}enc.old"}
    assert found.report.missing_keys == [f"{front}enc.new"]
    assert found.renamed[f"{file_front}enc.old"] == f"{front}enc.old"


def test_a_wrapper_inside_is_put_back():
    have = named("enc.a.old", "enc.a.stays", "w")
    want = named("enc._orig_mod.a.new", "enc._orig_mod.a.stays", "w")
    assert matched(have, want, closed=["enc"]).placed == {"enc.a.old": "enc._orig_mod.a.old"}


def test_the_root_closes_all():
    have, want = named("old.a", "b"), named("new.a", "b")
    found = matched(have, want, closed=[""])
    assert (found.pairs, found.placed) == ({"b": "b"}, {"old.a": "old.a"})


def test_what_stands_before_a_closed_module_may_be_concluded():
    kinds = {"mlp.weight": (3, 4), "mlp.bias": (3,), "norm.weight": (7,), "up.weight": (2, 9)}
    have = {f"backbone.{name}": Slot(shape, "float32") for name, shape in kinds.items()}
    have["head.weight"] = Slot((1, 2), "float32")
    want = {f"encoder.{name}": Slot(shape, "float32") for name, shape in kinds.items()}
    want["head.weight"] = Slot((1, 2), "float32")
    assert matched(have, want, closed=["encoder.mlp"]).report.fits
    assert matched(have, want, closed=["encoder"]).report.fits
    assert not matched(have, want, closed=[""]).report.fits


def test_a_module_without_names_of_its_own_takes_what_the_file_has_for_it():
    found = matched(named("a", "quiet.ids"), named("a"), closed=["quiet"])
    assert found.placed == {"quiet.ids": "quiet.ids"}
