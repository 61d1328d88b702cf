"""Tensors that are more than a header and elements, compared."""

import pytest
import torch

from tests.comparison.comparisons import whats


def sparse(by):
    return torch.sparse_coo_tensor([[100_000 + by, 500_000]], [1.0, 2.0], (1_000_000,))


def compressed(by):
    return torch.sparse_csr_tensor([0, 1, 2], [100_000 + by, 5], [1.0, 2.0], (2, 1_000_000))


def nested(by):
    return torch.nested.nested_tensor([torch.ones(2 + by), torch.ones(3 - by)])


def per_channel(by):
    scales, zeros = torch.tensor([0.5 + by, 0.5]), torch.zeros(2, dtype=torch.int64)
    codes = torch.ones(2, 2, dtype=torch.int8)
    return torch._make_per_channel_quantized_tensor(codes, scales, zeros, 0)


def codes(by):
    return torch._make_per_tensor_quantized_tensor(
        torch.tensor([1, 2 + by], dtype=torch.int8), 9, 0
    )


STRUCTURES = {
    "coo": sparse,
    "csr": compressed,
    "nested": nested,
    "channels": per_channel,
    "codes": codes,
    "bytes": lambda by: torch.tensor([1 + by], dtype=torch.uint8).untyped_storage(),
}
"""Tensors whose second is another by what is no value."""


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about quantized and sparse tensors
class TestKinds:
    """Tensors that are made of parts."""

    @pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
    def test_sparse(self, compare, layout):
        dense = torch.zeros(4, 6)
        dense[1, 2] = 3.0
        makers = {
            "coo": lambda it: it.to_sparse(),
            "csr": lambda it: it.to_sparse_csr(),
            "csc": lambda it: it.to_sparse_csc(),
            "bsr": lambda it: it.to_sparse_bsr((2, 2)),
            "bsc": lambda it: it.to_sparse_bsc((2, 2)),
        }
        a = makers[layout](dense)
        assert compare({"l.a": a}, {"l.a": makers[layout](dense.clone())}).identical
        (row,) = compare({"l.a": a}, {"l.a": makers[layout](dense * 2)}).changed
        assert (row.what, row.place, row.difference.max_abs) == (("value",), "values", 3.0)
        moved = torch.zeros(4, 6)
        moved[3, 2] = 3.0
        (row,) = compare({"l.a": a}, {"l.a": makers[layout](moved)}).changed
        assert row.what == ("value",)
        assert "indices" in row.place
        (row,) = compare({"l.a": a}, {"l.a": dense}).changed
        assert (row.what, row.status, row.difference) == (("kind",), "T", None)

    @pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32])
    def test_quantized(self, compare, dtype):
        weight = torch.tensor([[0.5, 1.0], [2.0, 3.0]])
        a = torch.quantize_per_tensor(weight, 0.5, 3, dtype)
        assert compare({"l.a": a}, {"l.a": a.clone()}).identical
        elements = torch.quantize_per_tensor(weight + 1, 0.5, 3, dtype)
        (row,) = compare({"l.a": a}, {"l.a": elements}).changed
        assert (row.what, row.place, row.difference.max_abs) == (("value",), "codes", 2.0)
        scale = torch._make_per_tensor_quantized_tensor(a.int_repr(), 0.25, 3)
        for options in ({}, {"structure": True}, {"quick": True}):
            (row,) = compare({"l.a": a}, {"l.a": scale}, **options).changed
            assert (row.what, row.status, row.difference) == (("quantizer",), "M", None)
            assert (row.place, row.change) == ("quantizer/scale", ("0.5", "0.25"))
        zero = torch._make_per_tensor_quantized_tensor(a.int_repr(), 0.5, 4)
        (row,) = compare({"l.a": a}, {"l.a": zero}).changed
        assert (row.place, row.change) == ("quantizer/zero_point", ("3", "4"))
        assert compare({"l.a": a}, {"l.a": elements}, structure=True).identical

    def test_sparse_with_more_entries(self, compare):
        a, b = (torch.eye(size).to_sparse().coalesce() for size in (3, 3))
        b = torch.sparse_coo_tensor(b.indices()[:, :2], b.values()[:2], (3, 3))
        (row,) = compare({"l.a": a}, {"l.a": b}).changed
        assert (row.what, row.place, row.change) == (("value",), None, ("3 entries", "2 entries"))

    def test_quantized_per_channel(self, compare):
        weight = torch.ones(2, 2)

        def made(scale):
            scales = torch.tensor([scale, 0.5])
            integers = torch.quantize_per_tensor(weight, 0.5, 0, torch.qint8).int_repr()
            zeros = torch.zeros(2, dtype=torch.int64)
            return torch._make_per_channel_quantized_tensor(integers, scales, zeros, 0)

        assert compare({"l.a": made(0.5)}, {"l.a": made(0.5)}).identical
        (row,) = compare({"l.a": made(0.5)}, {"l.a": made(0.25)}).changed
        assert (row.what, row.place) == (("quantizer",), "quantizer/scale")
        assert row.difference.max_abs == 0.25

    def test_nested(self, compare):
        def made(value):
            return torch.nested.nested_tensor([torch.ones(2, 3), torch.full((4, 3), value)])

        assert compare({"l.a": made(1.0)}, {"l.a": made(1.0)}).identical
        assert whats(compare({"l.a": made(1.0)}, {"l.a": made(2.0)})) == {"l.a": ("value",)}

    def test_meta(self, compare):
        a, b = torch.empty(2, 3, device="meta"), torch.empty(3, 3, device="meta")
        found = compare({"l.a": a}, {"l.a": a})
        assert found.identical
        assert found.read == 0
        assert whats(compare({"l.a": a}, {"l.a": b})) == {"l.a": ("shape",)}

    def test_numpy_arrays(self, compare):
        array = torch.arange(6.0).numpy()
        assert compare({"l.a": array}, {"l.a": array.copy()}).identical
        found = compare({"l.a": array}, {"l.a": torch.arange(6.0)})
        assert whats(found) == {"l.a": ("kind",)}
        assert whats(compare({"l.a": array}, {"l.a": array + 1})) == {"l.a": ("value",)}

    def test_attributes_of_a_tensor(self, compare):
        a, b = torch.ones(2), torch.ones(2)
        a.tag, b.tag = "x", "y"
        (row,) = compare({"l.a": a}, {"l.a": b}).changed
        assert (row.what, row.place) == (("value",), "state/tag")
        assert compare({"l.a": a}, {"l.a": torch.ones(2)}).identical

    @pytest.mark.parametrize("layout", ["coo", "csr", "nested", "channels", "codes", "bytes"])
    def test_a_tolerance_is_for_values_alone(self, compare, layout):
        a, b = (STRUCTURES[layout](by) for by in (0, 1))
        for options in ({"atol": 100.0, "rtol": 0.0}, {"rtol": 100.0}):
            found = compare({"l.a": a}, {"l.a": b}, **options)
            assert (found.identical, found.close) == (False, 0)
            (row,) = (*found.changed, *found.values)
            assert row.what == ("quantizer" if layout == "channels" else "value",)

    def test_values_of_a_tensor_of_parts_are_close(self, compare):
        dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
        nested = [torch.nested.nested_tensor([dense[0], dense[1] * by]) for by in (1, 1.0001)]
        a = {"l.a": dense.to_sparse(), "l.b": dense.to_sparse_csr(), "l.c": nested[0]}
        more = dense * 1.0001
        b = {"l.a": more.to_sparse(), "l.b": more.to_sparse_csr(), "l.c": nested[1]}
        assert len(compare(a, b).changed) == 3
        found = compare(a, b, rtol=0.01)
        assert (found.identical, found.equal, found.close) == (True, 3, 3)
        a, b = {"o": {dense}}, {"o": {more}}
        assert compare(a, b).values[0].what == ("value",)
        found = compare(a, b, rtol=0.01)
        assert (found.identical, found.close) == (True, 1)

    def test_conjugates(self, compare):
        a = torch.tensor([1 + 2j, 3 - 4j])
        assert compare({"l.a": a.conj()}, {"l.a": a.conj().resolve_conj()}).identical
        assert not compare({"l.a": a.conj()}, {"l.a": a}).identical
