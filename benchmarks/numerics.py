"""Whom the numeric fingerprint refuses, and whose bits are others: this CPU held to less by its libraries' switches.

    python -m benchmarks.numerics [--markdown] [--quick] [--bits portable] [--emulated EPYC Haswell ...]

A process for each level of oneDNN, ATen, MKL and NumPy that this CPU takes, or for each CPU that is to be emulated
(apt: qemu-user; many minutes each). Each computes the fingerprint, and trains a handful of nets, those of the examples
where they are cheap, for a few steps with SGD and with AdamW. Compared with this CPU and its libraries as they are, it
is

    refused and changes bits        as it should be
    refused, no net changes         more careful than these nets need
    let in, and equal               as it should be
    LET IN, BUT CHANGES             never: exit code 1

With `--bits portable` nobody is to be refused, and nothing to change: exit code 1 as well. What a switch does is not
what another maker's CPU does; the switches only show whether the fingerprint sees them.

MKL takes other kernels for products of few columns as soon as MKL_CBWR is set to any value, so such a process is
refused although no net changes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

LEVELS = (
    *(
        ("ONEDNN_MAX_CPU_ISA", v)
        for v in ("SSE41", "AVX", "AVX2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16")
    ),
    *(("ATEN_CPU_CAPABILITY", v) for v in ("default", "avx2", "avx512")),
    *(("MKL_CBWR", v) for v in ("COMPATIBLE", "SSE4_2", "AVX", "AVX2", "AVX512", "AUTO")),
    *(("OPENBLAS_CORETYPE", v) for v in ("Nehalem", "Haswell", "Zen", "SkylakeX")),
    ("NPY_DISABLE_CPU_FEATURES", "X86_V4 AVX512_ICL AVX512_SPR"),
)
STEPS, SAMPLES = 4, 16
EXAMPLES = Path(__file__).parents[1] / "examples"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--quick", action="store_true", help="two levels only")
    parser.add_argument("--bits", choices=("same", "portable"), default="same")
    parser.add_argument("--emulated", nargs="+", metavar="CPU", help="in place of the switches")
    parser.add_argument("--measure", action="store_true", help="what each process does")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measured(args.bits)))
        return
    from benchmarks.tables import show
    from farandole.protocol.numeric_facts import numeric_differences

    levels = [LEVELS[2], LEVELS[9]] if args.quick else LEVELS
    others = [(cpu, cpu, {}) for cpu in args.emulated] if args.emulated else [
        (f"{variable}={level.split()[0]}{' ...' if ' ' in level else ''}", "", {variable: level})
        for variable, level in levels
    ]  # fmt: skip
    plain = of(args.bits)
    rows, missed = [], False
    for name, cpu, environ in others:
        other = of(args.bits, cpu, **environ)
        found = numeric_differences(plain["facts"].items(), other["facts"].items())
        changed = [name for name, digest in other["trainings"].items() if digest != plain["trainings"][name]]
        missed = missed or bool(changed and not found.bits) or (args.bits == "portable" and bool(changed or found.bits))
        verdict = ("refused and changes bits" if changed else "refused, no net changes") if found.bits else (
            "LET IN, BUT CHANGES" if changed else "let in, and equal"
        )  # fmt: skip
        first = found.settings[0][0] if found.settings else found.operations[0][0] if found.operations else "-"
        counts = (f"{len(found.operations)} of {found.compared}", f"{len(changed)} of {len(plain['trainings'])}")
        rows.append((name, verdict, *counts, first))
        print(f"{name}: {verdict}; {', '.join(changed)}", file=sys.stderr, flush=True)
    columns = ("machine", "verdict", "operations that differ", "trainings that differ", "refused by")
    show(f"Against this CPU with its libraries as they are, --bits {args.bits}", columns, rows, markdown=args.markdown)
    sys.exit(1 if missed else 0)


def of(bits: str, cpu: str = "", **environ: str) -> dict[str, dict[str, str]]:
    """What a process computes in which these are set, on that emulated CPU, or on this one."""
    emulator = ["qemu-x86_64", "-cpu", cpu] if cpu else []
    command = [*emulator, sys.executable, "-m", "benchmarks.numerics", "--measure", "--bits", bits]
    done = subprocess.run(
        command, env={**os.environ, **environ}, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout)


def measured(bits: str) -> dict[str, dict[str, str]]:
    from farandole.platform import cpu as switches

    switches.set_for(bits)
    import torch
    from PIL import Image  # noqa: F401

    from farandole.numerics import portable
    from farandole.training import run_state

    if bits == "portable":
        portable.take_over(1, torch.device("cpu"))
    facts = dict(run_state.local_facts(1, bits))
    sys.path.insert(0, str(EXAMPLES))

    trainings: dict[str, str] = {}
    for name, build in nets().items():
        for optimizer_of in (torch.optim.SGD, torch.optim.AdamW):
            trainings[f"{name} by {optimizer_of.__name__}"] = trained(build, optimizer_of)
    return {"facts": facts, "trainings": trainings}


def nets() -> dict[str, Callable[..., object]]:
    """Each makes a model, and the shape of one sample; one of whole numbers, below which they are."""
    import cifar10
    import digits
    import segment
    import shakespeare
    from torch import nn

    from benchmarks import models

    return {
        "perceptron": lambda: (models.build("perceptron"), (1, 28, 28)),
        "convolutional net": lambda: (models.build("small"), (1, 28, 28)),
        "digits": lambda: (digits.net(32), (1, 8, 8)),
        "cifar10's residual net": lambda: (cifar10.resnet(8), (3, 32, 32)),
        "segment's U-net": lambda: (segment.UNet(16), (3, 64, 64)),
        "shakespeare's transformer": lambda: (shakespeare.Transformer(65, 64, 2, 96, 4, 0.1), 65),
        "torch's transformer layer": lambda: (nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), (20, 64)),
        "recurrent net": lambda: (nn.Sequential(nn.LSTM(24, 48, batch_first=True)), (20, 24)),
    }


def trained(build: Callable[..., object], optimizer_of: Callable[..., object]) -> str:
    """The digest of the parameters after a few steps."""
    import hashlib

    import torch

    torch.manual_seed(3)
    model, shape = build()  # type: ignore[misc]
    with torch.no_grad():  # not by a generator whose bits may differ: a joiner gets its state from others
        for number, parameter in enumerate(model.parameters()):
            numbers = torch.arange(parameter.numel(), dtype=torch.int64) * 2654435761 + number * 40503
            values = ((numbers % 65536).float() / 65536 - 0.5) * 0.1
            parameter.copy_(values.view(parameter.shape) + (1.0 if parameter.ndim == 1 else 0.0))
    optimizer = optimizer_of(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        if isinstance(shape, int):
            inputs = torch.randint(shape, (SAMPLES, 64), generator=generator)
        else:
            inputs = torch.rand((SAMPLES, *shape), generator=generator)
        optimizer.zero_grad()
        outputs = model(inputs)
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        outputs.flatten(1).log_softmax(1)[:, :7].mean().neg().backward()
        optimizer.step()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
