"""Who may enter: a worker that has built its model and opened its data, compared with the run.

What the run executes is known from its start, from the copy that `farandole run` made; the rest is what the first one
brings. So a guest of another script is refused even where it is the first.
"""

from __future__ import annotations

from farandole.membership import messages as m
from farandole.membership import saving
from farandole.membership.books import Books
from farandole.membership.difference import first_difference, in_words, other_code, without_code
from farandole.membership.records import Worker


def ready(books: Books, worker: Worker, message: m.Ready) -> None:
    """The worker asks in: from now on it is a candidate, or is refused and told why."""
    if worker.state != "starting":
        return
    signature = message.signature
    code = _other_code(books, signature)
    difference = f"{in_words(code)}: not what the run executes, which is in its folder's code/" if code else ""
    if not code or books.settings.other_code:
        books.signature = books.signature or (without_code(signature) if code else signature)
        difference = first_difference(books.signature, signature)
    if difference:
        del books.workers[worker.id]
        books.record("refused", worker=worker.id, host=worker.host, reason=difference)
        books.send(worker.id, m.Refused(reason=difference))
        return
    if code:
        books.record("other code", worker=worker.id, what=code)
    worker.state, worker.unreached = "ready", message.unreached
    books.record("ready", worker=worker.id, host=worker.host, pid=worker.pid, **saving.reach(worker))


def _other_code(books: Books, signature: m.Signature) -> list[str]:
    expected = (*books.settings.code, *(books.signature.facts if books.signature else ()))
    return list(dict.fromkeys(other_code(expected, signature.facts)))
