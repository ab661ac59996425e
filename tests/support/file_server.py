"""A folder over HTTP, for tests: counts what is asked for, can be slow, and can stop in the middle of a file."""

from __future__ import annotations

import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType

_PIECE = 1 << 14


class FileServer:
    """`url` serves `folder`; `gets` counts downloads of whole files by name, `parts` of parts of them; names in
    `halved` are sent by half, and wait. So many `refusals` come first, each 503 and a page. `ranges`: it knows them.
    So many answers of parts are `spoilt`: of the same length, with other bytes, others each time.

    Each request waits `delay_s` for its answer, of which `bytes_s` a second are sent.
    """

    def __init__(
        self, folder: Path, *, delay_s: float = 0.0, bytes_s: float = float("inf"), ranges: bool = True,
        refusals: int = 0,
    ) -> None:  # fmt: skip
        self.delay_s, self.bytes_s = delay_s, bytes_s
        self.ranges, self.refusals, self.spoilt = ranges, refusals, 0
        self.gets: Counter[str] = Counter()
        self.parts: Counter[str] = Counter()
        self.at_once = self.most_at_once = 0
        self._counting = threading.Lock()
        self.halved: set[str] = set()
        self.half_sent = threading.Event()
        self.goes_on = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._answer(body=False)

            def do_GET(self) -> None:
                with server._counting:
                    server.at_once += 1
                    server.most_at_once = max(server.most_at_once, server.at_once)
                try:
                    self._answer(body=True)
                finally:
                    with server._counting:
                        server.at_once -= 1

            def _answer(self, *, body: bool) -> None:
                time.sleep(server.delay_s)
                path = folder / self.path.rsplit("/", 1)[-1]
                if not path.is_file():
                    self.send_error(404)
                    return
                if server.refusals:
                    server.refusals -= 1
                    self.send_error(503)
                    return
                data = path.read_bytes()
                length, wanted = len(data), self.headers.get("Range", "")
                if server.ranges and wanted:
                    first, last = wanted.removeprefix("bytes=").split("-")
                    data = data[int(first) : int(last) + 1]
                    self.send_response(206)
                else:
                    self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if not body:
                    return
                (server.gets if len(data) == length else server.parts)[path.name] += 1
                if server.spoilt and len(data) < length:
                    server.spoilt -= 1
                    data = bytes(byte ^ (server.spoilt + 1) for byte in data)
                if path.name in server.halved:
                    self.wfile.write(data[: len(data) // 2])
                    self.wfile.flush()
                    server.half_sent.set()
                    server.goes_on.wait(60)
                    return
                self._write(data)

            def _write(self, data: bytes) -> None:
                if server.bytes_s == float("inf"):
                    self.wfile.write(data)
                    return
                for at in range(0, len(data), _PIECE):
                    self.wfile.write(data[at : at + _PIECE])
                    time.sleep(min(_PIECE, len(data) - at) / server.bytes_s)

            def log_message(self, format: str, *args: object) -> None:
                del format, args

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))

    def __enter__(self) -> FileServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.goes_on.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
