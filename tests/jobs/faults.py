"""A small job with a fault: `python faults.py FOLDER --fault NAME [--at STEP] [--worker WORKER] ...`

A fault takes place at step `--at`, or from that step on, on the worker that its name or `--worker` says.

  it ends or hangs             die, die-joiner, raise, supersede, hang, hang-between-steps
  its replica differs          differ-rate, differ-setting, differ-forward, differ-schedule, differ-element, differ-end
  it computes something else   wrong-batch, wrong-loss, wrong-gradient, wrong-gradient-once, wrong-buffers
  it calls something else      leader-evaluates, unequal-evaluations, leader-thaws, everyone-thaws, one-breaks,
                               everyone-breaks, one-exits, leader-evaluates-at-the-end

FOLDER/hung has the process id of the worker that hangs. Without a fault it trains as long as `--epochs` says.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import farandole
from farandole.errors import WorkerSuperseded

FAULT_AT, BATCH, MICRO = 5, 8, 2


@dataclass
class Job:
    """A fault's view of the job."""

    args: argparse.Namespace
    run: farandole.Run
    model: nn.Sequential
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    rows: TensorDataset
    step: int = -1
    first: int = -1  # the first step of this process

    @property
    def fault(self) -> str:
        return self.args.fault

    @property
    def starts(self) -> bool:
        """The fault's step is the current one."""
        return self.step == self.args.at

    def wrong(self, fault: str) -> bool:
        """This worker computes wrong in the current step, in the way that `fault` names."""
        mine = os.environ.get("FARANDOLE_WORKER") == self.args.worker
        return mine and self.fault == fault and self.step >= self.args.at

    def first_to(self, name: str) -> bool:
        """True in the first process that asks, which leaves its process id in FOLDER/`name`."""
        try:
            with (self.args.folder / name).open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return False
        return True


def error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean(1)


# --- within a step, before a micro-batch -----------------------------------------------------------------------------


def die(job: Job) -> None:
    """Every worker that comes to the step dies of signal 11."""
    if job.starts:
        die_of_signal_11()


def die_joiner(job: Job) -> None:
    """A worker that has joined after the beginning dies of signal 11 in its first step."""
    if job.first > 0:
        die_of_signal_11()


def die_of_signal_11() -> None:
    time.sleep(0.7)  # a heartbeat reports the step
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


def raise_error(job: Job) -> None:
    if job.starts and job.run.rank == 1:
        raise RuntimeError("a trouble of the script's own")


def supersede(job: Job) -> None:
    """The first worker that comes to the step is no use any more, as a joiner whose state is not the run's."""
    if job.starts and job.first_to("superseded"):
        raise WorkerSuperseded("no use any more")


def hang(job: Job) -> None:
    """The first worker that comes to the step never leaves it; or, as a fault between steps, never begins the next."""
    if job.starts and job.first_to("hung"):
        stand_for_ever()


def stand_for_ever() -> None:
    while True:
        time.sleep(1.0)


BEFORE_MICRO_BATCH: dict[str, Callable[[Job], None]] = {
    "die": die, "die-joiner": die_joiner, "raise": raise_error, "supersede": supersede, "hang": hang,
}  # fmt: skip


# --- after a step; True ends the loop --------------------------------------------------------------------------------


def hang_between_steps(job: Job) -> bool:
    hang(job)
    return False


def differ_rate(job: Job) -> bool:
    if job.step >= job.args.at and job.run.is_leader:
        job.optimizer.param_groups[0]["lr"] = 0.05
    return False


def differ_setting(job: Job) -> bool:
    if job.step >= job.args.at and job.run.is_leader:
        torch.set_flush_denormal(True)
    return False


def differ_forward(job: Job) -> bool:
    if job.step >= job.args.at and job.run.is_leader:
        job.model(torch.ones(3, 4))
    return False


def differ_schedule(job: Job) -> bool:
    if job.step >= job.args.at and not job.run.is_leader:
        job.schedule.step()
    return False


def differ_element(job: Job) -> bool:
    if job.starts and not job.run.is_leader:
        with torch.no_grad():
            job.model[0].weight[1, 2] += 1e-3  # type: ignore[index]
    return False


def leader_evaluates(job: Job) -> bool:
    if job.starts and job.run.is_leader:
        job.run.evaluate(job.model, job.rows, error, micro=16)
    return False


def unequal_evaluations(job: Job) -> bool:
    if job.starts:
        metrics = {"a": error, "b": error} if job.run.is_leader else error
        job.run.evaluate(job.model, job.rows, metrics, micro=16)
    return False


def leader_thaws(job: Job) -> bool:
    if job.starts and job.run.is_leader:
        job.model[0].requires_grad_(True)
    return False


def everyone_thaws(job: Job) -> bool:
    if job.starts:
        job.model[0].requires_grad_(True)
    return False


def one_breaks(job: Job) -> bool:
    return job.starts and job.run.rank == 1


def everyone_breaks(job: Job) -> bool:
    return job.starts


def one_exits(job: Job) -> bool:
    if job.starts and job.run.is_leader:
        sys.exit(0)
    return False


def leader_evaluates_at_the_end(job: Job) -> bool:
    leader_evaluates(job)
    return job.starts


AFTER_STEP: dict[str, Callable[[Job], bool]] = {
    "hang-between-steps": hang_between_steps, "differ-rate": differ_rate, "differ-setting": differ_setting,
    "differ-forward": differ_forward, "differ-schedule": differ_schedule, "differ-element": differ_element,
    "leader-evaluates": leader_evaluates, "unequal-evaluations": unequal_evaluations, "leader-thaws": leader_thaws,
    "everyone-thaws": everyone_thaws, "one-breaks": one_breaks, "everyone-breaks": everyone_breaks,
    "one-exits": one_exits, "leader-evaluates-at-the-end": leader_evaluates_at_the_end,
}  # fmt: skip
ELSEWHERE = (
    "none", "differ-end", "wrong-batch", "wrong-loss", "wrong-gradient", "wrong-gradient-once", "wrong-buffers",
)  # fmt: skip


def wrong_gradient(job: Job, gradient: torch.Tensor) -> torch.Tensor:
    """One bit of the gradient is flipped."""
    if job.wrong("wrong-gradient") or (job.wrong("wrong-gradient-once") and job.starts):
        gradient = gradient.clone()
        gradient.view(-1).view(torch.int32)[job.args.bit // 32] ^= 1 << job.args.bit % 31
    return gradient


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fault", choices=[*BEFORE_MICRO_BATCH, *AFTER_STEP, *ELSEWHERE], default="none")
    parser.add_argument("--at", type=int, default=FAULT_AT, help="the step of the fault")
    parser.add_argument("--worker", default="", help="the worker that computes wrong")
    parser.add_argument("--bit", type=int, default=96, help="the bit of the gradient that is wrong")
    parser.add_argument("--steps", type=int, default=20, help="steps an epoch")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--micro", type=int, default=MICRO)
    parser.add_argument("--pace", type=Path, help="while this file holds a number, a step takes so many seconds more")
    args = parser.parse_args()

    run = farandole.join()
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model[0].requires_grad_("thaws" not in args.fault)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    run.replicate(model=model, optimizer=optimizer, schedule=schedule)
    inputs = torch.randn(args.batch * args.steps, 4, generator=torch.Generator().manual_seed(5))
    targets = inputs[:, :1].clone()
    if args.fault == "wrong-batch" and os.environ.get("FARANDOLE_WORKER") == args.worker:
        inputs += 1e-3
    rows = TensorDataset(inputs, targets)
    job = Job(args, run, model, optimizer, schedule, rows)
    if args.fault.startswith("wrong-gradient"):
        model[0].weight.register_hook(lambda gradient: wrong_gradient(job, gradient))
    loader = run.loader(rows, batch=farandole.GlobalBatch(args.batch, micro=args.micro))
    for step in run.steps(loader, epochs=args.epochs):
        job.step = step.number
        job.first = step.number if job.first < 0 else job.first
        if args.pace is not None:
            with contextlib.suppress(FileNotFoundError):
                time.sleep(float(args.pace.read_text()))
        for micro_batch, wanted in step:
            if args.fault in BEFORE_MICRO_BATCH:
                BEFORE_MICRO_BATCH[args.fault](job)
            loss = error(model(micro_batch), wanted).mean()
            if job.wrong("wrong-buffers"):
                model[1].running_mean.data.add_(1e-3)  # type: ignore[operator]
            step.backward(loss * (1.001 if job.wrong("wrong-loss") else 1.0))
        optimizer.step()
        schedule.step()
        if args.fault in AFTER_STEP and AFTER_STEP[args.fault](job):
            break
    if args.fault == "differ-end" and run.is_leader:
        with torch.no_grad():
            model[2].bias.add_(1.0)


if __name__ == "__main__":
    main()
