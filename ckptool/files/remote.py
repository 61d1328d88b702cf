"""Files on other machines: https and Hugging Face with range requests, all others with fsspec.

Only the needed ranges are fetched; nothing is stored on the local disk. `hf://owner/name`, and the
addresses of huggingface.co in a browser, are pinned to the commit that they refer to when they are
first used.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from threading import RLock
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from ckptool.errors import FileDenied, FileMissing, UnreadableFile, UnsupportedFormat
from ckptool.files.filesystems import (
    INSTALL,
    Fetch,
    by_fsspec,
    convert_errors,
    refuse_object,
    system_of,
    uploaded_set,
)
from ckptool.files.http import changed, fetch
from ckptool.files.local import Place
from ckptool.files.source import Progress, Shared, Source
from ckptool.files.threads import in_order

if TYPE_CHECKING:
    from ckptool.files.atomic import Outputs

WINDOW = 128 << 10
"""The size of a request for less: the bytes around are often needed next."""
_KEPT = 16
"""Windows that are kept for each source."""
_PIECE, _IN_FLIGHT = 2 << 20, 8
"""The size of a request in a sequential read, and the number of concurrent requests."""
_AT_ONCE = 16
"""Files with beginnings that are fetched concurrently."""


@dataclass
class Traffic:
    """The requests of this process."""

    requests: int = 0
    bytes: int = 0

    def add(self, length: int) -> None:
        """Count one request."""
        self.requests += 1
        self.bytes += length


TRAFFIC = Traffic()


class _Repository(NamedTuple):
    """A repository of Hugging Face at one commit."""

    address: str
    """With the commit: `hf://owner/name@COMMIT`."""
    base: str
    """The URL of its files, without a trailing slash."""
    headers: Mapping[str, str]
    sizes: Mapping[str, int]
    """The size in bytes by path."""


class RemotePlace(Place):
    """The files at addresses; results of requests are cached."""

    def __init__(self) -> None:
        """Start with empty caches."""
        self._sources: dict[str, RemoteSource | None] = {}
        self._opened: set[str] = set()

    def spelled(self, path: str) -> str:
        """Return an address of Hugging Face as `hf://owner/name@COMMIT/path`."""
        if (found := _in_hub(path)) is None:
            return path
        repository, inner = found
        return f"{repository.address}/{inner}" if inner else repository.address

    def pinned(self, path: str) -> str:
        """Return a repository of Hugging Face as `hf://owner/name@COMMIT`."""
        return "" if (found := _in_hub(path)) is None else found[0].address

    def exists(self, path: str) -> bool:
        """Return whether the address exists."""
        return self.is_file(path) or self.is_folder(path)

    def is_folder(self, path: str) -> bool:
        """Return whether the address is a folder; plain http has none."""
        if _in_hub(path) is not None:
            return bool(self.names(path))
        if _is_http(path):
            return False
        try:
            system, inner = system_of(path)
        except FileMissing:  # for a chained address, the files it leads through
            return False
        with convert_errors(path):
            return bool(system.isdir(inner))

    def is_file(self, path: str) -> bool:
        """Return whether the address is a file."""
        if (found := _in_hub(path)) is not None:
            return found[1] in found[0].sizes
        return self._found(path) is not None

    def names(self, folder: str) -> frozenset[str]:
        """Return the names in a folder; for plain http those that were requested."""
        if (found := _in_hub(folder)) is not None:
            repository, inner = found
            beginning = f"{inner}/" if inner else ""
            return frozenset(
                name.removeprefix(beginning).partition("/")[0]
                for name in repository.sizes
                if name.startswith(beginning)
            )
        if _is_http(folder):
            beginning = folder.rstrip("/") + "/"
            known = (url for url, source in self._sources.items() if source is not None)
            return frozenset(
                url.removeprefix(beginning) for url in known if url.startswith(beginning)
            )
        if "::" in folder:
            return frozenset()  # the parts of a chained address share no folder
        system, inner = system_of(folder)
        with convert_errors(folder):
            there = system.ls(inner, detail=False)
        return frozenset(os.path.basename(one.rstrip("/")) for one in there)

    def size(self, path: str) -> int:
        """Return the bytes of a file.

        Raises:
            FileMissing: it does not exist.
        """
        return self._there(path).size

    def open(self, path: str) -> Source:
        """Return a file with its beginning fetched; a second call fetches it again.

        Raises:
            UnreadableFile: it cannot be fetched (`FileMissing`: it does not exist).
        """
        if path in self._opened:  # files next to it may be new, too
            beginning = os.path.dirname(path) + "/"
            self._opened = {one for one in self._opened if not one.startswith(beginning)}
            for one in [one for one in self._sources if one.startswith(beginning)]:
                del self._sources[one]
        self._opened.add(path)
        return self._there(path)

    def member(self, path: str, size: int) -> Source:
        """Return a file in a folder."""
        return self._there(path)

    def expect(self, paths: Sequence[str]) -> None:
        """Fetch the beginnings of files that are about to be opened, many at a time."""
        for one in paths:
            self._sources.pop(one, None)
            self._opened.discard(one)
        for found in in_order(self._found, paths, _AT_ONCE):
            if found is None:  # no more requests are sent
                return

    def refuse_target(self, path: str, *, overwrite: bool) -> None:
        """Refuse a target that cannot be written or must not be replaced; see `refuse_object`."""
        refuse_object(path, overwrite=overwrite)

    def new_files(
        self,
        index: str,
        sizes: Mapping[str, int],
        *,
        overwrite: bool,
        mode: int | None,
        check: Callable[[], None],
        progress: Progress | None,
        shared: Shared | None = None,
    ) -> AbstractContextManager[Outputs]:
        """Yield outputs for objects, of which the index appears last; see `uploaded_set`."""
        for path in sizes:
            self._sources.pop(path, None)
        return uploaded_set(index, sizes, overwrite=overwrite, check=check, progress=progress)

    def _there(self, path: str) -> RemoteSource:
        source = self._found(path)
        if source is None:
            raise FileMissing("no such file", file=path)
        return source

    def _found(self, path: str) -> RemoteSource | None:
        if path not in self._sources:
            try:
                self._sources[path] = RemoteSource(path, _fetcher(path))
            except FileMissing:
                self._sources[path] = None
        return self._sources[path]


class RemoteSource(Source):
    """A file on another machine: small reads use cached windows, large ones are requests."""

    is_far = True
    is_shared = True

    def __init__(self, name: str, ask: Fetch) -> None:
        """Fetch the first bytes, and thereby the size.

        Raises:
            UnreadableFile: it cannot be fetched.
        """
        self.name, self._ask = name, ask
        first = ask(0, WINDOW, "")
        TRAFFIC.add(len(first.data))
        self.size, self._tag = first.size, first.tag
        self._windows: OrderedDict[int, bytes] = OrderedDict({0: first.data})
        self._ahead = _Ahead(self.size, self._fetch)
        self._lock = RLock()

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`."""
        with self._lock:
            done = self._ahead.give(offset, buffer)
            if done == len(buffer):
                return
            if len(buffer) > WINDOW:
                buffer[done:] = self._fetch(offset + done, offset + len(buffer))
                self._ahead.follow(offset, offset + len(buffer))
                return
            while done < len(buffer):
                start, data = self._window(offset + done)
                piece = data[offset + done - start :][: len(buffer) - done]
                buffer[done : done + len(piece)] = piece
                done += len(piece)

    def version(self) -> str:
        """Return the size and the tag, which changes with the content."""
        return f"{self.size} {self._tag}"

    def check_unchanged(self) -> None:
        """Request the tag of the file again.

        Raises:
            UnreadableFile: it has changed.
        """
        now = _fetcher(self.name)(0, 1, "")
        TRAFFIC.add(len(now.data))
        if (now.size, now.tag) != (self.size, self._tag):
            raise changed(self.name)

    def close(self) -> None:
        """Send no more requests."""
        self._ahead.end()

    def _window(self, offset: int) -> tuple[int, bytes]:
        """Return the window with the byte at `offset`; the last window is as long as the others."""
        tail = max(self.size - WINDOW, 0)
        start = tail if offset >= tail else offset // WINDOW * WINDOW
        if start not in self._windows:
            self._windows[start] = self._fetch(start, min(start + WINDOW, self.size))
            if len(self._windows) > _KEPT:
                self._windows.popitem(last=False)
        return start, self._windows[start]

    def _fetch(self, start: int, stop: int) -> bytes:
        TRAFFIC.add(stop - start)
        part = self._ask(start, stop, self._tag)
        if len(part.data) != stop - start or part.size != self.size:
            raise changed(self.name)
        return part.data


class _Ahead:
    """Fetches the bytes after a sequential read, with several concurrent requests."""

    def __init__(self, size: int, fetch: Callable[[int, int], bytes]) -> None:
        self._size, self._fetch = size, fetch
        self._pieces: deque[tuple[int, int, Future[bytes]]] = deque()
        self._depth, self._end = 0, -1
        self._pool: ThreadPoolExecutor | None = None

    def give(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` as far as requests are under way, and return the number of bytes."""
        while self._pieces and self._pieces[0][1] <= offset:
            self._pieces.popleft()
        if not self._pieces or self._pieces[0][0] > offset:
            return 0
        done = 0
        while self._pieces and done < len(buffer):
            start, stop, coming = self._pieces[0]
            data = coming.result()[offset + done - start :][: len(buffer) - done]
            buffer[done : done + len(data)] = data
            done += len(data)
            if offset + done == stop:
                self._pieces.popleft()
                self._ask_for_more(stop)
        self._end = offset + done
        return done

    def follow(self, start: int, stop: int) -> None:
        """Read ahead if a read begins near the end of the last one; further each time."""
        if 0 <= start - self._end <= WINDOW:
            self._ask_for_more(stop)
        else:
            self.end()
        self._end = stop

    def _ask_for_more(self, position: int) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_IN_FLIGHT)
        self._depth = min(2 * self._depth or 1, _IN_FLIGHT)
        while len(self._pieces) < self._depth:
            start = self._pieces[-1][1] if self._pieces else position
            stop = min(start + _PIECE, self._size)
            if start >= stop:
                return
            self._pieces.append((start, stop, self._pool.submit(self._fetch, start, stop)))

    def end(self) -> None:
        """Send no more requests."""
        for _, _, coming in self._pieces:
            coming.cancel()
        self._pieces.clear()
        self._depth = 0
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None


def _is_http(path: str) -> bool:
    return re.match("https?://", path, re.IGNORECASE) is not None


def _fetcher(path: str) -> Fetch:
    """Return the function that fetches the bytes of a file."""
    if (found := _in_hub(path)) is not None:
        repository, inner = found
        if inner not in repository.sizes:
            raise FileMissing("the repository has no such file", file=path)
        url = f"{repository.base}/{quote(inner)}"
        return lambda start, stop, tag: fetch(url, start, stop, tag=tag, headers=repository.headers)
    if _is_http(path):
        if re.match(r"\w+://[^/?#]*@", path):
            raise UnreadableFile(
                "the address contains a user or a password, which results would show",
                file=path,
                hint="give a signed address, or download the file first: curl -LOn URL",
            )
        return lambda start, stop, tag: fetch(path, start, stop, tag=tag)
    return by_fsspec(path)


_HUB = re.compile(
    r"hf://(?P<kind>datasets/|spaces/)?(?P<name>[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(?P<path>.*))?"
)
_PASTED = re.compile(
    r"(?P<kind>datasets/|spaces/)?(?P<name>[^/]+/[^/]+)"
    r"(?:/(?:blob|resolve|tree|raw)/(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+)(?:/(?P<path>.*))?)?/?"
)


def _in_hub(path: str) -> tuple[_Repository, str] | None:
    """Return the repository and the path of a Hugging Face address, or None."""
    found = _HUB.fullmatch(path)
    if found is None and _is_http(path):
        try:
            parts = urlsplit(path)
        except ValueError:
            return None  # not an address: `fetch` reports it
        if parts.netloc in ("huggingface.co", "hf.co", urlsplit(_endpoint()).netloc):
            found = _PASTED.fullmatch(unquote(parts.path.lstrip("/")))
    if found is None:
        return None
    revision = unquote(found["revision"] or "main")
    inner = (found["path"] or "").strip("/")
    return _repository(found["kind"] or "", found["name"], revision), inner


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


@cache
def _repository(kind: str, name: str, revision: str) -> _Repository:
    """Look up a repository (once): its commit and its files.

    Raises:
        UnsupportedFormat: huggingface_hub is not installed.
        FileMissing, FileDenied, UnreadableFile: it cannot be looked up.
    """
    shown = f"hf://{kind}{name}@{revision}"
    try:
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.errors import GatedRepoError
    except ImportError as error:
        raise UnsupportedFormat(
            "hf:// addresses need huggingface_hub, which is not installed", file=shown, hint=INSTALL
        ) from error
    try:
        told = HfApi(endpoint=_endpoint()).repo_info(
            name, revision=revision, repo_type=kind.rstrip("s/") or None, files_metadata=True
        )
    except GatedRepoError as error:
        hint = "request access on its page, then run: hf auth login"
        raise FileDenied("the repository is gated", file=shown, hint=hint) from error
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403, 404):
            hint = "check the spelling; for a private one, run hf auth login or set HF_TOKEN"
            text = "no such repository or revision"
            raise FileMissing(text, file=shown, hint=hint) from error
        raise UnreadableFile(
            f"cannot be looked up: {type(error).__name__}, {error}", file=shown
        ) from error
    token = get_token()
    return _Repository(
        f"hf://{kind}{name}@{told.sha}",
        f"{_endpoint()}/{kind}{name}/resolve/{told.sha}",
        {"Authorization": f"Bearer {token}"} if token else {},
        {one.rfilename: one.size or 0 for one in getattr(told, "siblings", None) or ()},
    )


@cache
def remote_place() -> RemotePlace:
    """Return the single `RemotePlace`, which has the caches."""
    return RemotePlace()
