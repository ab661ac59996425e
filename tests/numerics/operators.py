"""What this CPU computes under `--bits portable`: layers, functions and optimizers, and torch's own list of operators.

    python -m tests.numerics.operators [FIRST [END]]

prints two JSON lines for each: its number, before it begins; then its name, the digest of its results and gradients,
and the operators that it has run, with the types of what they were given. `tests/numerics/sweep.py` compares by it.
"""

from __future__ import annotations

import hashlib
import json
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from farandole.platform import cpu

cpu.set_for("portable")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils import _pytree  # noqa: E402

from farandole.numerics import portable  # noqa: E402
from tests.numerics.functions import Numbers, functions  # noqa: E402
from tests.numerics.layers import layers  # noqa: E402

FLOATS = (torch.float32, torch.float64, torch.bfloat16)
SAMPLES = 5  # of each operator in torch's list
LEFT_OUT = ("jiterator", "empty", "new_empty")  # for another device; whatever is in memory
Case = Callable[[], Any]


def drawn() -> Iterator[tuple[str, Case]]:
    """What draws random numbers."""
    empty = torch.empty
    for name in (
        "uniform_",
        "normal_",
        "exponential_",
        "random_",
        "bernoulli_",
        "geometric_",
        "cauchy_",
        "log_normal_",
    ):
        arguments = (0.3,) if name == "geometric_" else ()
        yield name, lambda name=name, a=arguments: [getattr(empty(n), name)(*a) for n in (5, 16, 1001)]
    yield "dropout", lambda: F.dropout(torch.ones(1001), 0.3)
    yield "numbers of a generator", _by_generator
    for dtype in FLOATS:
        yield f"copies, {dtype}", lambda d=dtype: _copies(d)
    yield "permutation", lambda: torch.randperm(101)
    yield "whole numbers", lambda: torch.randint(0, 77, (101,))
    yield "multinomial", lambda: torch.multinomial(torch.arange(1.0, 30.0), 7)
    yield "chance", lambda: torch.bernoulli(torch.linspace(0, 1, 101))
    for name in ("kaiming_normal_", "xavier_uniform_", "trunc_normal_", "orthogonal_"):
        yield name, lambda name=name: getattr(nn.init, name)(empty(33, 40))


def _by_generator() -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    few = [torch.rand(101, generator=g), torch.randn(101, generator=g), torch.randperm(101, generator=g)]
    more = [torch.empty(33).normal_(generator=g), torch.empty(33).uniform_(generator=g)]
    return [
        *few,
        *more,
        torch.randint(0, 9, (101,), generator=g),
        torch.randn(5),
        torch.rand(5),
        torch.rand_like(few[0]),
    ]


def _copies(dtype: torch.dtype) -> list[Any]:
    x = torch.arange(12, dtype=dtype)
    made = (
        torch.tensor([1.0, 2.0], dtype=dtype),
        torch.zeros(3, 4).copy_(x.view(3, 4)),
        x.clone().zero_(),
        x.view(-1, 1),
    )
    return [
        *made,
        x.view(torch.uint8),
        torch.empty(12, dtype=dtype).copy_(torch.arange(12.0)),
        x.sum().item(),
        x.equal(x),
    ]


def optimizers(take: Numbers) -> Iterator[tuple[str, Case]]:
    given = {"SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}, "RMSprop": {"momentum": 0.9}}
    for name in [
        "SGD",
        "Adam",
        "AdamW",
        "Adagrad",
        "RMSprop",
        "Adamax",
        "NAdam",
        "RAdam",
        "Adadelta",
        "Rprop",
        "ASGD",
        "Adafactor",
        "LBFGS",
    ]:
        for how in ({"foreach": False}, {"foreach": True}, {"fused": True}, {"amsgrad": True}):
            if (how.get("fused") and name not in ("SGD", "Adam", "AdamW", "Adagrad")) or (name == "LBFGS" and how):
                continue
            if how.get("amsgrad") and name not in ("Adam", "AdamW"):
                continue
            start, more = [take(33, 40), take(70)], {**given.get(name, {}), **how}
            yield f"{name} {how}", lambda name=name, start=start, more=more: _steps(name, start, more)


def _steps(name: str, start: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    parameters = [nn.Parameter(x.clone()) for x in start]
    optimizer = getattr(torch.optim, name)(parameters, lr=0.01, **options)

    def closure() -> float:
        for n, parameter in enumerate(parameters):
            parameter.grad = parameter.detach() * torch.linspace(-1, 1, parameter.shape[-1]) + n
        return 1.0

    for _ in range(4):
        closure()
        optimizer.step(closure)
    return [p.detach() for p in parameters]


def with_gradients(function: Callable[..., Any], given: tuple[Tensor, ...], more: tuple[Tensor, ...] = ()) -> list[Any]:
    leaves = [x.detach().requires_grad_() for x in given]
    torch.manual_seed(1)
    made = _pytree.tree_leaves(function(*leaves))
    outputs = [x for x in made if isinstance(x, Tensor) and x.requires_grad and not x.is_complex()]
    wanted = [*leaves, *more]
    ones = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape) for x in outputs]
    return [made, torch.autograd.grad(outputs, wanted, ones, allow_unused=True) if outputs else None]


def cases() -> Iterator[tuple[str, Case]]:
    take = Numbers()
    for dtype in FLOATS:
        kind = portable.name_of_type(dtype)
        for name, module, shape in layers():
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.copy_(take(*parameter.shape))
            module.to(dtype)
            x, parameters = take(*shape, dtype=dtype), tuple(module.parameters())
            yield f"{name}, {kind}", lambda m=module, x=x, p=parameters: with_gradients(m, (x,), p)
            yield f"{name}, evaluated, {kind}", lambda m=module, x=x: _evaluated(m, x)
        for name, function, given in functions(take):
            yield f"{name}, {kind}", lambda f=function, g=given, d=dtype: with_gradients(f, tuple(x.to(d) for x in g))
    yield from drawn()
    yield from optimizers(take)
    yield from listed()


def _evaluated(module: nn.Module, x: Tensor) -> Any:
    module.eval()
    with torch.no_grad():
        made = module(x)
    module.train()
    return made


def listed() -> Iterator[tuple[str, Case]]:
    """torch's own list of operators, each with the arguments that its tests have."""
    missing = types.ModuleType("expecttest")  # torch's tests need it, their list does not
    missing.__dict__.update(TestCase=unittest.TestCase, assert_expected_inline=None)
    sys.modules.setdefault("expecttest", missing)
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        dtype = torch.float32 if torch.float32 in op.dtypes else torch.int64
        if dtype not in op.dtypes or op.name.startswith(LEFT_OUT):
            continue
        name = f"{op.name} {op.variant_test_name}".strip()
        yield f"listed {name}", lambda op=op, dtype=dtype: _sampled(op, dtype)


def _sampled(op: Any, dtype: torch.dtype) -> list[Any]:
    torch.manual_seed(0)
    differentiable = op.supports_autograd and dtype is torch.float32
    results = list[Any]()
    for n, sample in enumerate(islice(op.sample_inputs("cpu", dtype, requires_grad=differentiable), SAMPLES)):
        torch.manual_seed(n)
        made = op.op(sample.input, *sample.args, **sample.kwargs)
        results.append(made)
        given = [t for t in _tensors((sample.input, sample.args, sample.kwargs)) if t.requires_grad]
        outputs = [t for t in _tensors(made) if t.requires_grad and not t.is_complex()]
        if differentiable and given and outputs:
            ones = [torch.linspace(-1, 1, t.numel()).view(t.shape).to(t.dtype) for t in outputs]
            results.append(torch.autograd.grad(outputs, given, ones, allow_unused=True))
    return results


def _tensors(of: Any) -> list[Tensor]:
    return [x for x in _pytree.tree_leaves(of) if isinstance(x, Tensor)]


def digest(of: Any) -> str:
    made = hashlib.sha256()
    for x in _pytree.tree_leaves(of):
        if isinstance(x, Tensor):
            x = x.detach()
            x = (x.to_dense() if x.layout is not torch.strided else x).resolve_conj().resolve_neg()
            x = torch.zeros_like(x) if x._is_zerotensor() else x.contiguous()
            made.update(f"{x.dtype} {tuple(x.shape)}".encode())
            small = x.dtype in (torch.bfloat16, torch.complex32)
            made.update((x.to(torch.complex64 if x.is_complex() else torch.float32) if small else x).numpy().tobytes())
        else:
            made.update(repr(x).encode())
    return made.hexdigest()[:16]


def main() -> None:
    warnings.simplefilter("ignore")
    portable.take_over(1, torch.device("cpu"))
    torch.set_num_threads(1)
    first, end = (*map(int, sys.argv[1:]), *(0, 1 << 30)[len(sys.argv) - 1 :])
    for number, (name, case) in enumerate(islice(cases(), end)):
        if number < first:
            continue
        print(json.dumps({"number": number}), flush=True)
        torch.manual_seed(0)
        seen = set[str]()
        try:
            with portable.Seeing(seen.add):
                found = digest(case())
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:  # not for this type
            found = f"raises {type(error).__name__}"
        print(json.dumps({"name": name, "digest": found, "operators": sorted(seen)}), flush=True)


if __name__ == "__main__":
    main()
