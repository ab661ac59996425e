"""The drawings of docs/internals.md: each box names a file and what it defines. Writes docs/images/*.svg.

    python docs/drawings.py

A drawing has columns (who acts) and boxes from top to bottom (in which order). An arrow leads to each box from the one
before it; its text is what is sent or called. tests/test_pointers.py looks for each file and name, and compares the
pictures with this file.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parent / "images"
COLUMN, BOX, GAP, MARGIN, HEAD = 320, 290, 34, 16, 44  # pixels
LINE, CHARACTERS = 16, 42


@dataclass(frozen=True, kw_only=True)
class Box:
    """What happens in a column. `arrow`: what leads here from the box before it; None: no arrow."""

    column: int
    text: str
    file: str
    name: str
    arrow: str | None = ""

    @property
    def lines(self) -> list[str]:
        return textwrap.wrap(self.text, CHARACTERS)

    @property
    def height(self) -> int:
        return LINE * (len(self.lines) + 2) + 14


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Columns of boxes. The file is docs/images/NAME.svg."""

    name: str
    columns: tuple[str, ...]
    boxes: tuple[Box, ...]


ARCHITECTURE = Drawing(
    name="architecture",
    columns=("farandole run", "the coordinator's process", "a worker's process, one of many"),
    boxes=(
        Box(column=0, text="starts and watches the coordinator, shows events, sums up", file="cli/supervisor.py",
            name="Supervisor"),
        Box(column=1, text="HTTP and WebSocket: workers, pools, observers, commands", file="coordinator/server.py",
            name="Server", arrow="starts; status, scale, stop"),
        Box(column=1, text="decides who is in the view; messages in, actions out; no clock, no I/O",
            file="protocol/coordinator/coordinator.py", name="Coordinator", arrow="messages"),
        Box(column=0, text="compares the workers that are wanted with those that run; starts and stops them",
            file="pool/reconciler.py", name="PoolReconciler", arrow="how many are wanted"),
        Box(column=0, text="processes here, or on hosts of SSH, EC2, Slurm, Ray, Kubernetes", file="pool/local.py",
            name="LocalPool", arrow="starts"),
        Box(column=2, text="executes the training script", file="script.py", name="run_script",
            arrow="forks a process"),
        Box(column=2, text="what the script calls: replicate, loader, steps, evaluate, once", file="run.py",
            name="Run"),
        Box(column=2, text="rounds: switches views, follows changes", file="protocol/worker/driver.py", name="Driver",
            arrow="steps"),
        Box(column=2, text="what is true of this worker: view, round, commit messages",
            file="protocol/worker/state_machine.py", name="WorkerStateMachine"),
        Box(column=2, text="sums of gradients with the peers, over shared memory or TCP", file="collective/exchange.py",
            name="Exchange", arrow="buckets"),
        Box(column=1, text="keeps events and the coordinator's state, so that another coordinator can go on",
            file="coordinator/journal.py", name="Journal", arrow=None),
    ),
)  # fmt: skip

STEP = Drawing(
    name="step",
    columns=("training thread of w1", "view's thread of w1", "w2"),
    boxes=(
        Box(column=0, text="prepares the state at the step's beginning, and begins the round",
            file="training/loop.py", name="Loop._begin"),
        Box(column=0, text="a view that was agreed takes effect here", file="protocol/worker/state_machine.py",
            name="WorkerStateMachine.begin_round"),
        Box(column=0, text="yields this worker's micro-batches, one after the other", file="training/step.py",
            name="Step._pass_over_shards", arrow="for batch in step"),
        Box(column=0, text="backward pass; hooks take each gradient", file="training/gradients.py",
            name="Gradients.backward", arrow="step.backward(loss)"),
        Box(column=0, text="adds it along the path of a fixed binary tree over the micro-batches",
            file="collective/buckets.py", name="Partials.add_gradient", arrow="gradient of a parameter"),
        Box(column=0, text="sends a full bucket while the backward pass goes on", file="collective/exchange.py",
            name="Exchange.submit", arrow="bucket is full"),
        Box(column=2, text="gets w1's partial sums of its slices, and sends its own", file="collective/exchange.py",
            name="Exchange.submit", arrow="partial sums"),
        Box(column=1, text="adds the slices that w1 owns, in the tree's order; spreads the result",
            file="collective/exchange.py", name="ExchangeBuffers.sum_up", arrow="partial sums"),
        Box(column=1, text="all buckets are reduced: the commit message", file="protocol/worker/state_machine.py",
            name="WorkerStateMachine.commit_message"),
        Box(column=2, text="compares it with its own", file="protocol/worker/state_machine.py",
            name="WorkerStateMachine.end_round", arrow="CommitMessage"),
        Box(column=1, text="all commit messages are here and equal: the round ends",
            file="protocol/worker/state_machine.py", name="WorkerStateMachine.end_round", arrow="CommitMessage"),
        Box(column=0, text="sets .grad, the mean loss and the buffers", file="training/gradients.py",
            name="Gradients.publish", arrow="round has ended"),
        Box(column=0, text="counts the step: rule of the learning rate, ledger, line of metrics",
            file="training/loop.py", name="Loop._count", arrow=""),
    ),
)  # fmt: skip

JOIN = Drawing(
    name="join",
    columns=("joiner w3", "coordinator", "members w1, w2"),
    boxes=(
        Box(column=0, text="connects; the ticket's secret is proved, never sent", file="worker/connection.py",
            name="Connected"),
        Box(column=1, text="admits the connection, answers with the terms of the run",
            file="protocol/coordinator/coordinator.py", name="Coordinator.hello", arrow="Hello"),
        Box(column=0, text="script builds model and data, then asks in with its signature", file="training/loop.py",
            name="Loop._join", arrow="Welcome"),
        Box(column=1, text="compares code, data, shapes and numerics with the run's",
            file="protocol/coordinator/admission.py", name="on_ready", arrow="Ready"),
        Box(column=1, text="plans the next view, now with w3", file="protocol/coordinator/view_changes.py",
            name="next_view"),
        Box(column=2, text="opens connections to w3 while training goes on", file="worker/groups.py",
            name="Groups.arrange", arrow="Propose view 8"),
        Box(column=0, text="opens its connections to the members", file="worker/groups.py", name="Groups.arrange",
            arrow="authenticated connections"),
        Box(column=2, text="all commit messages of a round name view 8: it is agreed",
            file="protocol/worker/state_machine.py", name="WorkerStateMachine.end_round", arrow=None),
        Box(column=2, text="switches to view 8 at the next step", file="protocol/worker/state_machine.py",
            name="WorkerStateMachine.begin_round"),
        Box(column=1, text="puts view 8 in force at the first report", file="protocol/coordinator/view_changes.py",
            name="on_switched", arrow="Switched"),
        Box(column=2, text="each sends a part of the state of this step's beginning", file="worker/rounds.py",
            name="send_state_to_joiners", arrow=None),
        Box(column=0, text="enters the same round, and loads the state", file="protocol/worker/driver.py",
            name="join_view", arrow="state"),
        Box(column=0, text="holds the state: it may commit, and it has shards from the next step on",
            file="protocol/worker/state_machine.py", name="WorkerStateMachine.become_synced"),
        Box(column=1, text="the join is complete; another view may be planned",
            file="protocol/coordinator/view_changes.py", name="on_synced", arrow="Synced"),
    ),
)  # fmt: skip

LEAVE = Drawing(
    name="leave",
    columns=("leaving w2", "coordinator", "w1, and the pool"),
    boxes=(
        Box(column=0, text="SIGTERM, or a cloud's preemption notice", file="script.py", name="_notice"),
        Box(column=0, text="asks to leave; training goes on", file="run.py", name="Run.notice"),
        Box(column=1, text="marks w2 as leaving", file="protocol/coordinator/scaling.py", name="request_leave",
            arrow="LeaveRequest"),
        Box(column=2, text="starts a replacement at once", file="pool/reconciler.py", name="PoolReconciler.update",
            arrow="Roster"),
        Box(column=1, text="plans a view without w2, over the same connections",
            file="protocol/coordinator/view_changes.py", name="next_view", arrow=None),
        Box(column=2, text="prepares it; the next commit message names it", file="protocol/worker/state_machine.py",
            name="WorkerStateMachine.on_message", arrow="Propose view 9"),
        Box(column=0, text="the same: w2 still computes its part of this round",
            file="protocol/worker/state_machine.py", name="WorkerStateMachine.commit_message", arrow="CommitMessage"),
        Box(column=0, text="the view is agreed; w2 is not in it and computes nothing more",
            file="protocol/worker/state_machine.py", name="WorkerStateMachine.begin_round"),
        Box(column=1, text="when all have switched, w2 is released", file="protocol/coordinator/view_changes.py",
            name="on_switched", arrow="Switched"),
        Box(column=0, text="handles the exit, with code 0", file="protocol/worker/driver.py",
            name="Driver.handle_requests", arrow="Goodbye"),
        Box(column=2, text="w1 computes all micro-batches of the step, or shares them with the replacement",
            file="training/step.py", name="Step._pass_over_shards", arrow=None),
    ),
)  # fmt: skip

CRASH = Drawing(
    name="crash",
    columns=("w1, which lives", "coordinator", "pool of w2, which was killed"),
    boxes=(
        Box(column=2, text="sees the process end, and how", file="pool/local.py", name="LocalPool._reap"),
        Box(column=1, text="this worker is gone, for certain", file="protocol/coordinator/coordinator.py",
            name="on_process_exit", arrow="WorkerProcessExited"),
        Box(column=0, text="a broken connection is reported too, where it is seen first", file="worker/context.py",
            name="WorkerContext.lost", arrow=None),
        Box(column=1, text="an accusation: the accused may be alive", file="protocol/coordinator/recovery.py",
            name="on_suspect", arrow="Suspect"),
        Box(column=1, text="stops the view", file="protocol/coordinator/recovery.py", name="stop_view"),
        Box(column=0, text="stands still, and reports round, step, and if it holds the sum",
            file="protocol/worker/state_machine.py", name="WorkerStateMachine.on_message", arrow="Stop"),
        Box(column=1, text="all within reach have answered, and the view is fenced",
            file="protocol/coordinator/recovery.py", name="recover_if_ready", arrow="Stopped"),
        Box(column=1, text="commit the round if all hold its sum, else redo it",
            file="protocol/coordinator/recovery.py", name="decide"),
        Box(column=0, text="goes on in the new view: a new exchange over the partial sums that it has",
            file="protocol/worker/driver.py", name="Driver.sync", arrow="Resume"),
        Box(column=0, text="computes w2's micro-batches too; its own stay as they are", file="training/step.py",
            name="Step._pass_over_shards"),
        Box(column=2, text="starts a replacement, later and later if losses repeat", file="pool/reconciler.py",
            name="PoolReconciler.take_actions", arrow=None),
    ),
)  # fmt: skip

DRAWINGS = (ARCHITECTURE, STEP, JOIN, LEAVE, CRASH)


def svg(drawing: Drawing) -> str:
    """The picture, on a white ground so that it is readable in a dark page too."""
    parts: list[str] = []
    width = COLUMN * len(drawing.columns) + 2 * MARGIN
    lefts = [MARGIN + COLUMN * column + (COLUMN - BOX) // 2 for column in range(len(drawing.columns))]
    y, before = HEAD + MARGIN, None
    for box in drawing.boxes:
        if before is not None:
            y += GAP
            if box.arrow is not None:
                parts += _arrow(lefts[before.column] + BOX // 2, lefts[box.column] + BOX // 2, y - GAP, y, box.arrow)
        parts += _box(box, lefts[box.column], y)
        y, before = y + box.height, box
    height = y + MARGIN
    columns: list[str] = []
    for left, title in zip(lefts, drawing.columns, strict=True):
        middle = left + BOX // 2
        columns.append(f'<text x="{middle}" y="{MARGIN + 14}" class="head">{escape(title)}</text>')
        columns.append(f'<path d="M{middle} {HEAD - 4}V{height - MARGIN}" class="lane"/>')
    size = f'width="{width}" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size}>',
            "<style>text{font:13px sans-serif;text-anchor:middle;fill:#1b1f24}.head{font-weight:bold;font-size:14px}"
            ".code{font:11px monospace;fill:#3949ab}.sent{font-size:12px;fill:#00695c}.lane{stroke:#d0d7de;"
            "stroke-dasharray:4 4}.box{fill:#f6f8fa;stroke:#57606a}.arrow{stroke:#00695c;stroke-width:1.5;fill:none}"
            "</style>",
            '<defs><marker id="end" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
            '<path d="M0 0L8 4L0 8z" fill="#00695c"/></marker></defs>',
            f'<rect {size} fill="#fff"/>',
            *columns,
            *parts,
            "</svg>\n",
        ]
    )


def _box(box: Box, left: int, top: int) -> list[str]:
    middle, y = left + BOX // 2, top + LINE + 2
    parts = [f'<rect x="{left}" y="{top}" width="{BOX}" height="{box.height}" rx="5" class="box"/>']
    for line in box.lines:
        parts.append(f'<text x="{middle}" y="{y}">{escape(line)}</text>')
        y += LINE
    for line in (box.file, box.name):
        parts.append(f'<text x="{middle}" y="{y + 1}" class="code">{escape(line)}</text>')
        y += LINE
    return parts


def _arrow(start: int, end: int, top: int, bottom: int, text: str) -> list[str]:
    middle = (top + bottom) // 2
    if start == end:
        path, x, anchor = f"M{start} {top}V{bottom}", start + 8, "start"
    else:
        path, x, anchor = f"M{start} {top}V{middle}H{end}V{bottom}", (start + end) // 2, "middle"
    label = f'<text x="{x}" y="{middle - 4 if start != end else middle + 4}" class="sent" style="text-anchor:{anchor}">'
    return [f'<path d="{path}" class="arrow" marker-end="url(#end)"/>', f"{label}{escape(text)}</text>" if text else ""]


def main() -> None:
    for drawing in DRAWINGS:
        (IMAGES / f"{drawing.name}.svg").write_text(svg(drawing))


if __name__ == "__main__":
    main()
