"""Any message that a worker can send, whether one of ours would or not: well-formed, in no order."""

from __future__ import annotations

from hypothesis import strategies as st

from farandole.protocol import messages as m
from farandole.protocol.view import Lineage, View
from tests.support.metric_lines import stepped

WORKERS = ("w1", "w2", "w3", "w4")
names = st.sampled_from((*WORKERS, "", "nobody"))
numbers = st.integers(0, 4) | st.just(2**53)
texts = st.sampled_from(("", "why", "x" * 250))


def some_shares(workers: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.just(()) | st.lists(st.integers(1, 1000), min_size=workers, max_size=workers).map(tuple)


sets = st.lists(st.lists(names, max_size=3).map(tuple), max_size=3).map(tuple)
lineages = sets.flatmap(
    lambda found: st.builds(Lineage, sets=st.just(found), shares=some_shares(len(found[0]) if found else 0))
)
signatures = st.sampled_from((m.Signature(facts=()), m.Signature(facts=(("torch", "2"), ("torch", "3")))))
steps = st.builds(stepped, numbers, loss=st.floats(), samples=numbers, total=st.none() | numbers)
logs = st.builds(m.Line, step=numbers, index=st.integers(1, 4), fields=st.dictionaries(texts, numbers | texts))
lines = steps | logs
members = st.lists(names, max_size=3).map(tuple)
views = members.flatmap(
    lambda found: st.builds(View, number=numbers, members=st.just(found), group=numbers, shares=some_shares(len(found)))
)
found = st.builds(
    m.Computed, owner=names, shards=st.lists(numbers, max_size=2).map(tuple),
    names=st.lists(names, max_size=2).map(tuple),
    digests=st.lists(numbers, max_size=3).map(tuple),
)  # fmt: skip
triples = st.lists(st.tuples(st.integers(0, 4), numbers, numbers), max_size=2).map(tuple)
MESSAGES: st.SearchStrategy[m.Message] = st.one_of(
    st.builds(m.Hello, kind=texts, worker=names, pid=numbers),
    st.builds(m.Ready, signature=signatures),
    st.builds(m.Heartbeat, view=numbers, round=numbers, step=numbers, lines=st.lists(lines, max_size=2).map(tuple),
              shard_us=numbers, shards=numbers, shards_total=numbers),
    st.builds(m.LeaveRequest, reason=texts),
    st.builds(m.Publish, group=numbers, key=texts, value=st.binary(max_size=3)),
    st.builds(m.Prepared, view=numbers),
    st.builds(m.Switched, view=numbers, round=numbers, step=numbers),
    st.builds(m.Synced, view=numbers),
    st.builds(m.Suspect, view=numbers, peer=names, reason=texts),
    st.builds(
        m.Stopped, stop=numbers, view=st.none() | views, round=numbers, step=numbers, has_result=st.booleans(),
        synced=st.booleans(),
        lineage=lineages, own_results=found, check_results=found, unchecked=st.booleans(), compared=members,
    ),
    st.builds(m.ScriptFailed, traceback=texts),
    st.builds(m.DataUnavailable, reason=texts),
    st.builds(m.NotFinite, step=numbers, loss=texts),
    st.builds(m.Differs, step=numbers, workers=members),
    st.builds(m.ShardsDiffer, step=numbers),
    st.builds(m.Drifts, step=numbers, workers=members, times=numbers),
    st.builds(m.Saved, path=texts, error=texts, between=st.booleans()),
    st.builds(m.Finished, fingerprint=texts),
    st.builds(
        m.Spans, number=numbers, wall_us=numbers, steps=triples, spans=triples, waits=triples,
        peers=st.lists(names, max_size=2).map(tuple),
    ),
)  # fmt: skip
