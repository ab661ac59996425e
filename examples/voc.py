"""Pictures with boxes in the format of Pascal VOC, as a detector on a grid learns from them.

A folder holds `JPEGImages/*.jpg`, `Annotations/*.xml` and `ImageSets/Main/<part>.txt`. A box is left, top, right,
bottom in pixels of the picture as it is resized.
"""

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import torch
from pictures import decode, existing
from torch.utils.data import Dataset

CELL = 8  # pixels of a picture, each way, that are one cell of its grid


class Boxed(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A picture (3, height, width), values -1 to 1, and for the cells of its grid (classes + 5, height / 8, width / 8):

    each class's score, 1 at a centre and falling off around it; the distances to the left, upper, right and lower side,
    in pixels; and whether they are known there, which they are near centres. Mirrored at random where `vary`.
    """

    def __init__(self, folder: Path, part: str, classes: Sequence[str], size: tuple[int, int], *, vary: bool) -> None:
        names = existing(folder / "ImageSets" / "Main" / f"{part}.txt", "VOC's lists of pictures").read_text().split()
        self.jpegs = [(folder / "JPEGImages" / f"{name}.jpg").read_bytes() for name in names]
        self.boxes, self.labels = [], []
        for name in names:
            boxes, labels = annotation(folder / "Annotations" / f"{name}.xml", classes, size)
            self.boxes.append(boxes)
            self.labels.append(labels)
        self.classes = len(classes)
        self.size = size
        self.vary = vary

    def __len__(self) -> int:
        return len(self.jpegs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        picture, boxes = decode(self.jpegs[index], size=self.size) / 127.5 - 1, self.boxes[index]
        if self.vary:
            for axis, length in enumerate(self.size):
                if torch.rand(()) < 0.5:
                    picture, boxes = picture.flip(2 - axis), boxes.clone()
                    boxes[:, [axis, axis + 2]] = length - boxes[:, [axis + 2, axis]]
            picture = picture * torch.empty(()).uniform_(0.8, 1.2) + torch.empty(3, 1, 1).uniform_(-0.1, 0.1)
        return picture, self._grid(boxes, self.labels[index])

    def _grid(self, boxes: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        columns, rows = (length // CELL for length in self.size)
        grid = torch.zeros(self.classes + 5, rows, columns)
        x, y = (torch.arange(columns) + 0.5) * CELL, ((torch.arange(rows) + 0.5) * CELL)[:, None]
        areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        for number in areas.argsort(descending=True, stable=True).tolist():  # where two meet, the smaller one counts
            left, top, right, bottom = boxes[number].tolist()
            width, height = right - left, bottom - top
            cell_x, cell_y = ((((a + b) / 2) // CELL + 0.5) * CELL for a, b in ((left, right), (top, bottom)))
            far = ((x - cell_x) / width) ** 2 + ((y - cell_y) / height) ** 2
            label = int(labels[number])
            grid[label] = torch.maximum(grid[label], (-far / 0.02).exp())
            near = far < 0.04
            sides = torch.stack(torch.broadcast_tensors(x - left, y - top, right - x, bottom - y))
            known = near & (sides > 0).all(0)
            grid[-5:-1] = torch.where(known, sides, grid[-5:-1])
            grid[-1] = torch.where(known, 1.0, grid[-1])
        return grid


class Truths(Dataset[tuple[torch.Tensor, dict[str, torch.Tensor]]]):
    """The pictures of `boxed` with their boxes (things, 4) and labels (things,)."""

    def __init__(self, boxed: Boxed) -> None:
        self.boxed = boxed

    def __len__(self) -> int:
        return len(self.boxed)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self.boxed[index][0], {"boxes": self.boxed.boxes[index], "labels": self.boxed.labels[index]}


def annotation(file: Path, classes: Sequence[str], size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The boxes (things, 4) of left, top, right, bottom, in pixels of a picture of `size`, and classes (things,)."""
    tree = ElementTree.parse(file)
    scale = [float(tree.findtext(f"size/{side}", "0")) for side in ("width", "height")] * 2
    boxes: list[list[float]] = []
    labels: list[int] = []
    for thing in tree.iter("object"):
        left, top, right, bottom = (float(thing.findtext(f"bndbox/{s}", "0")) for s in ("xmin", "ymin", "xmax", "ymax"))
        if right > left and bottom > top:  # a few of these boxes are empty
            boxes.append([left, top, right, bottom])
            labels.append(classes.index(thing.findtext("name", "")))
    pixels = torch.tensor(boxes).view(-1, 4) / torch.tensor(scale) * torch.tensor([*size, *size])
    return pixels, torch.tensor(labels, dtype=torch.int64)
