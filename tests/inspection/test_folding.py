"""A listing as a tree: levels, totals, folded layers."""

from ckptool.inspection.listing import build_tree, list_tensors
from tests.inspection.handmade import checkpoint, floats, tensor


def tree_of(root):
    return build_tree(list_tensors(checkpoint(root)))


def shapes(names):
    return {name: tensor(floats(*[0.0] * 6), shape) for name, shape in names.items()}


def outline(node):
    """Labels and children, as nested dicts."""
    return {child.label: outline(child) for child in node.children}


def test_dots_of_the_last_key_and_keys_of_the_path_make_levels():
    root = tree_of({"model": shapes({"conv.weight": [2, 3], "conv.bias": [2], "scale": []})})
    assert outline(root) == {"model": {"conv": {"weight": {}, "bias": {}}, "scale": {}}}
    assert (root.tensors, root.elements, root.nbytes) == (3, 9, 36)


def test_equal_layers_are_folded_and_counted():
    names = {f"layers.{n}.{part}": [2, 3] for n in range(32) for part in ("q.weight", "k.weight")}
    (layers,) = tree_of(shapes(names)).children
    (folded,) = layers.children
    assert folded.label == "{0..31}"
    assert (folded.count, folded.tensors, folded.elements) == (32, 64, 384)
    assert outline(folded) == {"q": {"weight": {}}, "k": {"weight": {}}}


def test_a_layer_that_differs_stands_apart():
    names = {f"layers.{n}.weight": [2, 3] if n != 2 else [3, 2] for n in range(6)}
    (layers,) = tree_of(shapes(names)).children
    assert [child.label for child in layers.children] == ["{0..1,3..5}", "2"]


def test_layers_on_different_devices_or_of_different_names_stand_apart():
    root = {
        "l.0.w": tensor(floats(1.0, device="cuda:0"), [1]),
        "l.1.w": tensor(floats(1.0, device="cuda:1"), [1]),
        "l.2.v": tensor(floats(1.0, device="cuda:1"), [1]),
    }
    (layers,) = tree_of(root).children
    assert [child.label for child in layers.children] == ["0", "1", "2"]


def test_only_numbers_are_folded():
    names = {"conv1.weight": [2, 3], "conv2.weight": [2, 3], "01.w": [1], "1.w": [1]}
    assert list(outline(tree_of(shapes(names)))) == ["conv1", "conv2", "01", "1"]


def test_numbered_tensors_themselves_are_folded():
    root = tree_of({"parts": list(shapes({"a": [2], "b": [2], "c": [2]}).values())})
    assert outline(root) == {"parts": {"{0..2}": {}}}


def test_a_name_that_is_a_tensor_and_a_module_is_both():
    (node,) = tree_of(shapes({"a": [2], "a.b": [3]})).children
    assert node.tensor is not None
    assert (node.tensors, node.elements) == (2, 5)


def test_a_name_of_a_million_dots_is_cut():
    root = tree_of(shapes({"a" + "." * 1_000_000: [1]}))
    depth = 0
    while root.children:
        (root,) = root.children
        depth += 1
    assert depth == 101


def test_the_document_nests():
    document = tree_of(shapes({"l.0.w": [2, 3], "l.1.w": [2, 3]})).to_dict()
    (layers,) = document["children"]
    (folded,) = layers["children"]
    (weight,) = folded["children"]
    assert (folded["label"], folded["count"], folded["dtype"]) == ("{0..1}", 2, None)
    assert (weight["label"], weight["dtype"], weight["shape"]) == ("w", "float32", (2, 3))


def test_no_tensors_make_an_empty_tree():
    root = tree_of({"epoch": 3})
    assert (root.tensors, root.children) == (0, ())


def test_a_lone_tensor_stands_under_an_empty_name():
    root = tree_of(tensor(floats(1.0), [1]))
    assert outline(root) == {"": {}}
