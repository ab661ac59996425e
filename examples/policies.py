"""The batch policy, by the same options in every example: `--batch`, `--micro` and `--policy`.

`--policy global` is a batch that stays the same, whoever trains. With `--policy per-worker` each worker adds one such
batch, and the learning rate follows by a rule that fits the optimizer. Epochs and schedules count batches of `--batch`
samples either way, so a schedule that is stepped `step.base_steps` times ends where it should.
"""

import argparse

import farandole


def add_batch_options(parser: argparse.ArgumentParser, *, batch: int, micro: int) -> None:
    """`batch`, `micro`: samples, unless the user says otherwise."""
    parser.add_argument("--batch", type=int, default=batch, help="samples a step; per worker with --policy per-worker")
    parser.add_argument("--micro", type=int, default=micro, help="samples a micro-batch")
    parser.add_argument(
        "--policy",
        choices=("global", "per-worker"),
        default="global",
        help="global: a constant batch; per-worker: the batch follows the workers, and the learning rate the batch",
    )


def batch_policy(
    args: argparse.Namespace, rule: farandole.MomentumCompensation | farandole.SquareRoot
) -> farandole.GlobalBatch | farandole.PerWorkerBatch:
    """What the options say; `rule`: the one that fits the optimizer."""
    if args.policy == "per-worker":
        return farandole.PerWorkerBatch(args.batch, micro=args.micro, rule=rule)
    return farandole.GlobalBatch(args.batch, micro=args.micro)
