"""Is what we made what torch makes? Trees compared node by node, storage sharing included."""

from collections import OrderedDict

import numpy
import torch

_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Judge:
    """Compares trees, ours against torch's; `numpy` arrays of torch's count as tensors."""

    def __init__(self):
        self.seen = {}
        self.storages = {}

    def same(self, ours, theirs, at="root"):
        if id(theirs) in self.seen and not isinstance(theirs, (int, str, float, bytes)):
            assert self.seen[id(theirs)][0] is ours, f"{at}: shared in torch's tree only"
            return
        self.seen[id(theirs)] = (ours, theirs)
        if isinstance(theirs, numpy.ndarray):
            assert torch.equal(
                ours, torch.from_numpy(theirs.astype(theirs.dtype.newbyteorder("=")))
            ), at
        elif isinstance(theirs, torch.Tensor):
            self.tensors(ours, theirs, at)
        elif isinstance(theirs, torch.storage.TypedStorage):
            assert (type(ours), ours.dtype, ours.tolist()) == (
                type(theirs),
                theirs.dtype,
                theirs.tolist(),
            ), at
            self.shared(ours.untyped(), theirs.untyped(), at)
        elif isinstance(theirs, torch.UntypedStorage):
            assert list(ours) == list(theirs), at
            self.shared(ours, theirs, at)
        else:
            assert type(ours) is type(theirs), f"{at}: {type(ours)} where torch has {type(theirs)}"
            self.containers(ours, theirs, at)

    def containers(self, ours, theirs, at):
        if isinstance(theirs, dict):
            assert list(ours) == list(theirs), at
            for key in theirs:
                self.same(ours[key], theirs[key], f"{at}/{key}")
        elif isinstance(theirs, (list, tuple)):
            assert len(ours) == len(theirs), at
            for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
                self.same(mine, other, f"{at}/{index}")
        elif not isinstance(theirs, float) or theirs == theirs:
            assert ours == theirs, at
        if isinstance(theirs, OrderedDict):
            self.same(vars(ours), vars(theirs), f"{at}.__dict__")

    def tensors(self, ours, theirs, at):
        assert type(ours) is type(theirs), at
        for name in ("dtype", "layout", "device", "requires_grad", "is_leaf", "is_nested"):
            assert getattr(ours, name) == getattr(theirs, name), f"{at}: {name}"
        attributes = {
            key: value
            for key, value in vars(theirs).items()
            if key[:1] != "_" or key == "_is_buffer"
        }
        self.same({key: vars(ours).get(key) for key in attributes}, attributes, f"{at}.__dict__")
        if theirs.layout is torch.sparse_coo:
            assert ours.is_coalesced() == theirs.is_coalesced(), at
            self.parts((ours._indices(), ours._values()), (theirs._indices(), theirs._values()), at)
        elif theirs.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = [(t.crow_indices(), t.col_indices(), t.values()) for t in (ours, theirs)]
            self.parts(*parts, at)
        elif theirs.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts = [(t.ccol_indices(), t.row_indices(), t.values()) for t in (ours, theirs)]
            self.parts(*parts, at)
        elif theirs.layout is torch.jagged:
            self.parts((ours.values(), ours.offsets()), (theirs.values(), theirs.offsets()), at)
            assert (ours.lengths() is None) == (theirs.lengths() is None), at
            assert ours._ragged_idx == theirs._ragged_idx, at
        elif theirs.is_nested:
            self.parts(ours.unbind(), theirs.unbind(), at)
        else:
            self.strided(ours, theirs, at)
        if theirs.layout is not torch.strided:
            assert theirs.layout is torch.jagged or ours.shape == theirs.shape, at

    def parts(self, ours, theirs, at):
        assert len(ours) == len(theirs), at
        for mine, other in zip(ours, theirs, strict=True):
            self.strided(mine, other, at)

    def strided(self, ours, theirs, at):
        assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride()), at
        assert (ours.is_conj(), ours.is_neg()) == (theirs.is_conj(), theirs.is_neg()), at
        assert ours.is_quantized == theirs.is_quantized, at
        if theirs.is_quantized:
            assert ours.qscheme() == theirs.qscheme(), at
            assert torch.equal(ours.dequantize(), theirs.dequantize()), at
        if theirs.device.type == "meta":
            return
        if theirs.dtype not in (torch.quint4x2, torch.quint2x4):
            assert torch.equal(elements(ours), elements(theirs)), at
        if theirs.numel():
            self.shared(ours.untyped_storage(), theirs.untyped_storage(), at)

    def shared(self, ours, theirs, at):
        """Storages that are one in torch's tree are one in ours, and no others."""
        mine, other = ours.data_ptr(), theirs.data_ptr()
        if other:
            known = self.storages.setdefault(other, mine)
            assert known == mine, f"{at}: a storage is shared in one tree only"


def elements(tensor):
    """The bytes of the elements as integers, whatever the dtype, flags aside."""
    width = min(tensor.element_size(), 8)
    per = tensor.element_size() // width
    shape = (*tensor.shape, per) if per > 1 else tensor.shape
    stride = (*(step * per for step in tensor.stride()), 1) if per > 1 else tensor.stride()
    plain = torch.empty(0, dtype=_WIDTHS[width], device=tensor.device)
    return plain.set_(tensor.untyped_storage(), tensor.storage_offset() * per, shape, stride)


def assert_same(ours, theirs):
    """Whether our tree is torch's."""
    Judge().same(ours, theirs)
    assert_same_number_of_storages(ours, theirs)


def assert_same_number_of_storages(ours, theirs):
    counts = []
    for tree in (ours, theirs):
        pointers = set()
        todo, seen = [tree], set()
        while todo:
            node = todo.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if (
                isinstance(node, torch.Tensor)
                and node.layout is torch.strided
                and not node.is_nested
            ):
                pointers.add(node.untyped_storage().data_ptr())
            elif isinstance(node, dict):
                todo.extend(node.values())
            elif isinstance(node, (list, tuple)):
                todo.extend(node)
        counts.append(len(pointers - {0}))
    assert counts[0] == counts[1], "ours shares other storages than torch's"
