"""A server of files over http, on this machine, which counts what it is asked and can misbehave."""

import json
import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

__all__ = ["serving", "simple_storage"]

SHA = "0123456789abcdef0123456789abcdef01234567"


class Served:
    """What is served, and what has been asked for."""

    def __init__(self, folder):
        self.folder = folder
        self.asked = []
        """Of each request for a file: path, first byte and the one behind the last."""
        self.sent = 0
        """Bytes that nobody asked for."""
        self.ranges = True
        self.misdeeds = {}
        """By the number of a request, what the server does instead: a status, or a word."""
        self.headers = {}
        self.redirects = {}
        self.most = None
        """Bytes of an answer, however many are asked for."""
        self.refusal = None
        """Status and headers of the answer to a request for a file of a repository."""
        self.token = None
        """What a request must bring along."""
        self.seen_tokens = []
        self.note = len
        """Is called with the path of each request."""
        self.url = ""

    @property
    def bytes(self):
        return sum(stop - start for _, start, stop in self.asked)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        served = self.server.served
        path = unquote(urlsplit(self.path).path).lstrip("/")
        served.note(path)
        served.seen_tokens.append(self.headers.get("Authorization"))
        if path in served.redirects:
            self.answer(302, {"Location": served.redirects[path]}, b"")
        elif served.token and self.headers.get("Authorization") != f"Bearer {served.token}":
            self.answer(401, {"X-Error-Message": "Access is restricted"}, b"")
        elif path.startswith("api/models/"):
            self.repository(served, path)
        elif served.refusal and "/resolve/" in path:
            self.answer(*served.refusal, b"")
        else:
            self.file(served, re.sub(r"^[^/]+/[^/]+/resolve/[^/]+/", "", path))

    def repository(self, served, path):
        if "missing" in path:
            self.answer(404, {"X-Error-Code": "RepoNotFound"}, b"{}")
            return
        siblings = [
            {"rfilename": os.path.relpath(os.path.join(here, name), served.folder),
             "size": os.path.getsize(os.path.join(here, name))}
            for here, _, names in os.walk(served.folder) for name in names
        ]  # fmt: skip
        told = {"id": "org/model", "sha": SHA, "siblings": siblings, "private": False}
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(told).encode())

    def file(self, served, path):
        place = os.path.join(served.folder, path)
        if not os.path.isfile(place):
            self.answer(404, {}, b"")
            return
        with open(place, "rb") as file:
            content = file.read()
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        whole = not (served.ranges and found)
        start, stop = (0, len(content)) if whole else (int(found[1]), int(found[2]) + 1)
        stop = min(stop, len(content), start + (served.most or len(content)))
        served.asked.append((path, start, stop))
        misdeed = served.misdeeds.get(len(served.asked))
        tag = f'"{os.stat(place).st_mtime_ns}-{len(content)}"'
        if isinstance(misdeed, int):
            self.answer(misdeed, {"Retry-After": "0"}, b"")
        elif self.headers.get("If-Match", tag) != tag:
            self.answer(412, {}, b"")
        else:
            headers = {"ETag": tag, **served.headers}
            if not whole:
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            data = content[start:stop]
            if misdeed == "lie":
                headers["Content-Range"] = f"bytes {start + 1}-{stop}/{len(content)}"
            if misdeed == "long":
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{'9' * 5000}"
            if misdeed == "huge":
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{1 << 60}"
            self.answer(200 if whole else 206, headers, data, cut=misdeed == "cut")
            while misdeed == "endless":
                try:
                    served.sent += self.connection.send(bytes(1 << 16))
                except OSError:
                    misdeed, self.close_connection = None, True

    def answer(self, status, headers, data, *, cut=False):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        try:
            if self.command != "HEAD":
                self.wfile.write(data[: len(data) // 2] if cut else data)
        except OSError:
            pass  # the client has enough
        if cut:
            self.close_connection = True


@contextmanager
def serving(folder):
    """Serve a folder; the block gets a `Served`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.served = Served(os.fspath(folder))
    server.served.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


_STORAGE = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.disable()
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def simple_storage():
    """Serve S3 in a process of its own, which ends with us; the block gets what leads there."""
    process = subprocess.Popen(
        [sys.executable, "-c", _STORAGE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    deadline = threading.Timer(60, process.kill)
    deadline.start()
    try:
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        deadline.cancel()
        process.kill()
        process.communicate()
