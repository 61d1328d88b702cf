"""A file read back: what is right passes, and whatever is wrong with it is noticed."""

import os
import threading

import pytest
import torch

from ckptool.core.model import Storage, TensorRef
from ckptool.core.tree import rebuild
from ckptool.errors import CorruptFile, WriteError
from ckptool.files.atomic import FileOutput
from ckptool.files.computed import ComputedSource
from ckptool.files.source import ByteRange
from ckptool.formats import (
    WRITABLE,
    load_format,
    load_writable_format,
    open_checkpoint,
    shard_format_of,
)
from ckptool.transforms import extract_state_dict
from ckptool.writing.verification import verify

ONE_FILE = [
    name for name in WRITABLE if not (shard_format_of(name) or load_format(name).index_name)
]

BIG = 70_000
"""Elements that are copied by the kernel, not gathered with their neighbors."""


@pytest.fixture
def source(tmp_path):
    weight = torch.arange(float(BIG))
    state = {"a": weight, "b": weight * 2, "tied": weight, "t": weight.reshape(7, -1).t()}
    torch.save({**state, "flipped": torch.arange(6).to(torch.complex64).conj()}, tmp_path / "m.pth")
    with open_checkpoint(tmp_path / "m.pth") as checkpoint:
        yield checkpoint


def written(checkpoint, format, path):
    """The streams of a file of `checkpoint` at `path`."""
    plan = load_writable_format(format).plan(checkpoint)
    with open(path, "wb", buffering=0) as file:
        output = FileOutput(file.fileno(), plan.size)
        plan.files[0].write(output)
        output.finish()
    return output.streamed


@pytest.mark.parametrize("format", ONE_FILE)
def test_what_was_written_passes_and_is_read_once(source, tmp_path, format):
    seen = []
    streamed = written(source, format, tmp_path / "out")
    verify(source, str(tmp_path / "out"), streamed, lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > BIG * 4


@pytest.mark.parametrize("format", ONE_FILE)
def test_a_flipped_bit_anywhere_in_the_tensors_is_noticed(source, tmp_path, format):
    path = tmp_path / "out"
    streamed = written(source, format, path)
    content = path.read_bytes()
    with open_checkpoint(path) as found:
        ranges = {(t.storage.data.offset, t.storage.data.length) for _, t in found.tensors()}
    for offset, length in ranges:
        for place in (offset, offset + length // 2, offset + length - 1):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            with pytest.raises(WriteError, match="verification failed"):
                verify(source, str(path), streamed)


@pytest.mark.parametrize("format", ONE_FILE)
def test_a_source_that_was_damaged_before_is_told_from_a_copy_that_failed(tmp_path, format):
    source = tmp_path / "m.pth"
    torch.save({"w": torch.arange(float(BIG))}, source)
    with open_checkpoint(source) as before:
        place = before["w"].storage.data.offset
    content = source.read_bytes()
    source.write_bytes(content[:place] + b"!" + content[place + 1 :])
    threads = set(threading.enumerate())
    with open_checkpoint(source) as damaged:
        streamed = written(damaged, format, tmp_path / "out")
        with pytest.raises(CorruptFile, match=r"is damaged") as caught:
            verify(damaged, str(tmp_path / "out"), streamed)
    assert caught.value.file == str(source)
    assert not set(threading.enumerate()) - threads


def swapped(state):
    return {**state, "a": state["b"], "b": state["a"]}


def renamed(state):
    return {("c" if name == "a" else name): value for name, value in state.items()}


def reordered(state):
    return dict(reversed(state.items()))


def shorter(state):
    return dict(list(state.items())[:-1])


@pytest.mark.parametrize("format", ONE_FILE)
def test_another_tree_is_noticed(source, tmp_path, format):
    for change in (swapped, renamed, reordered, shorter):
        streamed = written(source.with_root(change(source.root)), format, tmp_path / "out")
        with pytest.raises(WriteError, match="verification failed"):
            verify(source, str(tmp_path / "out"), streamed)


def test_a_file_that_cannot_be_read_back_is_noticed(source, tmp_path):
    streamed = written(source, "torch-zip", tmp_path / "out")
    os.truncate(tmp_path / "out", 1000)
    with pytest.raises(WriteError, match="cannot be read back"):
        verify(source, str(tmp_path / "out"), streamed)


def doubled(checkpoint, calls):
    """Every storage as one that is computed; `calls` counts the bytes that were."""

    def computed(storage):
        def fill(offset, buffer):
            calls.append(len(buffer))
            storage.data.read_into(buffer, offset)

        data = ByteRange(ComputedSource("m.pth", storage.nbytes, fill), 0, storage.nbytes)
        return Storage(storage.key, data, storage.nbytes)

    known = {}

    def leaf(node):
        if isinstance(node, TensorRef):
            new = known.setdefault(id(node.storage), computed(node.storage))
            return TensorRef(
                node.dtype, node.shape, node.stride, node.offset, new, "cpu", flags=node.flags
            )
        return node

    return checkpoint.with_root(rebuild(checkpoint.root, leaf))


@pytest.mark.parametrize("format", ONE_FILE)
def test_what_was_computed_is_not_computed_again(source, tmp_path, format):
    calls = []
    plain = source.with_root({"a": source.root["a"], "b": source.root["b"]})
    made = doubled(extract_state_dict(plain), calls)
    streamed = written(made, format, tmp_path / "out")
    once = sum(calls)
    verify(made, str(tmp_path / "out"), streamed)
    assert once == 2 * 4 * BIG
    assert sum(calls) - once <= 4 * 4096


def halves(checkpoint, threads):
    """Two tensors over one computed storage; `threads` gets those that compute it."""

    def fill(offset, buffer):
        threads.add(threading.current_thread())
        checkpoint["w"].storage.data.read_into(buffer, offset)

    size = checkpoint["w"].storage.nbytes
    storage = Storage("0", ByteRange(ComputedSource("m.pth", size, fill), 0, size), size)
    half = size // 8
    first, second = (
        TensorRef("float32", (half,), (1,), offset, storage, "cpu") for offset in (0, half)
    )
    return checkpoint.with_root({"first": first, "second": second})


@pytest.mark.parametrize("format", ONE_FILE)
def test_threads_never_read_what_is_computed_or_inflated(tmp_path, format):
    """Such a source keeps a place in it, and may stand behind several tensors."""
    torch.save({"w": torch.arange(float(10 * BIG))}, tmp_path / "m.pth")
    with open_checkpoint(tmp_path / "m.pth") as source:
        threads = set()
        made = halves(source, threads)
        streamed = written(made, format, tmp_path / "out")
        assert threads == {threading.current_thread()}
        verify(made, str(tmp_path / "out"), streamed)
        assert threads == {threading.current_thread()}
