"""Read ranges of files over http and https with the standard library.

Proxies and certificates come from the environment (`HTTPS_PROXY`, `SSL_CERT_FILE`). A token is sent
only to its host, not to hosts that this one redirects to. RFC 9110, 13 and 14.
"""

from __future__ import annotations

import http.client
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, urldefrag

from ckptool.errors import CheckpointError, FileDenied, FileMissing, TruncatedFile, UnreadableFile

TIMEOUT = 30.0
"""Seconds that a server may be silent."""
ATTEMPTS = 5
MAX_PAUSE = 30.0
_MIN_PROGRESS = 16 << 10
"""After so many bytes, a lost connection does not count as an attempt."""
FROM_THE_START = 64 << 20
"""Bytes that are read from the beginning if a server does not support ranges."""
_RETRIED_CODES = frozenset({408, 425, 429, 500, 502, 503, 504})
_REDIRECTS: dict[str, str] = {}
"""The redirect target of an address, for further parts of the file: hosts limit their redirects."""
_CONTENT_RANGE = re.compile(r"bytes (?P<first>\d{1,18})-(?P<last>\d{1,18})/(?P<size>\d{1,18})")
_DOWNLOAD_HINT = "download it first: curl -LO URL"


class RangeResponse(NamedTuple):
    """A range of a file, and the size and tag of the file."""

    data: bytes
    size: int
    """Size of the whole file in bytes."""
    tag: str
    """Identifies the content: ETag, or else the time of the last change, or else empty."""


class _Retry(Exception):
    """A failure that is worth another attempt; the last one becomes the error message."""

    def __init__(self, reason: str, pause: float | None = None, data: bytes = b"") -> None:
        """Store the reason, the seconds to wait (None: the usual), and the bytes that arrived."""
        super().__init__(reason)
        self.pause, self.data = pause, data


def fetch(
    url: str, start: int, stop: int, *, tag: str = "", headers: Mapping[str, str] | None = None
) -> RangeResponse:
    """Return the bytes from `start` to `stop`, fewer if the file ends before.

    A failure that may pass is followed by another attempt, which asks only for the missing bytes.

    Args:
        url: http or https.
        start: The first byte.
        stop: The byte after the last.
        tag: The tag of an earlier response, which the file must still have.
        headers: Headers for this host only, for example a token.

    Raises:
        FileMissing, FileDenied: the server has no such file, or denies access.
        TruncatedFile: it ends before `start`.
        UnreadableFile: no response, an unexpected response, or the file has changed.
    """
    done, attempt = b"", 0
    while attempt < ATTEMPTS:
        pause: float | None = None
        try:
            part = _request_range(url, start + len(done), stop, tag, headers or {})
            return part._replace(data=done + part.data)
        except _Retry as retry:
            done, reason, pause = done + retry.data, str(retry), retry.pause
            if len(retry.data) >= _MIN_PROGRESS:  # the attempts are counted again
                attempt = 0
        except CheckpointError:
            raise
        except (http.client.InvalidURL, ValueError) as error:
            raise UnreadableFile(f"is not a valid address: {error}", file=url) from error
        except (OSError, http.client.HTTPException) as error:
            reason = _find_reason(error)
        attempt += 1
        if attempt < ATTEMPTS:
            time.sleep(min(MAX_PAUSE, 0.125 * 2**attempt if pause is None else pause))
    raise UnreadableFile(
        f"cannot be downloaded: {reason}", file=url, hint="try again, or " + _DOWNLOAD_HINT
    )


def _make_opener() -> urllib.request.OpenerDirector:
    """Return an opener for http and https only, so that redirects to local files fail."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


def _request_range(
    url: str, start: int, stop: int, tag: str, headers: Mapping[str, str]
) -> RangeResponse:
    """Send one request for the bytes from `start` to `stop`, and return them.

    `tag` is that of an earlier response, or empty. With it, the redirect target of that request is
    used, because the tag shows if the file there is still the same. `headers` are not sent there.
    """
    target = _REDIRECTS.get(url, url) if tag else url
    request = urllib.request.Request(
        quote(urldefrag(target).url, safe="%/:=&?~#+!$,;'@()*[]"),  # as a browser quotes it
        headers={"Accept-Encoding": "identity", "User-Agent": "ckptool"},
    )
    request.add_header("Range", f"bytes={start}-{stop - 1}")
    is_strong_etag = tag.startswith('"')  # not `W/"..."` or a time, which never match
    if is_strong_etag:
        request.add_header("If-Match", tag)
    if target == url:
        for name, value in headers.items():
            request.add_unredirected_header(name, value)
    try:
        with _make_opener().open(request, timeout=TIMEOUT) as response:
            part = _read_response(url, response, start, stop, tag)
            if response.url != request.full_url:
                _REDIRECTS[url] = response.url
            return part
    except urllib.error.HTTPError as error:
        with error:
            if target != url and error.code in (400, 401, 403, 404, 410):  # it has expired
                _REDIRECTS.pop(url, None)
                raise _Retry("the redirect has expired", pause=0.0) from error
            raise _response_error(url, error, start) from error


def _read_response(url: str, response: Any, start: int, stop: int, tag: str) -> RangeResponse:
    """Return the bytes from `start` to `stop` of a response; refuse unusable responses.

    A server without range requests sends the whole file, of which only the start is read.
    """
    headers, status = response.headers, response.status
    if headers.get("Content-Encoding", "identity").lower() not in ("identity", ""):
        raise UnreadableFile(
            f"the server compresses the file ({headers['Content-Encoding']}), so parts of "
            "it cannot be read",
            file=url,
            hint=_DOWNLOAD_HINT,
        )
    # A page is made for the request, so its length is not known; that of a file is.
    if headers.get_content_type() == "text/html" and "Content-Length" not in headers:
        hint = "log in on that page, and give the direct link of the file"
        raise UnreadableFile("the server sent a web page, not the file", file=url, hint=hint)
    current_tag = headers.get("ETag") or headers.get("Last-Modified") or ""
    if tag and current_tag and current_tag != tag:
        raise changed_error(url)
    if status == 206:  # partial content
        content_range = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
        if content_range is None or int(content_range["first"]) != start:
            raise UnreadableFile("the server sent other bytes than requested", file=url)
        size, end = int(content_range["size"]), int(content_range["last"]) + 1
        data = _read_exactly(response, min(stop, size, end) - start)
        if data and end < min(stop, size):
            raise _Retry("the server sent fewer bytes than requested", pause=0.0, data=data)
        return RangeResponse(data, size, current_tag)
    length = headers.get("Content-Length", "")  # of the whole file
    if stop > FROM_THE_START or not re.fullmatch(r"[0-9]{1,18}", length):
        raise UnreadableFile(
            "the server does not support range requests; without them, only the start of a "
            "file of known size can be read",
            file=url,
            hint=_DOWNLOAD_HINT,
        )
    size = int(length)
    return RangeResponse(_read_exactly(response, min(stop, size))[start:], size, current_tag)


def _read_exactly(response: Any, length: int) -> bytes:
    """Return exactly `length` bytes of a response."""
    parts: list[bytes] = []
    remaining = max(length, 0)
    while remaining:
        try:
            data = response.read(min(remaining, 1 << 20))
        except (OSError, http.client.HTTPException):
            data = b""
        if not data:
            raise _Retry("the connection was lost", None, b"".join(parts))
        parts.append(data)
        remaining -= len(data)
    return b"".join(parts)


def _response_error(url: str, error: urllib.error.HTTPError, start: int) -> Exception:
    """Return the error for the status code of a response; `_Retry` if it may pass."""
    code, file = error.code, url
    if code == 404 or code == 410:
        return FileMissing("the server has no such file", file=file, hint="check the spelling")
    if code in (401, 403):
        reason = error.headers.get("X-Error-Message") or error.reason
        hint = (
            "a signed address may have expired; get a new one, or download the file where you "
            "are logged in"
        )
        if error.headers.get("X-Error-Code") == "GatedRepo":
            hint = "request access on its page, then run: hf auth login"
        elif "X-Error-Message" in error.headers or "/resolve/" in url:
            hint = "run hf auth login, or set HF_TOKEN"
        return FileDenied(f"the server denied access ({code} {reason})", file=file, hint=hint)
    if code == 412:
        return changed_error(url)
    if code == 416:
        return TruncatedFile(f"the file ends before {start:,}", file=file)
    text = f"the server answered {code} {str(error.reason).splitlines()[0]}"
    if code in _RETRIED_CODES:
        pause = error.headers.get("Retry-After", "")
        return _Retry(text, float(pause) if pause.isdecimal() else None)
    return UnreadableFile(text, file=file, hint=_DOWNLOAD_HINT)


def changed_error(file: str) -> UnreadableFile:
    """Return the error for a file that has changed on the server."""
    return UnreadableFile(
        "changed while it was read: the server has another version now",
        file=file,
        hint="try again to read the new version",
    )


def _find_reason(error: BaseException) -> str:
    """Return the message inside a network error, or the name of its class."""
    inner = getattr(error, "reason", error)
    return str(getattr(inner, "strerror", None) or inner or type(error).__name__)
