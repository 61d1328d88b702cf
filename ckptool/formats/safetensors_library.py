"""A second opinion on safetensors files: compare with the library `safetensors`."""

from __future__ import annotations

from ckptool.files.source import FileSource, Source
from ckptool.formats.safetensors_header import read_header
from ckptool.limits import Limits
from ckptool.words import printable


def find_disagreement(source: Source, limits: Limits) -> str | None:
    """Return the first difference to what the library `safetensors` reads, or None.

    Keys, dtypes and shapes are compared. Returns None, too, if the library or numpy is not
    installed, and for a file that the library cannot open by path: one on another machine, or one
    presented as before an interrupted edit.

    Raises:
        CheckpointError: ckptool itself refuses the file.
    """
    if not isinstance(source, FileSource) or source.overlaid:
        return None
    try:
        from safetensors import SafetensorError, __version__, safe_open
    except ImportError:
        return None
    header = read_header(source, limits)
    ours = {entry.name: (entry.code, entry.shape) for entry in header.entries}
    try:
        with safe_open(source.path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            theirs = {
                name: (view.get_dtype(), tuple(view.get_shape())) for name, view in slices.items()
            }
    except ImportError:
        return None
    except (SafetensorError, OSError, ValueError) as error:
        return f"the library safetensors {__version__} rejects it: {printable(str(error))}"
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return (
                f"the library safetensors {__version__} reads {printable(name)} as "
                f"{_describe_entry(theirs.get(name))}, and ckptool as "
                f"{_describe_entry(ours.get(name))}"
            )
    return None


def _describe_entry(entry: tuple[str, tuple[int, ...]] | None) -> str:
    """Return dtype and shape of a tensor for the message."""
    return "missing" if entry is None else f"{entry[0]} {list(entry[1])}"
