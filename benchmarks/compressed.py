"""How many bytes the gradients of two small models take under each codec, and how fast they are compressed.

    python benchmarks/compressed.py        # half a minute

A transformer learns the pages of `docs/`, byte by byte; a convolutional net learns scikit-learn's digits. The gradient
of one micro-batch is encoded at an early and at a later step, by one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from tables import show
from torch import Tensor, nn

from farandole.collective.codec import CODECS
from farandole.collective.compression import compress

AT = (5, 120)  # steps
CONTEXT, WIDTH = 64, 128


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [*measure("transformer", Transformer(), text()), *measure("convolutional", convolutional(), digits())]
    columns = ["model", "step", "codec", "bits a number", "times fewer bytes than float32", "MB/s"]
    show("Gradients under each codec", columns, rows, markdown=True)


def measure(name: str, model: nn.Module, batch: Callable[[], tuple[Tensor, Tensor]]) -> list[list[str]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows: list[list[str]] = []
    for step in range(AT[-1] + 1):
        inputs, targets = batch()
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()
        if step in AT:
            gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            rows += [[name, str(step), *row] for row in sizes(gradient)]
        optimizer.step()
    return rows


def sizes(gradient: Tensor) -> list[list[str]]:
    rows: list[list[str]] = []
    for codec in CODECS.values():
        encoded, speed = codec.encode(gradient), ""
        size = encoded.nbytes if codec.quantization is None else codec.quantization.bytes_of(gradient.numel())
        if codec.compresses:
            began = time.process_time()
            size = compress(encoded).nbytes
            speed = f"{encoded.nbytes / (time.process_time() - began) / 1e6:.0f}"
        rows.append(
            [codec.name, f"{8 * size / gradient.numel():.1f}", f"{4 * gradient.numel() / size:.2f}", speed or "-"]
        )
    return rows


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, words: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        return self.head(self.layers(self.words(words) + self.places.weight, mask=mask, is_causal=True))


def text() -> Callable[[], tuple[Tensor, Tensor]]:
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    data = torch.frombuffer(bytearray(b"".join(page.read_bytes() for page in pages)), dtype=torch.uint8).long()

    def batch() -> tuple[Tensor, Tensor]:
        at = torch.randint(0, len(data) - CONTEXT, (16, 1)) + torch.arange(CONTEXT + 1)
        return data[at[:, :-1]], data[at[:, 1:]]

    return batch


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 64, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def digits() -> Callable[[], tuple[Tensor, Tensor]]:
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = torch.tensor(data.images).float().unsqueeze(1) / 16, torch.tensor(data.target)

    def batch() -> tuple[Tensor, Tensor]:
        at = torch.randint(0, len(labels), (16,))
        return images[at], labels[at]

    return batch


if __name__ == "__main__":
    main()
