"""A proxy before moto that does what AWS does on bad days, by chance: too busy, without capacity, no answer (before
it is done, or after), an instance that is gone as soon as it was launched, lists that are old. It counts each.

One thing moto lacks is here too: a request for instances that comes again with the same token launches nothing twice,
and its answer is the first one's.
"""

from __future__ import annotations

import random
import re
import threading
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

from tests.support.aws import Moto

XMLNS = "http://ec2.amazonaws.com/doc/2016-11-15/"
ERROR = (
    "<Response><Errors><Error><Code>{0}</Code><Message>{0}</Message></Error></Errors>"
    "<RequestID>r</RequestID></Response>"
)
NOTHING = (
    f'<CreateFleetResponse xmlns="{XMLNS}"><requestId>r</requestId><fleetId>fleet-0</fleetId><errorSet><item>'
    "<errorCode>InsufficientInstanceCapacity</errorCode><errorMessage>none is left</errorMessage>"
    "<lifecycle>spot</lifecycle></item></errorSet><fleetInstanceSet/></CreateFleetResponse>"
)
ANY = ("throttled", "internal error", "no answer, not done", "no answer, but done")


class Faults:
    """`url` is AWS's. `part` of the calls meet a fault."""

    def __init__(self, moto: Moto, seed: int, part: float) -> None:
        self.counts: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.part = part
        self._moto, self._ec2 = moto, moto.client()
        self._random = random.Random(seed)
        self._answers: dict[str, tuple[int, bytes]] = {}  # by token
        self._old: dict[bytes, list[bytes]] = defaultdict(list)
        self._lock = threading.Lock()
        faults = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = faults.answer(body, dict(self.headers))
                if answer is None:
                    self.close_connection = True
                    return
                code, content = answer
                self.send_response(code)
                self.send_header("Content-Type", self.headers.get("Content-Type", "text/xml"))
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, body: bytes, headers: dict[str, str]) -> tuple[int, bytes] | None:
        """None: the connection is closed without one."""
        words = {key: values[0] for key, values in parse_qs(body.decode()).items()}
        action = words.get("Action") or headers.get("X-Amz-Target", "?")
        with self._lock:
            fault = self._choose(action)
            self.calls[action] += 1
            if fault:
                self.counts[fault] += 1
        match fault:
            case "throttled":
                return 503, ERROR.format("RequestLimitExceeded").encode()
            case "no capacity":
                return 200, NOTHING.encode()
            case "no answer, not done":
                return None
            case "internal error":
                return 500, ERROR.format("InternalError").encode()
            case "no answer, but done":
                self._forward(action, words, body, headers)
                return None
            case "an old list":
                before = self._old[body]
                code, content = self._forward(action, words, body, headers)
                return code, before[-min(len(before), 4)] if before else content
            case "gone at once":
                code, content = self._forward(action, words, body, headers)
                ids = re.findall(r"\bi-[0-9a-f]{17}\b", content.decode())
                if ids:
                    self._ec2.terminate_instances(InstanceIds=ids)
                return code, content
            case _:
                return self._forward(action, words, body, headers)

    def _choose(self, action: str) -> str:
        if self._random.random() >= self.part:
            return ""
        kinds = list(ANY)
        if action == "CreateFleet":
            kinds += ["no capacity", "gone at once"]
        if action == "DescribeInstances":
            kinds += ["an old list", "an old list"]
        return self._random.choice(kinds)

    def _forward(self, action: str, words: dict[str, str], body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        if action != "CreateFleet":
            code, content = self._ask(body, headers)
            if action == "DescribeInstances":
                self._old[body].append(content)
            return code, content
        with self._lock:
            token = words["ClientToken"]
            if token not in self._answers:
                self._answers[token] = self._ask(body, headers)
            return self._answers[token]

    def _ask(self, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        kept = {name: value for name, value in headers.items() if name not in ("Host", "Content-Length", "Connection")}
        request = urllib.request.Request(self._moto.url, data=body, headers=kept, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=200) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
