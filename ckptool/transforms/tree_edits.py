"""Steps that edit the tree: move entries, set plain values, remove entries.

Paths are exact and from the root, as printed by `ckptool list`: keys joined with `/`. A key that
contains a slash may be quoted as in JSON: `model/"conv/kernel"`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, ClassVar, cast

from ckptool.core.checkpoint import Change, Checkpoint
from ckptool.core.model import Opaque, Path, TensorRef, copy_with_items
from ckptool.core.sections import MODEL_KINDS, choose_only_model, find_likely_models
from ckptool.core.tree import is_within, name_of
from ckptool.core.values import is_value, summarize
from ckptool.errors import AmbiguousName, NotFound, UsageError
from ckptool.transforms.step import Step, check_list_option
from ckptool.words import counted, listed, printable

METADATA = "__metadata__"
"""The first key of a path into the header of a safetensors file."""
_MOST_DEPTH = 64
"""The maximum nesting depth of a value."""


def _split_quoted_key(path: str) -> tuple[str | None, str]:
    """Return the quoted key at the start of a path, and the path behind it.

    `"a/b"/c -> a/b, c`. The key is None, and the path unchanged, if it does not start with one.
    """
    if not path.startswith('"'):
        return None, path
    try:
        key, end = json.JSONDecoder().raw_decode(path)
    except ValueError:
        return None, path
    rest = path[end:]
    return (key, rest.removeprefix("/")) if not rest or rest[0] == "/" else (None, path)


def _list_children(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the key or index of each item of a container, and the item."""
    if isinstance(node, dict):
        yield from node.items()
    elif isinstance(node, (list, tuple)):
        yield from enumerate(node)


def _find_nodes(node: Any, rest: str, parent: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield each node at the path `rest` below `node`, with its keys from the root.

    There are several only if keys contain slashes.
    """
    quoted_key, after_quoted = _split_quoted_key(rest)
    for key, child in _list_children(node):
        text = name_of((key,))
        if quoted_key is not None:
            if text == quoted_key and not after_quoted:
                yield (*parent, key), child
            elif text == quoted_key:
                yield from _find_nodes(child, after_quoted, (*parent, key))
        elif text == rest:
            yield (*parent, key), child
        elif rest.startswith(f"{text}/"):
            yield from _find_nodes(child, rest[len(text) + 1 :], (*parent, key))


def _find_node(checkpoint: Checkpoint, path: str) -> tuple[Path, Any] | None:
    """Return the node at an exact path, after its keys from the root; None if there is none.

    Raises:
        AmbiguousName: if several keys with slashes make the same path.
    """
    matches = list(_find_nodes(checkpoint.root, path)) if path else [((), checkpoint.root)]
    if len(matches) > 1:
        raise AmbiguousName(
            f"{printable(path)!r} is ambiguous: it could be "
            f"{listed(repr(list(keys)) for keys, _ in matches)}",
            file=checkpoint.path or None,
            hint='put a key with a slash in double quotes: model/"conv/kernel"',
        )
    return matches[0] if matches else None


def _require_node(checkpoint: Checkpoint, path: str) -> tuple[Path, Any]:
    """Return the node at an exact path below the root, after its keys from the root.

    Raises:
        NotFound: if there is no node.
    """
    found = _find_node(checkpoint, path)
    if found is None or not found[0]:  # the root has no keys before it
        raise _not_found_error(checkpoint, path)
    return found


def _not_found_error(checkpoint: Checkpoint, path: str) -> NotFound:
    """Return the error for a missing path, with the nearest existing paths."""
    file, node, parent = checkpoint.path or None, checkpoint.root, path
    while parent:
        parent, _, _ = parent.rpartition("/")  # "" at last, which is the root
        location = _find_node(checkpoint, parent)
        if location is not None:
            _, node = location
            break
    within = f" in {printable(parent)}" if parent else ""
    if isinstance(node, Opaque):
        return NotFound(
            f"{printable(parent)!r} is an object of class {printable(node.class_name)}, which "
            "cannot be edited inside",
            file=file,
            hint="convert it to a dict first with --plain",
        )
    keys = [name_of((key,)) for key, _ in _list_children(node)]
    near = get_close_matches(path.rpartition("/")[2], keys, 3, 0.6) or keys
    content = f"; it has {listed(near, most=8)}" if near else "; it is empty"
    return NotFound(f"no entry is at {printable(path)!r}{within}{content}", file=file)


def _locate_new_entry(checkpoint: Checkpoint, path: str) -> tuple[Path, Any]:
    """Return the path of the existing dict for the new entry at `path`, and the entry's key.

    The key becomes an integer if all keys of the dict are, as in the state of an optimizer.

    Raises:
        NotFound: if the dict does not exist.
        UsageError: if it is not a dict.
    """
    parent, key = _split_path(path)
    location = _find_node(checkpoint, parent)
    if location is None:
        raise _not_found_error(checkpoint, parent)
    parent_path, container = location
    if isinstance(container, Opaque):  # an object gets no new attributes
        raise _not_found_error(checkpoint, path)
    if not isinstance(container, dict):
        subject = "the root" if not parent else printable(parent)
        raise UsageError(
            f"{subject} is not a dict, so it cannot have a new key", file=checkpoint.path or None
        )
    for existing_key in container:
        if name_of((existing_key,)) == key:
            return parent_path, existing_key
    # Python refuses to convert thousands of digits, and no index needs ten.
    is_number = key.isdecimal() and key.isascii() and len(key) < 10
    has_integer_keys = bool(container) and all(type(other) is int for other in container)
    return parent_path, int(key) if is_number and has_integer_keys else key


def _split_path(path: str) -> tuple[str, str]:
    """Split a path into the path above and the last key, which may be quoted.

    `a/b -> a, b`, and `a/"b/c" -> a, b/c`. The path above is empty for a key of the root.
    """
    if path.endswith('"') and len(path) > 1:
        above, slash, last = path.rpartition('/"')
        key, rest = _split_quoted_key(f'"{last}' if slash else path)
        if key is not None and not rest:
            return above, key
    above, _, last = path.rpartition("/")
    return above, last


@dataclass
class _Edit:
    """The changes to the entries of one container."""

    renamed: dict[Any, Any] = field(default_factory=dict)
    """The new key by old key, for entries that keep their position."""
    removed: set[Any] = field(default_factory=set)
    added: dict[Any, Any] = field(default_factory=dict)
    """The new nodes by key; one with an existing key takes the position of the old entry."""


def _apply_edits(node: Any, edits: Mapping[Path, _Edit], path: Path = ()) -> Any:
    """Return a copy of the node at `path` with all edits; nodes without edits are not copied."""
    edit = edits.get(path)
    if edit is None and not any(is_within(edited, path) for edited in edits):
        return node
    edit = edit or _Edit()
    if isinstance(node, dict):
        added, items = dict(edit.added), []
        for key, value in node.items():
            if key in added:  # at the position of the old entry
                items.append((key, added.pop(key)))
            elif key not in edit.removed:
                items.append((edit.renamed.get(key, key), _apply_edits(value, edits, (*path, key))))
        return copy_with_items(node, [*items, *added.items()])
    values = [
        edit.added[index] if index in edit.added else _apply_edits(value, edits, (*path, index))
        for index, value in enumerate(node)
    ]
    return values if isinstance(node, list) else type(node)(values)


def _refuse_list_item(checkpoint: Checkpoint, path: Path, verb: str) -> None:
    """Refuse to remove an item of a list or tuple, because later items would be renumbered."""
    node = checkpoint.root
    for key in path[:-1]:
        node = node[key]
    if not isinstance(node, dict):
        raise UsageError(
            f"{printable(name_of(path))!r} is an item of a {type(node).__name__} and cannot be "
            f"{verb}",
            file=checkpoint.path or None,
        )


def _parse_moves(rules: Mapping[str, str] | Iterable[str]) -> dict[str, str]:
    """Return the new path by old path, from a mapping or from texts `OLD=NEW`.

    Raises:
        UsageError: if a text has another form, or one side is empty.
    """
    if isinstance(rules, Mapping):
        pairs = list(rules.items())
    else:
        texts = check_list_option("move", rules)
        pairs = [(old, new) for text in texts for old, _, new in [split_rule(text)]]
    for old, new in pairs:
        if not (old and new):
            raise UsageError(
                "--move needs OLD=NEW, with a path on both sides",
                hint="for example --move model_state_dict=state_dict",
            )
    if len({old for old, _ in pairs}) < len(pairs):
        raise UsageError("--move has one path twice")
    return dict(pairs)


def split_rule(text: str) -> tuple[str, str, str]:
    """Split `OLD=NEW` at the first `=` outside quotes, like `str.partition`."""
    quoted = False
    for index, letter in enumerate(text):
        if letter == '"' and text[index - 1 : index] != "\\":  # a slice: empty at index 0
            quoted = not quoted
        elif letter == "=" and not quoted:
            return text[:index], "=", text[index + 1 :]
    return text, "", ""


@dataclass(frozen=True)
class Move(Step):
    """Move entries of the tree to other paths, all at once, so that two can be swapped."""

    options: ClassVar[Mapping[str, str]] = {"paths": "move"}

    paths: Mapping[str, str] | Iterable[str]
    """The new path by old path, `{"model_state_dict": "state_dict"}`, or texts `OLD=NEW`."""

    def __post_init__(self) -> None:
        """Check the paths.

        Raises:
            UsageError: if one is empty or repeated, or two have the same new path.
        """
        rules = _parse_moves(self.paths)
        if len(set(rules.values())) < len(rules):
            raise UsageError("two entries cannot move to one path")
        object.__setattr__(self, "paths", rules)

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with the entries at their new paths.

        Raises:
            NotFound: if there is no entry at an old path, or no dict for a new one.
            UsageError: if an entry that stays has a new path, or an entry would move into itself.
        """
        rules = cast("dict[str, str]", self.paths)  # set by __post_init__
        file = checkpoint.path or None
        old_locations = {old: _require_node(checkpoint, old) for old in rules}
        moving_paths = {path for path, _ in old_locations.values()}
        edits: dict[Path, _Edit] = {}
        for old, new in rules.items():
            path, node = old_locations[old]
            _refuse_list_item(checkpoint, path, "moved")
            parent, key = _locate_new_entry(checkpoint, new)
            for moving_path in moving_paths:
                if is_within(parent, moving_path):
                    raise UsageError(
                        f"{printable(new)!r} is inside {printable(name_of(moving_path))!r}, "
                        "which moves",
                        file=file,
                    )
            existing = _find_node(checkpoint, new)
            if existing is not None and existing[0] not in moving_paths:
                raise UsageError(
                    f"{printable(new)!r} already exists",
                    file=file,
                    hint=f"add --drop {new} to remove it, or --move {new}=OTHER to keep it",
                )
            old_key = path[-1]
            if path[:-1] == parent and existing is None:  # it keeps its position
                edits.setdefault(parent, _Edit()).renamed[old_key] = key
            else:
                edits.setdefault(path[:-1], _Edit()).removed.add(old_key)
                edits.setdefault(parent, _Edit()).added[key] = node
        changes = [
            Change("move", f"moved {printable(old)} to {printable(new)}", 1)
            for old, new in rules.items()
        ]
        return checkpoint.with_root(_apply_edits(checkpoint.root, edits), *changes)


def parse_json(text: str) -> Any:
    """Return the value of a strict JSON text.

    Raises:
        UsageError: if it is not JSON, or nested too deeply.
    """

    def refuse_constant(word: str) -> Any:
        """Refuse `NaN` and `Infinity`, which json.loads accepts."""
        raise ValueError(f"{word} is not valid JSON")

    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except RecursionError as error:
        raise UsageError("a value is nested too deeply") from error
    except ValueError as error:
        hint = f"quote a string: '{json.dumps(text)}'" if text.strip() else None
        raise UsageError(f"{printable(text)!r} is not a JSON value", hint=hint) from error
    _require_plain_value(value)
    return value


def _require_plain_value(value: Any, depth: int = 0) -> None:
    """Refuse a value that is not plain data, or is nested too deeply."""
    if depth > _MOST_DEPTH:
        raise UsageError("a value is nested too deeply")
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise UsageError("the keys of a value must be strings")
        items: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple)):
        items = value
    elif value is None or isinstance(value, (bool, int, float, str)):
        return
    else:
        raise UsageError(f"Set takes plain values, not {type(value).__name__}")
    for item in items:
        _require_plain_value(item, depth + 1)


def _restore_tuples(old: Any, new: Any) -> Any:
    """Return the new value with tuples where the old one has them, because JSON has only lists."""
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        values = [
            _restore_tuples(old[index] if index < len(old) else None, item)
            for index, item in enumerate(new)
        ]
        return values if isinstance(old, list) else type(old)(values)
    return new


@dataclass(frozen=True)
class Set(Step):
    """Set plain values, at new paths or in place of other plain values."""

    options: ClassVar[Mapping[str, str]] = {"values": "set"}

    values: Mapping[str, Any]
    """The value by path: a number, string, list, dict, True, False or None."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            UsageError: if one is not plain, or its path is empty.
        """
        values = dict(self.values)
        for path, value in values.items():
            if not path:
                raise UsageError("--set needs PATH=VALUE", hint="for example --set epoch=3")
            _require_plain_value(value)
        object.__setattr__(self, "values", values)

    def words(self) -> Iterator[str]:
        """Yield the command-line words of this step for `convert`."""
        for path, value in self.values.items():
            yield from ("--set", f"{path}={json.dumps(value)}")

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with the new values; tuples stay tuples.

        Raises:
            NotFound: if there is no dict for a new path.
            UsageError: if a tensor, a container or an object is at a path.
        """
        checkpoint = checkpoint.with_late_values()
        edits: dict[Path, _Edit] = {}
        header, changes = dict(checkpoint.details.header), list[Change]()
        for path, value in self.values.items():
            text = summarize(value)
            if isinstance(value, (dict, list)):
                text = f"a {type(value).__name__} of {counted(len(value), 'entry')}"
            if is_in_header(checkpoint, path):
                if not isinstance(value, str):
                    raise UsageError(
                        f"{printable(path)} must be a string, not {value!r}",
                        hint=f"--set '{path}=\"{value}\"'",
                    )
                key = path.removeprefix(f"{METADATA}/")
                before = repr(header[key]) if key in header else None
                header[key] = value
            else:
                existing = _find_node(checkpoint, path)
                if existing is not None:
                    target, old = existing
                    _refuse_replacement(checkpoint, path, old)
                    before = summarize(old)
                    value = _restore_tuples(old, value)
                else:
                    parent, key = _locate_new_entry(checkpoint, path)
                    target, before = (*parent, key), None
                edits.setdefault(target[:-1], _Edit()).added[target[-1]] = value
            note = f" (was {before})" if before is not None else ""  # None: the entry is new
            changes.append(Change("set", f"set {printable(path)} to {text}{note}", 1))
        details = replace(checkpoint.details, header=header)
        result = replace(checkpoint, details=details)
        root = _apply_edits(checkpoint.root, edits) if edits else checkpoint.root
        if root is checkpoint.root and isinstance(root, dict):
            root = copy_with_items(root, root)  # a new tree, so that the file counts as changed
        return result.with_root(root, *changes)


def is_in_header(checkpoint: Checkpoint, path: str) -> bool:
    """Return True if a path leads into the header of a file, not into its tree."""
    root = checkpoint.root
    return path.startswith(f"{METADATA}/") and not (isinstance(root, dict) and METADATA in root)


def _is_plain(node: Any) -> bool:
    """Return True for a number, text or other JSON value, or a list or tuple of these.

    An object of a class counts if it has such a value, for example a numpy number.
    """
    if isinstance(node, (list, tuple)):
        return all(map(_is_plain, node))
    return is_value(node) or (isinstance(node, Opaque) and node.plain is not None)


def _refuse_replacement(checkpoint: Checkpoint, path: str, node: Any) -> None:
    """Refuse to replace the node at `path` if it is a tensor, an object or a container."""
    if not _is_plain(node):
        noun = "a tensor" if isinstance(node, TensorRef) else "an object"
        noun = "a container" if isinstance(node, (dict, list, tuple)) else noun
        raise UsageError(
            f"{printable(path)!r} is {noun}; --set only replaces plain values",
            file=checkpoint.path or None,
            hint=f"set a value inside it with --set {path}/KEY=VALUE"
            if noun == "a container"
            else None,
        )


@dataclass(frozen=True)
class Drop(Step):
    """Remove entries of the tree by exact paths. A section is removed with its tensors."""

    selects: ClassVar[bool] = True
    options: ClassVar[Mapping[str, str]] = {"paths": "drop", "force": ""}

    paths: Iterable[str]
    """The paths of the entries."""
    force: bool = False
    """Allow removing parameters of the model."""

    def __post_init__(self) -> None:
        """Check the paths.

        Raises:
            UsageError: if it is a single string, or one path is empty.
        """
        paths = check_list_option("drop", self.paths)
        if not all(paths):
            raise UsageError(
                "--drop needs the path of an entry", hint="for example --drop optimizer"
            )
        object.__setattr__(self, "paths", tuple(dict.fromkeys(paths)))

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint without the entries.

        Raises:
            NotFound: if there is no entry at a path, or no tensor or value would be left.
            UsageError: if the entry is an item of a list, or a parameter of the model without
                `force`.
        """
        edits: dict[Path, _Edit] = {}
        changes = list[Change]()
        for text in self.paths:
            path, node = _require_node(checkpoint, text)
            _refuse_list_item(checkpoint, path, "dropped")
            if not self.force:
                _refuse_parameters(checkpoint, text, path)
            edits.setdefault(path[:-1], _Edit()).removed.add(path[-1])
            kinds = [section.kind for section in checkpoint.sections if section.path == path]
            count = sum(
                1 for tensor_path, _ in checkpoint.tensors() if is_within(tensor_path, path)
            )
            facts = kinds[:1]  # the entry is a section, or none
            if count:
                facts.append(counted(count, "tensor"))
            note = f" ({', '.join(facts)})" if facts and not isinstance(node, TensorRef) else ""
            changes.append(
                Change("left-out", f"{printable(text)}{note}", max(count, 1), wanted=True)
            )
        root = _apply_edits(checkpoint.root, edits)
        if not root:
            raise NotFound("nothing would remain", file=checkpoint.path or None)
        return checkpoint.with_root(root, *changes)


def _refuse_parameters(checkpoint: Checkpoint, text: str, path: Path) -> None:
    """Refuse to drop some tensors of a model, or the only model; `text` is the path for messages.

    Raises:
        UsageError: if the path leads to one of these.
    """
    models = find_likely_models(checkpoint)
    main_model = choose_only_model(models)
    for section in checkpoint.sections:
        is_part_of_model = (
            section.kind in MODEL_KINDS and is_within(path, section.path) and path != section.path
        )
        contains_main_model = (
            main_model is not None
            and section.path == main_model.path
            and is_within(section.path, path)
        )
        if is_part_of_model or contains_main_model:
            count = sum(
                1 for tensor_path, _ in checkpoint.tensors() if is_within(tensor_path, path)
            )
            if count:
                raise UsageError(
                    f"{printable(text)!r} is {counted(count, 'tensor')} of the model",
                    file=checkpoint.path or None,
                    hint="add --force to drop it, or choose tensors with --include and --exclude",
                )
