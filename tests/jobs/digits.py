"""The job of test_intruder: the digits example's net and data, no faster than the test says.

    python digits.py OUT [--pace FILE] [--forge]      OUT: the fingerprint, by rank 0

While FILE is there, every step takes at least `PACE_S`, and five times that for one worker alone, who may wait for
another. From step `SLOWER` on it takes 25 times that, and step `HOLD` does not end, so that what is done to the run
hits it in the middle. Nobody joins in a step that does not end: a joiner has a hundred seconds until then. With --forge
rank 0 once sends lines of metrics of steps that nobody has reached.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import farandole

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from digits import digits, net

EPOCHS, BATCH, MICRO = 4, 96, 16
PACE_S = 0.2
FORGED_AT = 5
HOLD = 50  # of 60
SLOWER = 30


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--pace", type=Path)
    parser.add_argument("--forge", action="store_true")
    args = parser.parse_args()
    run = farandole.join()
    model = net(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.replicate(model=model, optimizer=optimizer)
    loader = run.loader(digits()[0], batch=farandole.GlobalBatch(BATCH, micro=MICRO))
    epochs = EPOCHS
    for step in run.steps(loader, epochs=epochs):
        for images, labels in step:
            step.backward(F.cross_entropy(model(images), labels))
        optimizer.step()
        if args.forge and step.number == FORGED_AT and run.is_leader:
            forge(run)
        if args.pace:
            keep_pace(args.pace, step.number, run.view.size)
    if run.is_leader:
        args.out.write_text(run.fingerprint())


def keep_pace(pace: Path, step: int, workers: int) -> None:
    pauses = 25 if step >= SLOWER else 5 if workers == 1 else 1
    while pace.exists() and (pauses or step == HOLD):
        time.sleep(PACE_S)
        pauses = max(pauses - 1, 0)


def forge(run: farandole.Run) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from attack.lines import NOT_ITS_OWN
    from farandole.protocol.messages import decode_from_worker

    for message in map(decode_from_worker, NOT_ITS_OWN):
        if message.step > FORGED_AT:  # one that says that it is further back takes its own lines back with it
            run._context.tell(message)


if __name__ == "__main__":
    main()
