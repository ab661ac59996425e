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
    """`url` serves `folder`; `gets` counts downloads by file name; names in `halved` are sent by half, and wait.

    Each request waits `delay_s` for its answer, of which `bytes_s` a second are sent.
    """

    def __init__(self, folder: Path, *, delay_s: float = 0.0, bytes_s: float = float("inf")) -> None:
        self.delay_s, self.bytes_s = delay_s, bytes_s
        self.gets: Counter[str] = Counter()
        self.halved: set[str] = set()
        self.half_sent = threading.Event()
        self.goes_on = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._answer(body=False)

            def do_GET(self) -> None:
                self._answer(body=True)

            def _answer(self, *, body: bool) -> None:
                time.sleep(server.delay_s)
                path = folder / self.path.rsplit("/", 1)[-1]
                if not path.is_file():
                    self.send_error(404)
                    return
                data = path.read_bytes()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if not body:
                    return
                server.gets[path.name] += 1
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
