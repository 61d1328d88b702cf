"""What list, info, show and a receipt look like."""

import re

import pytest

from ckptool.core.checkpoint import Change
from ckptool.core.model import Global, Opaque, OrderedMap
from ckptool.diagnosis.info import info
from ckptool.inspection.listing import build_tree, list_tensors
from ckptool.inspection.show import show
from ckptool.render.figures import shown_lines
from ckptool.render.info import info_lines
from ckptool.render.listing import listing_lines, tree_lines
from ckptool.render.receipt import receipt_lines
from ckptool.render.text import PLAIN, Look
from ckptool.writing import Receipt
from tests.inspection.handmade import checkpoint, floats, tensor

EVIL = "a\x1b]0;owned\x07\u202e"


def weights(**options):
    return OrderedMap(
        {
            "module.fc.weight": tensor(floats(*range(6), key="0", **options), [2, 3]),
            "module.fc.bias": tensor(floats(1.0, float("nan"), key="1", **options), [2]),
        }
    )


def whole(**options):
    made = {"epoch": 3, "state_dict": weights(**options)}
    return {**made, "args": Opaque(Global("argparse", "Namespace"))}


def text(lines):
    return "\n".join(lines)


def listing(root, **options):
    return list_tensors(checkpoint(root), **options)


def test_a_list_has_tensors_values_objects_and_totals():
    assert text(listing_lines(listing(whole(device="cuda:3")), PLAIN)) == (
        "name                         dtype    shape   device  size\n"
        "state_dict/module.fc.weight  float32  [2, 3]  cuda:3  24 B\n"
        "state_dict/module.fc.bias    float32  [2]     cuda:3   8 B\n"
        "\n"
        "value  type\n"
        "epoch  int   3\n"
        "\n"
        "object  class\n"
        "args    argparse.Namespace\n"
        "\n"
        "2 tensors, 8 elements, 32 B; 1 value; 1 object"
    )


def test_ties_gradients_and_kinds_are_marked():
    shared = floats(1.0, 2.0)
    first = tensor(shared, [2], requires_grad=True)
    found = text(listing_lines(listing({"a": first, "b": tensor(shared, [2])}), PLAIN))
    assert "grad tied(0)" in found
    assert found.count("tied(0)") == 2


def test_hashes_have_a_column():
    found = text(listing_lines(listing(weights(), hash=True), PLAIN))
    assert found.count("\n") == 4
    assert "sha256" in found


def test_an_empty_checkpoint_has_only_totals():
    assert text(listing_lines(listing({}), PLAIN)) == "0 tensors, 0 elements, 0 B"


@pytest.mark.parametrize(
    "draw",
    [
        lambda root: listing_lines(listing(root), PLAIN),
        lambda root: tree_lines(build_tree(listing(root)), PLAIN),
        lambda root: info_lines(info(checkpoint(root)), PLAIN),
        lambda root: shown_lines(show(checkpoint(root), EVIL), PLAIN),
        lambda root: shown_lines(show(checkpoint({"all": root}), "all"), PLAIN),
    ],
    ids=["list", "tree", "info", "show", "show a container"],
)
@pytest.mark.parametrize(
    "node",
    [
        EVIL,
        tensor(floats(1.0, device=EVIL), [1]),
        Opaque(Global(EVIL, EVIL), args=(EVIL,)),
        {EVIL: tensor(floats(1.0, key=EVIL), [1])},
    ],
    ids=["value", "tensor", "object", "container"],
)
def test_nothing_in_a_file_reaches_the_terminal_raw(draw, node):
    found = text(draw({EVIL: node, "b": node}))
    assert all(line.isprintable() for line in found.split("\n"))


def test_a_long_value_is_shortened():
    found = text(listing_lines(listing({"log": "x" * 10_000}), PLAIN))
    assert len(found) < 300


def test_a_list_fits_a_terminal():
    rows = {"layer." * 30 + str(n): tensor(floats(1.0), [1]) for n in range(5)}
    lines = list(listing_lines(listing(rows), Look(width=80)))
    assert max(map(len, lines)) <= 80


def test_a_tree_shows_folds_and_totals():
    names = {f"layers.{n}.w": tensor(floats(*range(6)), [2, 3]) for n in range(4)}
    found = listing({**names, "norm": tensor(floats(1.0), [1])})
    assert [line.rstrip() for line in tree_lines(build_tree(found), PLAIN)] == [
        "made.pth      5 tensors, 25 elements, 100 B",
        "|- layers     4 tensors, 24 elements, 96 B",
        "|  `- {0..3}  4 tensors, 24 elements, 96 B",
        "|     `- w    float32 [2, 3]  24 B",
        "`- norm       float32 [1]  4 B",
    ]


def test_a_tree_fits_a_terminal():
    found = listing({"a" * 300: tensor(floats(1.0), [1])})
    assert max(map(len, tree_lines(build_tree(found), Look(width=60)))) <= 60


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_tree_keeps_its_drawing_and_tells_the_matrices_of_a_layer_apart(width):
    below = "model.decoder.transformer.blocks.layers.0.attention.projections"
    ends = [f"{one}_projection_of_every_head_{kind}" for one in "qkvo" for kind in ("w_a", "w_b")]
    found = listing({f"{below}.{end}": tensor(floats(1.0), [1]) for end in ends})
    whole = list(tree_lines(build_tree(found), PLAIN))
    narrow = list(tree_lines(build_tree(found), Look(width=width)))
    drawn = [re.match(r"[|` -]*", line)[0] for line in whole]
    assert all(line.startswith(lead) for line, lead in zip(narrow, drawn, strict=True))
    assert len({line.split()[-5] for line in narrow[-8:]}) == 8
    assert width < 60 or max(map(len, narrow)) <= width


def test_info_answers_on_one_screen():
    made = checkpoint(whole(device="cuda:3"), size=2048, storage_bytes=32, writer="torch 2.7")
    assert text(info_lines(info(made), PLAIN)) == (
        "made.pth\n"
        "format        torch-zip, written by torch 2.7\n"
        "size          2.0 KiB on disk, 32 B of tensor data, 0 B used\n"
        "devices       cuda:3 (2)\n"
        "dtypes        float32 (2)\n"
        "weights_only  no, because of\n"
        "              argparse.Namespace\n"
        "\n"
        "section     kind           tensors  parameters  bytes  wrappers\n"
        "state_dict  state_dict           2           8   32 B  module.\n"
        "(other)     epoch=3, args\n"
        "\n"
        "To load it:\n"
        "  ckptool convert made.pth made.fixed.pth --model-only --wrappers strip --to cpu"
    )


def test_info_says_when_nothing_is_needed_or_helps():
    fine = text(info_lines(info(checkpoint({"w": tensor(floats(1.0), [1])})), PLAIN))
    assert fine.endswith("loads as is")
    root = Opaque(Global("net", "X"), maker="newobj")
    lost = text(info_lines(info(checkpoint(root)), PLAIN))
    assert lost.endswith("no command makes it load: it contains objects that weights_only=True "
                         "rejects: net.X")  # fmt: skip


def test_info_shortens_long_lists():
    root = {
        **{f"o{n}": Opaque(Global("net", f"Class{n}")) for n in range(40)},
        **{f"t{n}": tensor(floats(1.0, device=f"cuda:{n}"), [1]) for n in range(40)},
    }
    found = text(info_lines(info(checkpoint(root, notes=("one note",), dead_bytes=9)), PLAIN))
    assert "and 32 more" in found
    assert "and 30 more" in found
    assert "note          one note" in found
    assert "9 B dead" in found
    assert found.count("\n") < 30


def test_show_prints_a_value_bare():
    assert text(shown_lines(show(checkpoint({"epoch": 3}), "epoch"), PLAIN)) == "3"
    assert text(shown_lines(show(checkpoint({"s": "a\n\x1bb"}), "s"), PLAIN)) == "a\n\\x1bb"


def test_show_prints_a_tensor():
    found = text(shown_lines(show(checkpoint(weights()), "module.fc.bias"), PLAIN))
    assert found == (
        "module.fc.bias\n"
        "float32 [2] on cpu\n"
        "2 elements, 8 B, stride [1]\n"
        "head  1 nan\n"
        "min 1  max 1  mean 1\n"
        "1 NaN"
    )


def receipt(**options):
    fields = {
        "path": "out.pth", "format": "torch-zip", "size": 2048, "tensors": 2, "left_out": (),
        "notes": (), "blockers": (), "written": 2048, "source": "in.pth",
    }  # fmt: skip
    return Receipt(**{**fields, **options})


def test_a_receipt_says_what_changed_and_what_was_written():
    changes = (Change("strip", "module taken off 2 names", 2), Change("warning", "look out"))
    made = receipt(changes=changes, left_out=("epoch",), notes=("tied",), blockers=("net.Net",))
    assert list(receipt_lines(made)) == [
        "module taken off 2 names",
        "warning: look out",
        "left out: epoch",
        "note: tied",
        "weights_only=True rejects it: net.Net",
        "wrote out.pth (torch-zip, 2 tensors, 2.0 KiB)",
    ]


def test_of_many_changes_of_one_kind_a_screen_is_printed():
    changes = [Change("plain", f"a{at}: numpy.float64 becomes a float", 1) for at in range(100)]
    left_out = tuple(f"b{at} (net.Net)" for at in range(50))
    made = receipt(changes=(*changes, Change("cast", "done")), left_out=left_out)
    lines = list(receipt_lines(made))
    assert lines[39:42] == [changes[39].text, "and 60 more (--json lists all)", "done"]
    assert lines[81:83] == ["left out: b39 (net.Net)", "and 10 more (--json lists all)"]
    assert len(made.to_dict()["changes"]) == 101


def test_a_receipt_of_an_edit_a_check_and_a_computation():
    outcome = Change("underflow", "fc.weight: 3 elements become zero", 3)
    done = (Change("cast", "done"),)
    made = receipt(changes=done, written=512, verified=True, outcomes=(outcome,))
    assert list(receipt_lines(made))[1:] == [
        "fc.weight: 3 elements become zero",
        "edited out.pth in place (torch-zip, 2 tensors, 2.0 KiB, 512 B written, verified)",
    ]


def test_a_receipt_of_a_file_that_was_left_alone():
    for dry_run, verb in ((False, "is"), (True, "would be")):
        *_, last = receipt_lines(receipt(written=0, dry_run=dry_run))
        assert last == f"out.pth {verb} unchanged (torch-zip, 2 tensors, 2.0 KiB)"


def test_a_receipt_of_several_files_names_each():
    files = (("out-1.pth", 1024), ("out-2.pth", 1024))
    assert list(receipt_lines(receipt(changes=(Change("cast", "done"),), files=files)))[1:3] == [
        "out-1.pth  1.0 KiB",
        "out-2.pth  1.0 KiB",
    ]


def test_nothing_changed_is_said():
    lines = list(receipt_lines(receipt(dry_run=True)))
    assert lines != list(receipt_lines(receipt(dry_run=True, left_out=("epoch",))))
    assert lines[0] == "keys, values and devices are unchanged"
    assert lines[-1].startswith("would write out.pth")
    assert len(list(receipt_lines(receipt(source="")))) == 1  # of `save`, which has no source


def test_a_receipt_as_a_document():
    made = receipt(changes=(Change("strip", "module taken off", 2),), files=(("a", 1), ("b", 2)))
    document = made.to_dict()
    assert document["schema"] == "ckptool.receipt/1"
    assert (document["source"], document["file"], document["size"]) == ("in.pth", "out.pth", 2048)
    assert document["changes"] == [{"kind": "strip", "text": "module taken off", "count": 2}]
    assert document["files"] == [{"file": "a", "size": 1}, {"file": "b", "size": 2}]


def test_nothing_of_a_list_is_wider_than_the_terminal():
    root = {
        "n" * 100: "text " * 50,
        "o" * 100: Opaque(Global("some.long.package.name", "C" * 60)),
        "t" * 100: tensor(floats(*range(6), key="k" * 50, device="cuda:3"), [1] * 30 + [2, 3]),
        "tied" * 30: 1,
    }
    for width in [72, 80, 120]:
        found = list(listing_lines(listing(root, hash=True), Look(width=width)))
        assert max(map(len, found)) <= width, width
