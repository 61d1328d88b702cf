"""Where storages go: `map_location` as `torch.load` takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ckptool.errors import DeviceError
from ckptool.tensors.runtime import called

if TYPE_CHECKING:
    import torch

__all__ = ["MapLocation", "Placement"]

MapLocation = Any
"""None, a string, a `torch.device`, a dict of tags, or a callable `(storage, tag) -> storage`."""


class Placement:
    """One `map_location`, applied to storage after storage.

    As in torch: None leaves every tag, a dict leaves the tags that it does not list, and a callable
    that returns None does too.
    """

    def __init__(self, map_location: MapLocation) -> None:
        """Take what `torch.load` takes.

        Raises:
            DeviceError: it is of no such kind.
        """
        import torch

        self._function: Callable[[torch.UntypedStorage, str], Any] | None = None
        self._rules: Mapping[Any, Any] | None = None
        self._everywhere: str | None = None
        self._checked: set[str] = set()
        if isinstance(map_location, (str, torch.device)):
            self._everywhere = str(map_location)
        elif isinstance(map_location, Mapping):
            self._rules = map_location
        elif callable(map_location):
            self._function = map_location
        elif map_location is not None:
            raise DeviceError(
                f"map_location is a {type(map_location).__name__}",
                hint="give a string, a torch.device, a dict of tags, a function, or None",
            )

    def target(self, tag: str) -> str | None:
        """The tag that storages of `tag` get; None where a function decides."""
        if self._function is not None:
            return None
        if self._everywhere is not None:
            return self._everywhere
        return tag if self._rules is None else str(self._rules.get(tag, tag))

    def check(self, tag: str, *, name: str, file: str | None) -> None:
        """Refuse a device that is not here, before anything is read for it.

        Raises:
            DeviceError: it names the tensor `name`, the tag and what helps.
        """
        target = self.target(tag)
        if target is None or target in self._checked:
            return
        import torch

        _restored(
            torch.empty(0, device="cpu").untyped_storage(), target, tag=tag, name=name, file=file
        )
        self._checked.add(target)

    def place(
        self, storage: torch.UntypedStorage, tag: str, *, name: str, file: str | None
    ) -> torch.UntypedStorage:
        """`storage`, read into the CPU's memory, on the device that it is meant for."""
        target = self.target(tag)
        if target is None and self._function is not None:
            placed = self._function(storage, tag)
            if placed is not None:
                return _untyped(placed)
            return _restored(storage, tag, tag=tag, name=name, file=file)
        return _moved(storage, target or tag)


def _moved(storage: torch.UntypedStorage, target: str) -> torch.UntypedStorage:
    from torch.serialization import default_restore_location

    return _untyped(default_restore_location(storage, target))  # type: ignore[no-untyped-call]


def _restored(
    storage: torch.UntypedStorage, target: str, *, tag: str, name: str, file: str | None
) -> torch.UntypedStorage:
    try:
        return _moved(storage, target)
    except Exception as error:  # each back end refuses in its own way
        asked = "" if target == tag else f", and map_location sends it to {target!r}"
        raise DeviceError(
            f"{called(name)} is tagged {tag!r}{asked}: there is no such device here",
            file=file,
            hint=f'load with map_location="cpu", or: ckptool remap --to cpu {file or "FILE"}',
        ) from error


def _untyped(storage: Any) -> torch.UntypedStorage:
    """What a function returned, which may be a typed storage as older torch had them."""
    import torch

    if isinstance(storage, torch.UntypedStorage):
        return storage
    found = getattr(storage, "_untyped_storage", None)
    if isinstance(found, torch.UntypedStorage):
        return found
    raise DeviceError(f"map_location gave a {type(storage).__name__} in place of a storage")
