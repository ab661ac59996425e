"""What a stranger's bytes may be: the head of one HTTP/1.1 request, of which one header is looked at.

Strangers are not parsed by the HTTP library: until a connection is admitted its bytes come here, and whatever they are,
the answer is one of two (`CHALLENGE`, `DISMISSAL`). So no header, method, encoding or upgrade makes anybody else
answer, and nothing says what serves here.
"""

from __future__ import annotations

import re

LONGEST = 8 * 1024  # bytes of a head
LINE = re.compile(rb"[A-Z]{1,16} [!-~]+ HTTP/1\.1")
HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*?)[ \t]*")
END = b"\r\n\r\n"
CHALLENGE = "HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: {}\r\nContent-Length: 0\r\n\r\n"
DISMISSAL = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def target(data: bytes) -> str:
    """The method and the path that `data` asks for, "GET /metrics", where it is a head that `authorization` takes."""
    return data.partition(b" HTTP/")[0].decode("latin-1")


def authorization(data: bytes) -> str | None:
    """The Authorization header of the head that `data` begins with, "" without one; None while it is not all there.

    Raises:
        ValueError: it is not the head of a request.
    """
    if not b"A" <= data[:1] <= b"Z":
        raise ValueError("no request begins like this")
    head, end, _ = data.partition(END)
    if len(head) > LONGEST:
        raise ValueError(f"a head of more than {LONGEST} bytes")
    if not end:
        return None
    line, *headers = head.split(b"\r\n")
    if not LINE.fullmatch(line):
        raise ValueError("not a request line")
    found: list[bytes] = []
    for header in headers:
        match = HEADER.fullmatch(header)
        if match is None:
            raise ValueError("not a header")
        if match[1].lower() == b"authorization":
            found.append(match[2])
    return b", ".join(found).decode("latin-1")
