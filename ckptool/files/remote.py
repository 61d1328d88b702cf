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
    convert_errors,
    find_file_system,
    make_fsspec_fetcher,
    refuse_object,
    upload_set,
)
from ckptool.files.http import changed_error, fetch
from ckptool.files.local import Place
from ckptool.files.source import Progress, Shared, Source
from ckptool.files.threads import run_in_order

if TYPE_CHECKING:
    from ckptool.files.atomic import Outputs

WINDOW = 128 << 10
"""The size of a request for less: the bytes around are often needed next."""
_MAX_WINDOWS = 16
"""Windows that are kept for each source."""
_REQUEST_BYTES, _MAX_REQUESTS = 2 << 20, 8
"""The size of a request in a sequential read, and the number of concurrent requests."""
_MAX_OPENING = 16
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
        """By address; None if there is no such file."""
        self._opened: set[str] = set()
        """The addresses that `open` has returned."""

    def normalize_path(self, path: str) -> str:
        """Return an address of Hugging Face as `hf://owner/name@COMMIT/path`."""
        if (match := _parse_hub_address(path)) is None:
            return path
        repository, inner = match
        return f"{repository.address}/{inner}" if inner else repository.address

    def pin_revision(self, path: str) -> str:
        """Return a repository of Hugging Face as `hf://owner/name@COMMIT`; others as empty text."""
        if (match := _parse_hub_address(path)) is None:
            return ""
        repository, _ = match
        return repository.address

    def exists(self, path: str) -> bool:
        """Return True if the address exists."""
        return self.is_file(path) or self.is_folder(path)

    def is_folder(self, path: str) -> bool:
        """Return True if the address is a folder; plain http has none."""
        if _parse_hub_address(path) is not None:
            return bool(self.list_names(path))  # a repository has no empty folders
        if _is_http(path):
            return False
        try:
            system, inner = find_file_system(path)
        except FileMissing:  # a chained address leads through a missing file
            return False
        with convert_errors(path):
            return bool(system.isdir(inner))

    def is_file(self, path: str) -> bool:
        """Return True if the address is a file."""
        if (match := _parse_hub_address(path)) is not None:
            repository, inner = match
            return inner in repository.sizes
        return self._find_source(path) is not None

    def list_names(self, folder: str) -> frozenset[str]:
        """Return the names in a folder; for plain http, the names requested so far."""
        if (match := _parse_hub_address(folder)) is not None:
            repository, inner = match
            prefix = f"{inner}/" if inner else ""
            return frozenset(
                name.removeprefix(prefix).partition("/")[0]
                for name in repository.sizes
                if name.startswith(prefix)
            )
        if _is_http(folder):
            prefix = folder.rstrip("/") + "/"
            requested = (url for url, source in self._sources.items() if source is not None)
            return frozenset(
                url.removeprefix(prefix) for url in requested if url.startswith(prefix)
            )
        if "::" in folder:
            return frozenset()  # the parts of a chained address share no folder
        system, inner = find_file_system(folder)
        with convert_errors(folder):
            paths = system.ls(inner, detail=False)
        return frozenset(os.path.basename(path.rstrip("/")) for path in paths)

    def size(self, path: str) -> int:
        """Return the bytes of a file.

        Raises:
            FileMissing: it does not exist.
        """
        return self._require_source(path).size

    def open(self, path: str) -> Source:
        """Return a file with its beginning fetched; a second call fetches it again.

        A second call also forgets the other files in its folder, which may be new, too.

        Raises:
            UnreadableFile: it cannot be fetched (`FileMissing`: it does not exist).
        """
        if path in self._opened:
            folder = os.path.dirname(path) + "/"
            self._opened = {opened for opened in self._opened if not opened.startswith(folder)}
            for opened in [opened for opened in self._sources if opened.startswith(folder)]:
                del self._sources[opened]
        self._opened.add(path)
        return self._require_source(path)

    def open_member(self, path: str, size: int) -> Source:
        """Return a file in a folder; `size` is not needed."""
        return self._require_source(path)

    def expect(self, paths: Sequence[str]) -> None:
        """Fetch the beginnings of files that are about to be opened, many at a time.

        Stop at the first missing file, which the caller will report.
        """
        for path in paths:
            self._sources.pop(path, None)
            self._opened.discard(path)
        for source in run_in_order(self._find_source, paths, _MAX_OPENING):
            if source is None:
                return

    def refuse_target(self, path: str, *, overwrite: bool) -> None:
        """Refuse a target that cannot be written or must not be replaced; see `refuse_object`."""
        refuse_object(path, overwrite=overwrite)

    def open_outputs(
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
        """Yield outputs for objects; the index appears last. See `upload_set`."""
        for path in sizes:
            self._sources.pop(path, None)
        return upload_set(index, sizes, overwrite=overwrite, check=check, progress=progress)

    def _require_source(self, path: str) -> RemoteSource:
        """Return the file at an address.

        Raises:
            FileMissing: it does not exist.
        """
        source = self._find_source(path)
        if source is None:
            raise FileMissing("no such file", file=path)
        return source

    def _find_source(self, path: str) -> RemoteSource | None:
        """Return the file at an address, fetched once; None if it does not exist."""
        if path not in self._sources:
            try:
                self._sources[path] = RemoteSource(path, _make_fetcher(path))
            except FileMissing:
                self._sources[path] = None
        return self._sources[path]


class RemoteSource(Source):
    """A file on another machine: small reads use cached windows, large ones are requests."""

    is_far = True
    is_shared = True

    def __init__(self, name: str, fetch_range: Fetch) -> None:
        """Fetch the first bytes, and thereby the size.

        Raises:
            UnreadableFile: it cannot be fetched.
        """
        self.name, self._fetch_range = name, fetch_range
        beginning = fetch_range(0, WINDOW, "")  # of any version
        TRAFFIC.add(len(beginning.data))
        self.size, self._tag = beginning.size, beginning.tag
        """The tag changes with the content of the file."""
        self._windows: OrderedDict[int, bytes] = OrderedDict({0: beginning.data})
        """The windows that are kept, by offset, the oldest first."""
        self._ahead = _Ahead(self.size, self._fetch)
        """The requests for bytes after a sequential read."""
        self._lock = RLock()

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`.

        The first bytes come from requests ahead, if some are pending; the others from one request
        for a long read, or from windows.
        """
        with self._lock:
            done = self._ahead.fill_from_requests(offset, buffer)
            if done == len(buffer):
                return
            if len(buffer) > WINDOW:
                buffer[done:] = self._fetch(offset + done, offset + len(buffer))
                # Consecutive long reads are requested ahead; windows are read by position.
                self._ahead.note_read(offset, offset + len(buffer))
                return
            while done < len(buffer):
                start, data = self._get_window(offset + done)
                part = data[offset + done - start :][: len(buffer) - done]
                buffer[done : done + len(part)] = part
                done += len(part)

    def version(self) -> str:
        """Return the size and the tag, which changes with the content."""
        return f"{self.size} {self._tag}"

    def check_unchanged(self) -> None:
        """Request the tag of the file again.

        Raises:
            UnreadableFile: it has changed.
        """
        fetch = _make_fetcher(self.name)
        response = fetch(0, 1, "")  # the first byte, of any version
        TRAFFIC.add(len(response.data))
        if (response.size, response.tag) != (self.size, self._tag):
            raise changed_error(self.name)

    def close(self) -> None:
        """Send no more requests."""
        self._ahead.stop()

    def _get_window(self, offset: int) -> tuple[int, bytes]:
        """Return the start and the bytes of the window with the byte at `offset`.

        Windows begin at multiples of `WINDOW`, except the last: it ends with the file.
        """
        last_start = max(self.size - WINDOW, 0)
        start = last_start if offset >= last_start else offset // WINDOW * WINDOW
        if start not in self._windows:
            self._windows[start] = self._fetch(start, min(start + WINDOW, self.size))
            if len(self._windows) > _MAX_WINDOWS:
                self._windows.popitem(last=False)
        return start, self._windows[start]

    def _fetch(self, start: int, stop: int) -> bytes:
        """Request the bytes from `start` to `stop`; refuse a file that has changed."""
        TRAFFIC.add(stop - start)
        response = self._fetch_range(start, stop, self._tag)
        if len(response.data) != stop - start or response.size != self.size:
            raise changed_error(self.name)
        return response.data


class _Request(NamedTuple):
    """A request for the bytes from `start` to `stop`, which another thread sends."""

    start: int
    stop: int
    future: Future[bytes]


class _Ahead:
    """Fetches the bytes after a sequential read, with several concurrent requests."""

    def __init__(self, size: int, fetch: Callable[[int, int], bytes]) -> None:
        """Read ahead in a file of `size` bytes; `fetch` returns the bytes between two offsets."""
        self._size, self._fetch = size, fetch
        self._requests: deque[_Request] = deque()
        """The pending requests, for adjacent ranges in the order of the file."""
        self._request_count = 0
        """The number of concurrent requests, which doubles with each read."""
        self._last_end = -1
        """The position after the last read."""
        self._pool: ThreadPoolExecutor | None = None

    def fill_from_requests(self, offset: int, buffer: memoryview) -> int:
        """Fill the start of `buffer` from pending requests; return the number of bytes filled.

        Each request that was read completely is replaced by new ones.
        """
        while self._requests and self._requests[0].stop <= offset:
            self._requests.popleft()
        if not self._requests or self._requests[0].start > offset:
            return 0
        done = 0
        while self._requests and done < len(buffer):
            start, stop, future = self._requests[0]
            data = future.result()[offset + done - start :][: len(buffer) - done]
            buffer[done : done + len(data)] = data
            done += len(data)
            if offset + done == stop:
                self._requests.popleft()
                self._request_more(stop)
        self._last_end = offset + done
        return done

    def note_read(self, start: int, stop: int) -> None:
        """Read ahead if a read begins near the end of the last one, or else drop all requests."""
        if 0 <= start - self._last_end <= WINDOW:
            self._request_more(stop)
        else:
            self.stop()
        self._last_end = stop

    def _request_more(self, position: int) -> None:
        """Send requests for the bytes after the pending ones, or from `position` without any.

        Each call doubles the number of pending requests, from one up to `_MAX_REQUESTS`.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_MAX_REQUESTS)
        self._request_count = min(max(2 * self._request_count, 1), _MAX_REQUESTS)
        while len(self._requests) < self._request_count:
            start = self._requests[-1].stop if self._requests else position
            stop = min(start + _REQUEST_BYTES, self._size)
            if start >= stop:
                return
            future = self._pool.submit(self._fetch, start, stop)
            self._requests.append(_Request(start, stop, future))

    def stop(self) -> None:
        """Drop the pending requests; the next sequential read starts with one again."""
        for request in self._requests:
            request.future.cancel()
        self._requests.clear()
        self._request_count = 0
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None


def _is_http(path: str) -> bool:
    return re.match("https?://", path, re.IGNORECASE) is not None


def _make_fetcher(path: str) -> Fetch:
    """Return the function that fetches bytes of a file: from Hugging Face, by http or with fsspec.

    It refuses a file that no longer has the given `tag` (its version, such as an ETag).

    Raises:
        FileMissing: the repository does not have it.
        UnreadableFile: the address contains a password.
    """
    if (match := _parse_hub_address(path)) is not None:
        repository, inner = match
        if inner not in repository.sizes:
            raise FileMissing("the repository has no such file", file=path)
        url = f"{repository.base}/{quote(inner)}"
        return lambda start, stop, tag: fetch(url, start, stop, tag=tag, headers=repository.headers)
    if _is_http(path):
        if re.match(r"\w+://[^/?#]*@", path):
            raise UnreadableFile(
                "the address contains a user or a password, which would appear in the results",
                file=path,
                hint="give a signed address, or download the file first: curl -LOn URL",
            )
        return lambda start, stop, tag: fetch(path, start, stop, tag=tag)
    return make_fsspec_fetcher(path)


_HUB_ADDRESS = re.compile(
    r"hf://(?P<kind>datasets/|spaces/)?(?P<name>[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(?P<path>.*))?"
)
_HUB_PAGE_PATH = re.compile(
    r"(?P<kind>datasets/|spaces/)?(?P<name>[^/]+/[^/]+)"
    r"(?:/(?:blob|resolve|tree|raw)/(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+)(?:/(?P<path>.*))?)?/?"
)


def _parse_hub_address(path: str) -> tuple[_Repository, str] | None:
    """Return the repository and the path in it; None if it is not a Hugging Face address.

    It is `hf://NAME@REVISION/PATH`, or the address of a page on the site.
    """
    match = _HUB_ADDRESS.fullmatch(path)
    if match is None and _is_http(path):
        try:
            url = urlsplit(path)
        except ValueError:
            return None  # not an address: `fetch` reports it
        if url.netloc in ("huggingface.co", "hf.co", urlsplit(_get_hub_url()).netloc):
            match = _HUB_PAGE_PATH.fullmatch(unquote(url.path.lstrip("/")))
    if match is None:
        return None
    revision = unquote(match["revision"] or "main")
    inner = (match["path"] or "").strip("/")
    return _look_up_repository(match["kind"] or "", match["name"], revision), inner


def _get_hub_url() -> str:
    """Return the URL of Hugging Face, which the environment may change."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


_REPO_TYPES = {"datasets/": "dataset", "spaces/": "space"}


@cache
def _look_up_repository(kind: str, name: str, revision: str) -> _Repository:
    """Look up a repository (once): its commit and its files.

    `kind` is the beginning of the path on the site: `datasets/`, `spaces/`, or empty for a model.

    Raises:
        UnsupportedFormat: huggingface_hub is not installed.
        FileMissing, FileDenied, UnreadableFile: it cannot be looked up.
    """
    address = f"hf://{kind}{name}@{revision}"
    try:
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.errors import GatedRepoError
    except ImportError as error:
        raise UnsupportedFormat(
            "hf:// addresses need huggingface_hub, which is not installed",
            file=address,
            hint=INSTALL,
        ) from error
    try:
        info = HfApi(endpoint=_get_hub_url()).repo_info(
            name, revision=revision, repo_type=_REPO_TYPES.get(kind), files_metadata=True
        )
    except GatedRepoError as error:
        hint = "request access on its page, then run: hf auth login"
        raise FileDenied("the repository is gated", file=address, hint=hint) from error
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403, 404):
            hint = "check the spelling; for a private one, run hf auth login or set HF_TOKEN"
            text = "no such repository or revision"
            raise FileMissing(text, file=address, hint=hint) from error
        raise UnreadableFile(
            f"cannot be looked up: {type(error).__name__}, {error}", file=address
        ) from error
    token = get_token()
    return _Repository(
        f"hf://{kind}{name}@{info.sha}",
        f"{_get_hub_url()}/{kind}{name}/resolve/{info.sha}",
        {"Authorization": f"Bearer {token}"} if token else {},
        {file.rfilename: file.size or 0 for file in getattr(info, "siblings", None) or ()},
    )


@cache
def get_remote_place() -> RemotePlace:
    """Return the single `RemotePlace`, which has the caches."""
    return RemotePlace()
