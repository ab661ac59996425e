"""Segmentation: a small U-Net learns to tell drawings and photos of things from the background behind them.

    python examples/segment.py /usr/share/tuxpaint/stamps                      a world of one
    farandole run --workers 2 examples/segment.py /usr/share/tuxpaint/stamps   workers that come and go: the same bits

The folder is searched for PNGs in colour whose alpha channel says what is the thing (Debian: apt-get install
tuxpaint-stamps-default has 535). Each is put before a cloudy, noisy background, at a size and a place of its own; every
fifth subfolder is for testing, since those of one folder are alike. Reported is the intersection over union of the
thing, picture by picture, on average.

Two workers printed a test IoU of 0.7971 after twelve epochs, in 75 s of processor time.

Ronneberger, Fischer, Brox: U-Net: Convolutional Networks for Biomedical Image Segmentation, 2015.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from pictures import channels_first, existing
from PIL import Image
from policies import add_batch_options, batch_policy
from torch import nn
from torch.utils.data import Dataset

import farandole


def stamps(folder: Path) -> tuple[list[Path], list[Path]]:
    """Those to train and those to test with, sorted by name."""
    found: dict[Path, list[Path]] = {}
    for path in sorted(existing(folder, "PNGs with alpha, such as /usr/share/tuxpaint/stamps").rglob("*.png")):
        with Image.open(path) as image:
            if image.mode == "RGBA":
                found.setdefault(path.parent, []).append(path)
    groups = list(found.values())
    test = [path for group in groups[4::5] for path in group]
    train = [path for index, group in enumerate(groups) if index % 5 != 4 for path in group]
    if not test:
        raise SystemExit(f"{folder}: PNGs with alpha in {len(groups)} subfolders; it takes at least 5 to test with one")
    return train, test


class Scenes(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A picture (3, size, size), values -1 to 1, and its mask (1, size, size) of zeros and ones.

    What is drawn depends on the sample and the epoch; an evaluation always draws the same.
    """

    def __init__(self, paths: list[Path], size: int) -> None:
        self.paths = paths
        self.size = size
        self.kept: dict[int, Image.Image] = {}

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        stamp = channels_first(self._placed(self._stamp(index))) / 255
        alpha = stamp[3:]
        clouds = F.interpolate(torch.randn(1, 3, 5, 5), self.size, mode="bicubic")[0]
        noise = torch.randn(3, self.size, self.size)
        background = (torch.rand(3, 1, 1) + 0.15 * clouds + 0.04 * noise).clamp(0, 1)
        scene = stamp[:3] * alpha + background * (1 - alpha)
        if torch.rand(()) < 0.5:
            scene, alpha = scene.flip(2), alpha.flip(2)
        return scene * 2 - 1, (alpha > 0.5).float()

    def _stamp(self, index: int) -> Image.Image:
        """Small, and kept: 16 KB each."""
        if index not in self.kept:
            with Image.open(self.paths[index]) as image:
                image.thumbnail((self.size, self.size))
                self.kept[index] = image.copy()
        return self.kept[index]

    def _placed(self, stamp: Image.Image) -> Image.Image:
        scale = torch.empty(()).uniform_(0.5, 1).item()
        width, height = (max(1, round(scale * length)) for length in stamp.size)
        left, top = (int(torch.randint(self.size - length + 1, ())) for length in (width, height))
        canvas = Image.new("RGBA", (self.size, self.size))
        canvas.paste(stamp.resize((width, height), Image.Resampling.BILINEAR), (left, top))
        return canvas


def twice(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        layers += [nn.Conv2d(width, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Down three times by two, and up again, joined with what each level was on the way down. One score a pixel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 4 * width]
        self.down = nn.ModuleList(twice(i, o) for i, o in zip([3, *widths[:-1]], widths, strict=True))
        self.up = nn.ModuleList(twice(widths[k] + widths[k - 1], widths[k - 1]) for k in (3, 2, 1))
        self.score = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        levels: list[torch.Tensor] = []
        for index, down in enumerate(self.down):
            x = down(F.max_pool2d(x, 2) if index else x)
            levels.append(x)
        levels.pop()
        for up in self.up:
            x = up(torch.cat([F.interpolate(x, scale_factor=2.0), levels.pop()], 1))
        return self.score(x)


def mask_loss(scores: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Cross-entropy by pixel, plus a soft form of what is missing to a perfect overlap (Dice)."""
    guesses = scores.sigmoid()
    overlap = (2 * (guesses * masks).sum((1, 2, 3)) + 1) / ((guesses + masks).sum((1, 2, 3)) + 1)
    return F.binary_cross_entropy_with_logits(scores, masks) + (1 - overlap).mean()


def intersection_over_union(scores: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Of each picture, shape (batch,)."""
    guesses, masks = scores > 0, masks > 0.5
    union = (guesses | masks).sum((1, 2, 3))
    return (guesses & masks).sum((1, 2, 3)) / union.clamp(min=1)


def main() -> None:
    parser = argparse.ArgumentParser(description="a U-Net on pictures with alpha")
    parser.add_argument("folder", type=Path, help="such as /usr/share/tuxpaint/stamps")
    parser.add_argument("--size", type=int, default=64, help="pixels each way, a multiple of 8")
    parser.add_argument("--width", type=int, default=12, help="channels of the uppermost level")
    parser.add_argument("--epochs", type=int, default=12)
    add_batch_options(parser, batch=32, micro=8)
    parser.add_argument("--rate", type=float, default=4e-3, help="the learning rate at its highest")
    args = parser.parse_args()

    run = farandole.join()
    train_set, test_set = (Scenes(paths, args.size) for paths in stamps(args.folder))
    model = UNet(args.width).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate)
    loader = run.loader(train_set, batch_policy(args, farandole.SquareRoot()))
    total = args.epochs * len(loader) + 1
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.rate, total_steps=total)
    run.replicate(model=model, optimizer=optimizer, schedule=schedule)

    for step in run.steps(loader, epochs=args.epochs):
        for scenes, masks in step:
            scenes = scenes.to(run.device, memory_format=torch.channels_last)
            step.backward(mask_loss(model(scenes), masks.to(run.device)))
        optimizer.step()
        for _ in range(step.base_steps):
            schedule.step()
        if step.ends_epoch:
            overlap = run.evaluate(model, test_set, intersection_over_union, micro=32)
            run.log(iou=overlap)
            if run.is_leader:
                print(f"epoch {step.epoch}: loss {step.loss:.4f}, test IoU {overlap:.4f}", flush=True)
    if run.is_leader:
        print(f"fingerprint {run.fingerprint()}", flush=True)


if __name__ == "__main__":
    main()
