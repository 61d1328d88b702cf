"""Plan a DCP folder: items and their index, or only an index over existing items.

The index has classes that torch 2.2 to 2.13 can import: `TensorProperties` is that of
torch/distributed/_shard, which later versions keep next to their own. Items are divided as in
torch/distributed/checkpoint/_traverse.py (torch 2.4 and later; in 2.2 a dict or list without
tensors is one item).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import Global, Opaque, Path, Size, TensorRef, make_plain_tensor
from ckptool.core.tree import name_of, walk_everything
from ckptool.errors import NotRepresentable
from ckptool.files.place import place_of
from ckptool.formats.base import FolderFormat, Member, NewFile, WritePlan
from ckptool.formats.distributed.placements import row_major_data
from ckptool.formats.safetensors import describe_losses
from ckptool.formats.torch_zip import TORCH_ZIP
from ckptool.symbolic.encoder import encode
from ckptool.words import listed, printable

if TYPE_CHECKING:
    from ckptool.files.atomic import FileOutput

_DCP_MODULE = "torch.distributed.checkpoint"
_SHARDED_MODULE = "torch.distributed._shard.sharded_tensor.metadata"
_CONTIGUOUS_FORMAT = (0,)
"""The member TORCH_CONTIGUOUS_FORMAT; one tuple for all tensors, so that it is pickled once."""
_RUN_FILE = "run.pth"
"""The file of `ckptool train --sharded` next to the index: its optimizer groups have names."""
_IsItem = Callable[[Path, Any], bool]
"""Returns True if a node is one item, regardless of its content."""


def plan_folder(checkpoint: Checkpoint, format: FolderFormat, max_bytes: int | None) -> WritePlan:
    """Plan an index, and files of at most `max_bytes` bytes each, unless one item is larger.

    Each tensor or value is an item: a torch.save file in one of the files. Tied tensors share one.

    Raises:
        NotRepresentable: if the tree is not a dict, two entries get the same name, or a tensor has
            no plain elements.
    """
    entries = _flatten(checkpoint)
    described: dict[str, Opaque] = {}
    stored: dict[Opaque, Opaque] = {}
    files = _Files(checkpoint, "__0_{}.distcp", max_bytes)
    infos_of_tensors: dict[Any, Opaque] = {}  # by place in the source, the same for tied tensors
    for name, (_, leaf) in entries.items():
        if not isinstance(leaf, TensorRef):
            described[name] = _describe_value()
            stored[_make_index_key(name, None)] = files.add(leaf)
            continue
        tensor = _to_plain_tensor(name, leaf, checkpoint.path)
        described[name] = _describe_tensor(tensor)
        info = infos_of_tensors.get(leaf.place) or files.add(tensor)
        if leaf.place is not None:
            infos_of_tensors[leaf.place] = info
        offsets = Size((0,) * len(tensor.shape))  # the item is the whole tensor
        stored[_make_index_key(name, offsets)] = info
    state = {
        "state_dict_metadata": described,
        "planner_data": {name: path for name, (path, _) in entries.items()},
        "storage_data": stored,
    }
    index = _make_object(f"{_DCP_MODULE}.metadata", "Metadata", state)
    return replace(
        files.plan(format, index), left_out=tuple(_describe_omissions(checkpoint.root, entries))
    )


def plan_edit(checkpoint: Checkpoint, format: FolderFormat, index: Opaque) -> WritePlan:
    """Plan a new index for a folder, over its existing items.

    Tensors can only be renamed or removed. Changed values are written to a separate file. The bytes
    of removed items stay in the folder.

    Args:
        checkpoint: A tree over the tensors of the folder.
        format: The format of the folder.
        index: The content of its `.metadata`.

    Raises:
        NotRepresentable: if more than names changed, or something outside the items.
    """
    state = index.attributes
    existing = _ExistingItems(checkpoint, state)
    existing_names = place_of(checkpoint.path).list_names(checkpoint.path)
    edit_number = next(  # the first without files
        n for n in range(len(existing_names) + 1) if f"__ckptool{n}_0.distcp" not in existing_names
    )
    files = _Files(checkpoint, f"__ckptool{edit_number}_{{}}.distcp", max_bytes=None)
    # The parts of the new index: by name, by `MetadataIndex`, and by name.
    described: dict[str, Any] = {}
    stored: dict[Opaque, Opaque] = {}
    paths: dict[str, Path] = {}
    for path, leaf in _flatten(checkpoint, existing.is_item).values():
        if path[0] in existing.extra_keys:  # in another file, not in the index
            continue
        old_name = existing.find_old_name(path, leaf)
        name = existing.make_new_name(old_name, path)
        if name in described:
            raise unwritable_error(checkpoint, f"two entries would become {printable(name)!r}")
        paths[name] = path
        if name != old_name and _RUN_FILE in existing_names:
            raise unwritable_error(
                checkpoint,
                f"{_RUN_FILE}, which is not rewritten, also contains the parameter names",
            )
        if old_name is None:  # a new or changed value
            described[name] = _describe_value()
            stored[_make_index_key(name, None)] = files.add(leaf)
            continue
        described[name] = state["state_dict_metadata"][old_name]
        for key, info in existing.stored[old_name]:
            stored[key if name == old_name else _replace_state(key, fqn=name)] = info
    new_state = {"state_dict_metadata": described, "storage_data": stored}
    if state.get("planner_data") is not None:
        new_state["planner_data"] = paths
    plan = files.plan(format, _replace_state(index, **new_state))
    unused = existing.count_unused_bytes(stored.values())
    note = f"{unused:,} unused bytes stay in the folder"
    old_index = checkpoint.sources[0]
    return replace(
        plan,
        kept=max(checkpoint.details.size - old_index.size, 0),
        notes=(note,) if unused else (),
    )


def _flatten(
    checkpoint: Checkpoint, is_item: _IsItem = lambda path, node: False
) -> dict[str, tuple[Path, Any]]:
    """Return the path and content of each item, by its flat name in torch (`model.fc.weight`).

    An item is a tensor, an object or plain value, or a list without tensors and dicts; `is_item`
    may make other nodes items. Keys of dicts become text.
    """
    if not isinstance(checkpoint.root, dict):
        raise unwritable_error(checkpoint, "the root must be a dict")
    entries: dict[str, tuple[Path, Any]] = {}
    todo: list[tuple[Path, Any]] = [((), checkpoint.root)]
    while todo:
        path, node = todo.pop()
        is_root, name = not path, _join_path(path)
        children: list[tuple[Any, Any]] | None = None  # None: the node is one item
        if is_root or not is_item(path, node):
            if isinstance(node, dict):
                children = [(str(key), value) for key, value in node.items()]
            elif isinstance(node, list) and not _is_terminal(node):
                children = list(enumerate(node))
        if children is not None:
            # The last of `todo` is next: reversed, they keep their order.
            todo += [((*path, key), child) for key, child in reversed(children)]
        elif name in entries:
            raise unwritable_error(checkpoint, f"two entries would become {printable(name)!r}")
        else:
            entries[name] = path, node
    return entries


def _is_terminal(node: list[Any]) -> bool:
    """Return True if a list is one item: it has no tensors or dicts, also in nested lists."""
    return not any(
        isinstance(item, (dict, TensorRef)) or (isinstance(item, list) and not _is_terminal(item))
        for item in node
    )


def _join_path(path: Path) -> str:
    return ".".join(map(str, path))


class _Files:
    """The files of items to write."""

    def __init__(self, checkpoint: Checkpoint, name: str, max_bytes: int | None) -> None:
        """Plan files named `name.format(number)`, of at most `max_bytes`; `add` fills them."""
        self._checkpoint, self._name, self._max_bytes = checkpoint, name, max_bytes
        self._files: list[list[tuple[NewFile, Member]]] = []
        """The items of each file: the plan of the item, and its place in the file."""
        self._end = 0
        """The size of the last file so far."""

    def add(self, content: Any) -> Opaque:
        """Plan an item as a torch.save file in the last file, or in a new one if that is full.

        Return the `_StorageInfo` with the name of the file, the offset and the length.
        """
        checkpoint = replace(self._checkpoint, root=content)
        item = TORCH_ZIP.plan(checkpoint).files[0]
        is_full = self._max_bytes is not None and self._end + item.size > self._max_bytes
        # An item larger than the maximum gets a file of its own.
        if not self._files or (is_full and self._end):
            self._files.append([])
            self._end = 0
        member = Member(self._end, item.size, checkpoint)
        self._files[-1].append((item, member))
        self._end += item.size
        return _make_object(
            f"{_DCP_MODULE}.filesystem",
            "_StorageInfo",
            {
                "relative_path": self._name.format(len(self._files) - 1),
                "offset": member.offset,
                "length": member.length,
            },
        )

    def plan(self, format: FolderFormat, index: Opaque) -> WritePlan:
        """Return the plan of the files and of their index."""
        new = [self._plan_file(number, items) for number, items in enumerate(self._files)]
        data = encode(index).data
        new.append(NewFile(len(data), lambda output: output.write(data), path=format.index_name))
        tensors = sum(1 for _ in self._checkpoint.tensors())
        return WritePlan(format.name, tuple(new), tensors=tensors)

    def _plan_file(self, number: int, items: list[tuple[NewFile, Member]]) -> NewFile:
        """Return the planned file with this number and these items."""

        def write(output: FileOutput) -> None:
            """Write the items one after the other."""
            for file, _ in items:
                file.write(output)

        size = sum(file.size for file, _ in items)
        members = tuple(member for _, member in items)
        return NewFile(size, write, path=self._name.format(number), members=members)


class _ExistingItems:
    """The content of a folder: the name, path and content of each item."""

    def __init__(self, checkpoint: Checkpoint, state: Mapping[Any, Any]) -> None:
        """Map the items in the `state` of a folder's index to the tree that was read from it."""
        self._checkpoint = checkpoint
        self.stored: dict[str, list[tuple[Opaque, Opaque]]] = {}
        """By flat name, the `MetadataIndex` and `_StorageInfo` of each item."""
        for key, info in state["storage_data"].items():
            self.stored.setdefault(key.attributes["fqn"], []).append((key, info))
        stated_paths, names = state.get("planner_data") or {}, state["state_dict_metadata"]
        # Without a stated path, the flat name is a key of the root.
        self._path_by_name: dict[str, Path] = {
            name: stated_paths.get(name, (name,)) for name in names
        }
        self._name_by_path = {path: name for name, path in self._path_by_name.items()}
        leaves = {name: self._find_leaf(path) for name, path in self._path_by_name.items()}
        self._name_by_tensor_id = {
            id(leaf): name for name, leaf in leaves.items() if type(leaf) is TensorRef
        }
        self._value_by_name = {
            name: leaf for name, leaf in leaves.items() if type(leaf) is not TensorRef
        }
        containers = (
            leaf for leaf in self._value_by_name.values() if isinstance(leaf, (dict, list))
        )
        self._container_ids = set(map(id, containers))
        """The dicts and lists that are one item, for example an empty list."""
        # Reversed: of values with equal content, the first is found.
        self._name_by_fingerprint = {
            _fingerprint(leaf): name for name, leaf in reversed(self._value_by_name.items())
        }
        self.extra_keys = self._check_extra_keys()
        """The keys of the root whose content is in another file of the folder."""

    def count_unused_bytes(self, kept_infos: Iterable[Opaque]) -> int:
        """Return the bytes of the items without one of these `_StorageInfo`; tied ones once."""
        kept_ids = set(map(id, kept_infos))
        infos = {id(info): info for items in self.stored.values() for _, info in items}
        return sum(info.attributes["length"] for key, info in infos.items() if key not in kept_ids)

    def is_item(self, path: Path, node: Any) -> bool:
        """Return True if the node was one item before."""
        return (
            id(node) in self._container_ids or self._name_by_path.get(path) in self._value_by_name
        )

    def find_old_name(self, path: Path, leaf: Any) -> str | None:
        """Return the name of the item with a leaf; None for a value that no item has.

        A value is compared by content, first with the item at its path; a tensor by identity.

        Raises:
            NotRepresentable: if a tensor differs from that in the folder.
        """
        if isinstance(leaf, TensorRef):
            if id(leaf) not in self._name_by_tensor_id:
                label = printable(name_of(path))
                raise unwritable_error(
                    self._checkpoint, f"{label} differs from the tensor in the folder"
                )
            return self._name_by_tensor_id[id(leaf)]
        content, name = _fingerprint(leaf), self._name_by_path.get(path)
        if name in self._value_by_name and _fingerprint(self._value_by_name[name]) == content:
            return name
        return self._name_by_fingerprint.get(content)

    def make_new_name(self, old_name: str | None, path: Path) -> str:
        """Return the name of the item for content that is now at `path`.

        The item `old_name` had it before; None for a new value. If an item was at this path, its
        name is kept, unless a tensor was there and an item from another path replaces it. Other
        content gets the name that torch derives from its path.

        Raises:
            NotRepresentable: if its name is not derived from the path.
        """
        name_at_path = self._name_by_path.get(path)
        if name_at_path is not None:
            was_value = name_at_path in self._value_by_name  # else a tensor was at the path
            if was_value or old_name in (None, name_at_path):
                return name_at_path
        if old_name is not None and old_name != _join_path(self._path_by_name[old_name]):
            raise unwritable_error(
                self._checkpoint, f"the name {printable(old_name)!r} does not match its path"
            )
        return _join_path(path)

    def _find_leaf(self, path: Path) -> Any:
        """Return the value or tensor at a path when the folder was opened."""
        node = self._checkpoint.original
        for key in path:
            # An integer key of a dict, such as a parameter number, is text in the index.
            node = node[int(key) if isinstance(node, dict) and key not in node else key]
        return node.find() if isinstance(node, Opaque) and node.find else node

    def _check_extra_keys(self) -> set[Any]:
        """Return the keys of content in another file of the folder, which must be unchanged."""
        old_root, new_root = self._checkpoint.original, self._checkpoint.root
        keys = set(old_root) - {path[0] for path in self._name_by_path}
        kept = {
            key
            for key in keys & new_root.keys()
            if _fingerprint(old_root[key]) == _fingerprint(new_root[key])
        }
        if keys - kept:
            changed = listed(sorted(printable(str(key)) for key in keys - kept))
            raise unwritable_error(
                self._checkpoint, f"{changed} is in a file of its own, which is not rewritten"
            )
        return keys


def _fingerprint(node: Any) -> tuple[bytes, tuple[int, ...]]:
    """Return the pickle of a node and the ids of its storages: equal for equal content."""
    encoded = encode(node)
    return encoded.data, tuple(map(id, encoded.storages))


def unwritable_error(checkpoint: Checkpoint, why: str) -> NotRepresentable:
    """Return the error for content that a DCP folder cannot store."""
    return NotRepresentable(
        f"cannot be written as a DCP folder: {why}",
        file=checkpoint.path,
        hint="write the result to another file or folder with -o",
    )


def _to_plain_tensor(name: str, tensor: TensorRef, file: str) -> TensorRef:
    """Return a tensor with the same elements, in row-major order on the CPU."""
    if not tensor.has_content:
        raise NotRepresentable(
            f"{printable(name)} is a {tensor.kind} tensor, which DCP cannot store",
            file=file,
            hint="leave it out with --exclude NAME, or add --dequantize DTYPE",
        )
    data = row_major_data(tensor, printable(name), file)
    shape = tensor.sizes
    storage = tensor.storage if tensor.is_verbatim else None
    # The stated CRC-32 is of the whole storage, without compression.
    crc = (
        storage.crc32
        if storage and storage.nbytes == data.length and not storage.compressed
        else None
    )
    return make_plain_tensor(name, tensor.dtype, shape, data, crc32=crc)


def _describe_omissions(
    root: Mapping[Any, Any], entries: Mapping[str, tuple[Path, Any]]
) -> Iterator[str]:
    """Yield the content that is left out of the folder, as phrases."""
    yield from describe_losses(
        {name: leaf for name, (_, leaf) in entries.items() if isinstance(leaf, TensorRef)}
    )
    dicts = [node for node in walk_everything(root) if isinstance(node, dict)]
    if sum(not node for node in dicts):
        yield "empty dicts"
    if any(type(key) is not str for node in dicts for key in node):
        yield "integer keys (written as text)"
    if any(getattr(node, "attributes", None) for node in dicts):
        yield "attributes of dicts, such as _metadata"


def _make_object(
    module: str, name: str, state: Mapping[str, Any] | tuple[Any, ...] | None
) -> Opaque:
    """Return an object of a torch class, with its state."""
    steps = [] if state is None else [("build", state)]
    return Opaque(Global(module, name), maker="newobj", args=(), steps=steps)


def _replace_state(node: Opaque, **state: Any) -> Opaque:
    """Return an object with some attributes replaced."""
    return replace(node, steps=[("build", {**node.attributes, **state})])


def _make_index_key(name: str, offset: Size | None) -> Opaque:
    """Return the `MetadataIndex` of an item; `offset` is None for a value."""
    state = {"fqn": name, "index": None} | ({} if offset is None else {"offset": offset})
    return _make_object(f"{_DCP_MODULE}.metadata", "MetadataIndex", state)


def _describe_value() -> Opaque:
    """Return the description of a value in the index."""
    return _make_object(f"{_DCP_MODULE}.metadata", "BytesStorageMetadata", None)


def _describe_tensor(tensor: TensorRef) -> Opaque:
    """Return the description of a tensor in the index, with one chunk."""
    layout = Opaque(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    memory_format = Opaque(Global(_SHARDED_MODULE, "MEM_FORMAT_ENCODING"), _CONTIGUOUS_FORMAT)
    requires_grad = pin_memory = False  # as for the detached tensors of a state dict
    dtype = Global("torch", tensor.dtype)
    properties = (dtype, layout, requires_grad, memory_format, pin_memory)
    shape = Size(tensor.sizes)
    chunk = {"offsets": Size((0,) * len(shape)), "sizes": shape}
    return _make_object(
        f"{_DCP_MODULE}.metadata",
        "TensorStorageMetadata",
        {
            "properties": _make_object(_SHARDED_MODULE, "TensorProperties", properties),
            "size": shape,
            "chunks": [_make_object(f"{_DCP_MODULE}.metadata", "ChunkStorageMetadata", chunk)],
        },
    )
