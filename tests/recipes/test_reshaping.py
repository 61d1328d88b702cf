"""Other shapes when asked for, and ranks of Megatron joined: torch is the judge."""

from itertools import product

import numpy
import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn import functional

import ckptool
from ckptool.errors import CorruptFile, NameCollision, NotRepresentable, UsageError
from ckptool.recipes.reshaping import Concat
from tests.conversions import convert_by_options
from tests.formats.distributed.megatron_files import (
    EMBEDDING,
    NORM,
    PROJ,
    QKV,
    RULES,
    TIED,
    whole,
    write_ranks,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def changed(tmp_path, content, **options):
    """What torch reads of the result; the texts of its changes."""
    torch.save(content, tmp_path / "in.pth")
    receipt = convert_by_options(
        tmp_path / "in.pth", tmp_path / "out.pth", overwrite=True, **options
    )
    return torch.load(tmp_path / "out.pth"), [one.text for one in receipt.changes]


def test_rows_are_cut_or_added(tmp_path):
    for dtype, rows in product(DTYPES, [1, 9, 10, 11, 40]):
        old = torch.randn(10, 3, 2).to(dtype)
        found, texts = changed(
            tmp_path, {"emb.w": old, "x": old[:2].clone()}, resize=[f"emb.*={rows}"]
        )
        assert torch.equal(found["emb.w"][:10], old[:rows]), (dtype, rows)
        mean = old.double().mean(0).to(dtype)
        assert torch.equal(found["emb.w"][10:], mean.expand(max(rows - 10, 0), 3, 2)), (dtype, rows)
        assert torch.equal(found["x"], old[:2]), (dtype, rows)
        told = (
            f"emb.w: [10, 3, 2] -> [{rows}, 3, 2], " if rows != 10 else "emb.w: already has 10 rows"
        )
        assert texts[0].startswith(told), (dtype, rows)
        found, _ = changed(tmp_path, {"emb.w": old}, resize=[f"emb.w={rows}:zero"])
        assert not found["emb.w"][10:].any(), (dtype, rows)
        assert found["emb.w"].shape[0] == rows, (dtype, rows)


def test_a_numpy_array_becomes_a_tensor_of_the_new_shape(tmp_path):
    old = numpy.arange(12.0).reshape(4, 3)
    for options, expected in (
        ({"resize": ["a=2"]}, {"a": old[:2]}),
        ({"resize": ["a=5:zero"]}, {"a": numpy.vstack([old, numpy.zeros((1, 3))])}),
        ({"resize": ["a=4"]}, {}),
        ({"split": ["a=>b,c@0"]}, {"b": old[:2], "c": old[2:]}),
        ({"fuse": ["a,z=>b@0"]}, {"b": numpy.vstack([old, old])}),
    ):
        torch.save({"a": old, "z": old.copy()}, tmp_path / "in.pth")
        step, target = ckptool.Reshape(**options), tmp_path / "out.pth"
        receipt = ckptool.convert(tmp_path / "in.pth", target, step, overwrite=True)
        found = torch.load(target, weights_only=False)
        for name, array in expected.items():
            assert torch.equal(found[name], torch.from_numpy(array)), options
        told = any("numpy array" in one.text for one in receipt.changes)
        assert told == bool(expected), options


def test_what_is_tied_changes_with_it_and_stays_tied(tmp_path):
    weight = torch.randn(6, 2)
    found, _ = changed(tmp_path, {"emb": weight, "head": weight}, resize=["emb=8"])
    assert found["emb"].data_ptr() == found["head"].data_ptr()
    assert found["head"].shape == (8, 2)


def test_position_embeddings_are_those_of_timm(tmp_path):
    for dtype, prefix, grid in product(DTYPES[:3], [0, 1, 5], [(4, 4), (7, 3), (2, 2)]):
        old = torch.randn(1, prefix + 16, 6).to(dtype)
        rule = f"pos={grid[0]}x{grid[1]}"
        found, _ = changed(tmp_path, {"pos": old}, interpolate_pos=[rule])
        image = old[:, prefix:].float().reshape(1, 4, 4, 6).permute(0, 3, 1, 2)
        image = functional.interpolate(image, size=grid, mode="bicubic", antialias=True)
        image = image.permute(0, 2, 3, 1).reshape(1, -1, 6).to(dtype)
        expected = old if grid == (4, 4) else torch.cat([old[:, :prefix], image], dim=1)
        assert torch.equal(found["pos"], expected), (dtype, prefix, grid)


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_are_those_of_torch(tmp_path, dim):
    whole = torch.randn(6, 9).t() if dim == 0 else torch.randn(4, 9)
    split = [f"*.qkv.w=>*.q.w,*.k.w,*.v.w@{dim}"]
    found, _ = changed(tmp_path, {"l.0.qkv.w": whole, "b": torch.ones(1)}, split=split)
    parts = torch.chunk(whole, 3, dim)
    assert list(found) == ["l.0.q.w", "l.0.k.w", "l.0.v.w", "b"]
    assert all(torch.equal(found[f"l.0.{n}.w"], part) for n, part in zip("qkv", parts, strict=True))
    again, texts = changed(tmp_path, found, fuse=[f"*.q.w,*.k.w,*.v.w=>*.qkv.w@{dim}"])
    assert torch.equal(again["l.0.qkv.w"], whole)
    part, full = ([*parts[0].shape], [*whole.shape])
    parts_text = ", ".join(f"l.0.{n}.w {part}" for n in "qkv")
    assert texts[-1] == f"{parts_text} -> l.0.qkv.w {full}, along dimension {dim}"


def test_parts_of_other_sizes_are_fused_and_told_by_kind(tmp_path):
    sizes = {"q": 6, "k": 2, "v": 2}
    state = {f"l.{n}.{w}": torch.randn(size, 4) for n in range(3) for w, size in sizes.items()}
    state = {**state, "step": 3, "b": torch.ones(1)}
    fuse = ["*.q,*.k,*.v=>*.qkv@0"]
    found, texts = changed(tmp_path, state, fuse=fuse)
    assert list(found) == ["l.0.qkv", "l.1.qkv", "l.2.qkv", "b", "step"]
    for n in range(3):
        assert torch.equal(found[f"l.{n}.qkv"], torch.cat([state[f"l.{n}.{w}"] for w in sizes]))
    shapes = ", ".join(f"l.{{0..2}}.{w} [{size}, 4]" for w, size in sizes.items())
    assert texts[-1] == f"{shapes} -> l.{{0..2}}.qkv [10, 4], along dimension 0"
    state["l.1.k"] = torch.randn(2, 5)
    with pytest.raises(
        UsageError,
        match=r"'l\.1\.k' of shape \[2, 5\] does not fit .*: a dimension is 5, but \.\.\. is 4",
    ):
        changed(tmp_path, state, fuse=fuse)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(2, 4), st.data(),
    st.sampled_from(DTYPES),
)  # fmt: skip
def test_what_is_split_and_fused_is_as_before(tmp_path_factory, shape, count, data, dtype):
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape[dim] *= count
    whole = torch.randn(shape).to(dtype)
    names = ",".join(f"*.p{n}" for n in range(count))
    folder = tmp_path_factory.getbasetemp()
    parts, _ = changed(folder, {"a.w": whole}, split=[f"*.w=>{names}@{dim}"])
    again, _ = changed(folder, parts, fuse=[f"{names}=>*.w@{dim}"])
    assert torch.equal(again["a.w"], whole)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"resize": ["emb=many"]}, UsageError, "not a glob with a number of rows"),
        ({"resize": ["nobody=3"]}, UsageError, "no tensor of the model matches"),
        ({"resize": ["number=3"]}, UsageError, "without rows"),
        ({"resize": ["ids=9"]}, UsageError, "has no mean"),
        ({"interpolate_pos": ["emb=2"]}, UsageError, "not a glob with a grid"),
        ({"interpolate_pos": ["emb=2x2"]}, UsageError, "cannot be a position embedding"),
        (
            {"split": ["emb=>a,b,c@0"]},
            UsageError,
            r"4 is not divisible into \(part \+ part \+ part\)",
        ),
        (
            {"split": ["emb=>a@0"]},
            UsageError,
            "'emb=>a@0' does not name one whole tensor and its parts",
        ),
        ({"split": ["emb=>a,ids@0"]}, NameCollision, "ids"),
        (
            {"fuse": ["emb,lost=>a@0"]},
            UsageError,
            "'lost' is missing, but belongs to emb: emb, lost -> a",
        ),
        (
            {"fuse": ["emb,ids=>a@0"]},
            UsageError,
            r"'ids' is int64 \[4\], but 'emb' is float32 \[4, 3\]",
        ),
        ({"fuse": ["emb,emb=>a@0"]}, UsageError, "has a part twice"),
        (
            {"fuse": ["p.*,*.q=>f.*@0"]},
            UsageError,
            r"'p\.q' is used by another rule, but belongs to p\.p",
        ),
        ({"split": ["packed=>a,b@0"]}, NotRepresentable, "'packed' is a .* sparse_coo tensor"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, options, error, text):
    with torch.sparse.check_sparse_tensor_invariants():
        packed = torch.sparse_coo_tensor([[0]], [1.0], (2,))
    content = {
        "emb": torch.randn(4, 3), "ids": torch.arange(4), "number": torch.tensor(1.0),
        "packed": packed, "p.q": torch.ones(2), "q.q": torch.ones(2), "p.p": torch.ones(2),
    }  # fmt: skip
    with pytest.raises(error, match=text):
        changed(tmp_path, content, **options)
    assert not (tmp_path / "out.pth").exists()


def test_an_optimizer_would_no_longer_fit(tmp_path):
    net = torch.nn.Linear(3, 4)
    optimizer = torch.optim.Adam(net.parameters())
    content = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    with pytest.raises(UsageError, match="has an optimizer"):
        changed(tmp_path, content, resize=["weight=9"])
    found, _ = changed(tmp_path, content, resize=["weight=9"], model_only=True)
    assert found["weight"].shape == (9, 3)


def test_big_endian_numbers_are_the_same(fixtures, tmp_path):
    source, name = fixtures / "archives" / "big_endian.pth", "fc.weight"
    old = ckptool.load_state_dict(source)[name]
    for rule, rows in (("4", 4), ("1", 1)):
        ckptool.convert(
            source, tmp_path / "o.pth", ckptool.Reshape(resize=[f"{name}={rule}"]), overwrite=True
        )
        found = ckptool.load_state_dict(tmp_path / "o.pth")[name]
        assert torch.equal(found[:2], old[:rows])
        assert torch.equal(found[2:], old.mean(0).expand(max(rows - 2, 0), 3))


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
@pytest.mark.parametrize(
    "options",
    [
        {"resize": ["a=6"]}, {"resize": ["a=20"]}, {"resize": ["a=20:zero"]},
        {"split": ["a=>b,c@0"]}, {"split": ["a=>b,c@1"]},
        {"fuse": ["a,z=>b@0"]}, {"fuse": ["z,a=>b@1"]},
    ],
)  # fmt: skip
def test_damage_is_not_given_a_checksum_of_its_own(tmp_path, options, ending):
    content = {"a": torch.randn(12, 40), "z": torch.randn(12, 40)}
    torch.save(content, tmp_path / "in.pth")
    convert_by_options(tmp_path / "in.pth", tmp_path / f"whole.{ending}", **options)
    raw = bytearray((tmp_path / "in.pth").read_bytes())
    raw[raw.find(content["a"].numpy().tobytes()) + 100] ^= 1
    (tmp_path / "in.pth").write_bytes(raw)
    with pytest.raises(CorruptFile, match="CRC-32"):
        convert_by_options(tmp_path / "in.pth", tmp_path / f"out.{ending}", **options)
    assert not (tmp_path / f"out.{ending}").exists()


NET = "torch-2.13.0/dp_full_cuda3.pth"


@pytest.mark.parametrize(
    ("world", "target"), [(1, "model.pth"), (2, "model.safetensors"), (4, "model.pth")]
)
def test_the_model_is_whole(tmp_path, world, target):
    model = whole()
    folder = write_ranks(tmp_path / "iter_0000100", model, world)
    rules = [*RULES, "output_layer.*=0"]
    ckptool.convert(folder, tmp_path / target, Concat(rules), ckptool.Take(model_only=True))
    made = ckptool.load(tmp_path / target)
    assert made.keys() - {TIED, "decoder.layers.0._extra_state"} == model.keys()
    assert all(torch.equal(made[name], one) for name, one in model.items())
    assert made[TIED].data_ptr() == made[EMBEDDING].data_ptr()


def test_what_lies_beside_the_model_is_of_rank_0_or_left_out(tmp_path):
    folder = write_ranks(tmp_path / "iter_0000100", whole())
    rules = [*RULES, "output_layer.*=0"]
    receipt = ckptool.convert(folder, tmp_path / "all.pth", Concat(rules))
    made = torch.load(tmp_path / "all.pth", weights_only=False)
    assert (made["iteration"], made["args"].rank) == (100, 0)
    assert not {"optimizer", "rng_state"} & made.keys()
    _, change, kept = receipt.changes  # the first is of the format
    assert (change.kind, change.count) == ("concat", 4)
    assert kept.text == f"kept one copy of tensors that are equal in all ranks: model/{NORM}"
    assert receipt.left_out == ("entries of single ranks (optimizer, rng_state)",)


def test_a_tensor_without_a_rule_that_differs_is_named(tmp_path):
    folder = write_ranks(tmp_path / "iter_0000100", whole())
    with pytest.raises(
        UsageError, match="its ranks differ in 2 tensors, but no rule joins them:"
    ) as caught:
        ckptool.convert(folder, tmp_path / "m.pth", Concat(["*embed*=0", "*output*=0"]))
    assert QKV in str(caught.value)
    assert PROJ in str(caught.value)
    assert NORM not in str(caught.value)
    assert not (tmp_path / "m.pth").exists()


def change_rank(folder, change):
    path = folder / "mp_rank_01" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    change(state["model"])
    torch.save(state, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.pop(NORM), "has tensors that only some ranks have: .*norm.weight"),
        (
            lambda model: model.update(more=torch.ones(1)),
            "has tensors that only some ranks have: 'model/more'",
        ),
        (
            lambda model: model.update({NORM: torch.ones(8)}),
            "ranks differ in 1 tensor, .*norm",
        ),
        (
            lambda model: model.update({QKV: torch.ones(6, 7)}),
            r"float32 \[6, 7\], but 'mp_rank_00/.*' is bfloat16 \[6, 8\]",
        ),
        (
            lambda model: model.update({QKV: torch.ones(6, 8)}),
            r"float32 \[6, 8\], but 'mp_rank_00/.*' is bfloat16 \[6, 8\]",
        ),
    ],
)
def test_ranks_that_do_not_fit_are_refused(tmp_path, change, message):
    folder = write_ranks(tmp_path / "iter_0000100", whole())
    change_rank(folder, change)
    with pytest.raises(UsageError, match=message):
        ckptool.convert(folder, tmp_path / "m.pth", Concat([*RULES, "output_layer.*=0"]))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (["*.weight"], "not a glob with a dimension"),
        (["=0"], "not a glob with a dimension"),
        (["*=-1"], "not a glob with a dimension"),
        (["*.nothing=0", "*=0"], r"no tensor of the model matches '\*.nothing'"),
        (["*=1"], r"norm.weight' of shape \[8\] .*it has 1 dimensions"),
    ],
)
def test_a_rule_that_is_none_is_refused(tmp_path, rules, message):
    folder = write_ranks(tmp_path / "iter_0000100", whole())
    with pytest.raises(UsageError, match=message):
        ckptool.convert(folder, tmp_path / "m.pth", Concat(rules))


def test_a_file_of_one_process_has_no_ranks(tmp_path):
    torch.save({"model": whole()}, tmp_path / "one.pth")
    with pytest.raises(UsageError, match="has no Megatron ranks to concatenate"):
        ckptool.convert(tmp_path / "one.pth", tmp_path / "m.pth", Concat(RULES))


def test_what_was_joined_from_ranks_is_not_split_along_the_same_dimension(tmp_path):
    folder = write_ranks(tmp_path / "iter_0000100", whole())
    split = ckptool.Reshape(split=["*qkv.weight=>*q.weight,*k.weight,*v.weight@0"])
    with pytest.raises(
        ckptool.UsageError, match="each rank has a share of every part of"
    ) as caught:
        ckptool.convert(folder, tmp_path / "m.pth", Concat([*RULES, "output_layer.*=0"]), split)
    assert "--recipe llama-megatron-to-hf" in caught.value.hint
    assert not (tmp_path / "m.pth").exists()
