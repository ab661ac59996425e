"""A small transformer writes Shakespeare letter by letter: AdamW, clipping, warm-up and cosine.

    python examples/shakespeare.py tinyshakespeare.txt                      a world of one
    farandole run --workers 2 examples/shakespeare.py tinyshakespeare.txt   workers that come and go: the same bits

The path is any text; its last tenth is for validation. An epoch reads about every letter once, in windows whose
beginnings are drawn anew, so no two epochs cut the text alike.

Two workers printed a validation loss of 2.0378 after two epochs, in 284 s of processor time, and wrote:

    You kir this how with hall and KinoO: stree;
    Be's shat the the batet; the preh the dume!
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from pictures import existing
from policies import add_batch_options, batch_policy
from schedules import warmup_cosine
from torch import nn
from torch.utils.data import Dataset

import farandole


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of `context` letters, and the letters that follow each; both of shape (context,)."""

    def __init__(self, letters: torch.Tensor, context: int, *, vary: bool) -> None:
        if len(letters) <= 2 * context:
            raise SystemExit(f"{len(letters)} letters are too few for windows of {context}; use a smaller --context")
        self.letters = letters
        self.context = context
        self.vary = vary

    def __len__(self) -> int:
        return (len(self.letters) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.context
        if self.vary:
            start += int(torch.randint(self.context, ()))
        start = min(start, len(self.letters) - self.context - 1)
        window = self.letters[start : start + self.context + 1]
        return window[:-1], window[1:]


class Layer(nn.Module):
    """Attention to what came before, then a perceptron, each added to what comes in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.before_attention, self.before_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        mixed = self.queries_keys_values(self.before_attention(x))
        q, k, v = mixed.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # (batch, heads, length, ...)
        dropout = self.dropout if self.training else 0.0
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self.drop(self.attended(attention.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.perceptron(self.before_perceptron(x)))


class Transformer(nn.Module):
    """Scores of the next letter at each place, shape (batch, length, letters); the embedding is also the last layer."""

    def __init__(self, letters: int, context: int, layers: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(letters, width), nn.Embedding(context, width)
        self.layers = nn.Sequential(*(Layer(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for table in (self.embedding, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        x = self.embedding(letters) + self.places.weight[: letters.shape[1]]
        return F.linear(self.norm(self.layers(x)), self.embedding.weight)

    @torch.no_grad()
    def write(self, letters: torch.Tensor, count: int) -> torch.Tensor:
        """`letters` and `count` more of them, each drawn from what the model thinks; shape (length,)."""
        self.eval()
        for _ in range(count):
            scores = self(letters[None, -len(self.places.weight) :])[0, -1]
            letters = torch.cat([letters, torch.multinomial((scores / 0.8).softmax(0), 1)])
        return letters


def groups(model: nn.Module, decay: float) -> list[dict[str, object]]:
    """Weight decay for matrices only, as the field has it: not for biases and norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def cross_entropy(scores: torch.Tensor, letters: torch.Tensor) -> torch.Tensor:
    """The mean over each window, shape (batch,)."""
    return F.cross_entropy(scores.transpose(1, 2), letters, reduction="none").mean(1)


def accuracy(scores: torch.Tensor, letters: torch.Tensor) -> torch.Tensor:
    """The part of the letters in each window that have the highest score, shape (batch,)."""
    return (scores.argmax(-1) == letters).double().mean(1)


def main() -> None:
    parser = argparse.ArgumentParser(description="a transformer on letters")
    parser.add_argument("path", type=Path, help="a text, such as tinyshakespeare.txt")
    parser.add_argument("--epochs", type=int, default=2)
    add_batch_options(parser, batch=64, micro=16)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--write", type=int, default=400, help="letters to write in the end")
    args = parser.parse_args()

    run = farandole.join()
    text = existing(args.path, "a text, such as tinyshakespeare.txt").read_text()
    alphabet = sorted(set(text))
    number = {letter: index for index, letter in enumerate(alphabet)}
    letters = torch.tensor([number[letter] for letter in text])
    split = len(letters) * 9 // 10
    train_set = Windows(letters[:split], args.context, vary=True)
    validation_set = Windows(letters[split:], args.context, vary=False)
    model = Transformer(len(alphabet), args.context, args.layers, args.width, args.heads, args.dropout).to(run.device)
    optimizer = torch.optim.AdamW(groups(model, decay=0.1), lr=args.rate, betas=(0.9, 0.99))
    loader = run.loader(train_set, batch_policy(args, farandole.SquareRoot()))
    steps = args.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(steps, warmup=steps // 20, floor=0.05))
    run.replicate(model=model, optimizer=optimizer, schedule=schedule)

    for step in run.steps(loader, epochs=args.epochs):
        for inputs, targets in step:
            loss = cross_entropy(model(inputs.to(run.device)), targets.to(run.device)).mean()
            step.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for _ in range(step.base_steps):
            schedule.step()
        if step.ends_epoch:
            found = run.evaluate(model, validation_set, {"accuracy": accuracy, "loss": cross_entropy})
            run.log(validation=found["loss"], accuracy=found["accuracy"])
            if run.is_leader:
                validation = f"validation accuracy {found['accuracy']:.4f}, validation loss {found['loss']:.4f}"
                print(f"epoch {step.epoch}: loss {step.loss:.4f}, {validation}", flush=True)
    if run.is_leader:
        print(f"fingerprint {run.fingerprint()}", flush=True)
    with run.once() as mine:
        if mine:
            written = model.write(torch.tensor([number["\n"]], device=run.device), args.write)
            print("".join(alphabet[letter] for letter in written.tolist()), flush=True)


if __name__ == "__main__":
    main()
