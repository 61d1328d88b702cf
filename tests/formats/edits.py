"""Files edited in place, and what torch reads from them by every way that it has to load."""

import warnings
import zipfile
from contextlib import contextmanager

import torch

from ckptool.core.model import OrderedMap
from ckptool.core.tree import rebuild
from ckptool.formats import load_format, open_checkpoint
from ckptool.transforms import Strip, Wrap, make_remap
from tests.test_fixtures import judge
from tests.test_written import offsets

CHANGES = {
    "as it is": lambda checkpoint: checkpoint,
    "strip": Strip(),
    "add": Wrap(),
    "to cpu": lambda checkpoint: make_remap({"*": "cpu"})(checkpoint),
    "to cuda:0": lambda checkpoint: make_remap({"*": "cuda:0"})(checkpoint),
    "turned round": lambda checkpoint: mapped(checkpoint, lambda items: reversed(list(items))),
}


def mapped(checkpoint, change):
    """Every dict made of other items: `change` gets those that it has."""

    def made(mapping):
        new = type(mapping)(change(mapping.items()))
        if isinstance(mapping, OrderedMap):
            new.attributes = mapping.attributes
        return new

    return checkpoint.with_root(rebuild(checkpoint.root, mapping=made))


def apply(path, patch):
    """Put a patch into a file, as plainly as can be."""
    with open(path, "r+b") as file:
        file.seek(patch.offset)
        file.write(patch.data)


def edit(path, change):
    """Edit a file in place; the plan, or None where the format has none."""
    with open_checkpoint(path) as checkpoint:
        plan = load_format(checkpoint.format).plan_edit(change(checkpoint))
    if plan is not None:
        apply(path, plan.patch)
        assert path.stat().st_size == plan.size
    return plan


def paths(checkpoint):
    """The paths of its tensors, in order, as an oracle has them."""
    return [tuple(judge().jsonable(path)) for path, _ in checkpoint.tensors()]


@contextmanager
def computed_offsets():
    """Torch computes where storages are, if the file lets it, and says if that is wrong."""
    load = torch.utils.serialization.config.load
    load.calculate_storage_offsets = True
    try:
        yield
    finally:
        load.calculate_storage_offsets = False


def described(path, **options):
    """What torch reads from a file."""
    tags, kept = {}, []  # a storage that is gone may lend its address to another

    def remember(storage, tag):
        if storage.nbytes():
            tags[storage.data_ptr(), storage.data_ptr() + storage.nbytes()] = tag
        kept.append(storage)
        return storage

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return judge().describe(torch.load(path, map_location=remember, **options), tags)


def every_way(path, *, safe):
    """What torch reads by each way that it has to load a file, and its name."""
    yield "plainly", described(path, weights_only=False)
    yield "mapped", described(path, weights_only=False, mmap=True)
    with computed_offsets():
        yield "mapped, computed", described(path, weights_only=False, mmap=True)
    if safe:
        yield "safely", described(path, weights_only=True)
        yield "safely, mapped", described(path, weights_only=True, mmap=True)


def meta_offsets(path):
    """Where torch says that tensors are when it is to load none of them; None where it cannot."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return offsets(torch.load(path, map_location="meta", weights_only=False))
        except NotImplementedError:  # quantized and nested tensors, on the meta device
            return None


def real_offsets(path):
    """Where the directory says that they are."""
    with open_checkpoint(path) as checkpoint:
        return {
            path: tensor.storage.data.offset
            for path, tensor in checkpoint.tensors()
            if tensor.storage is not None and tensor.storage.data is not None
        }


def names(path):
    """The records in the order of the directory, without the folder."""
    with zipfile.ZipFile(path) as zipped:
        return [name.partition("/")[2] for name in zipped.namelist()]
