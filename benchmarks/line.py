"""`python -m benchmarks.line VERB FILE ...`: ckptool over http, on a line of 50 ms and 100 MB/s.

The file is served by this process; every request waits for the latency, and all answers share the
rate. The last line of the output is how many seconds ckptool took, start and all.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

__all__ = ["main"]

LATENCY = 0.05
RATE = 100e6
PIECE = 256 << 10


class Line:
    """What all connections share: the rate, and a count of the requests."""

    def __init__(self, folder: Path) -> None:
        """Serve the files of `folder`."""
        self.folder, self.requests, self.sent = folder, 0, 0
        self._free = 0.0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Wait as long as a request is under way."""
        with self._lock:
            self.requests += 1
        time.sleep(LATENCY)

    def wait(self, length: int) -> None:
        """Wait until the line has carried so many bytes."""
        with self._lock:
            self._free = max(self._free, time.monotonic()) + length / RATE
            self.sent += length
            until = self._free
        time.sleep(max(0.0, until - time.monotonic()))


class Handler(BaseHTTPRequestHandler):
    """Ranges of files."""

    line: Line
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Answer with the range that is asked for."""
        self.line.begin()
        path = self.line.folder / os.path.basename(self.path)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None or not path.is_file():
            self.send_error(404)
            return
        size = path.stat().st_size
        start, stop = int(asked[1]), min(int(asked[2]) + 1, size)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("ETag", '"same"')
        self.end_headers()
        with path.open("rb") as file:
            file.seek(start)
            while start < stop:
                data = file.read(min(PIECE, stop - start))
                self.line.wait(len(data))
                self.wfile.write(data)
                start += len(data)


def main() -> int:
    """Run the command."""
    verb, source, *words = sys.argv[1:]
    Handler.line = line = Line(Path(source).parent)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}/{Path(source).name}"
    begun = time.perf_counter()
    command = [sys.executable, "-m", "ckptool", verb, address, *words]
    code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    seconds = time.perf_counter() - begun
    print(f"{line.requests} requests, {line.sent:,} bytes")
    print(seconds)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
