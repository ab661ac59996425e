"""Made-up images: a function of their index, learnable, cheap to send."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest
import torch

import farandole
from farandole.errors import UsageError


def test_a_sample_is_its_index_s_in_any_copy() -> None:
    images = farandole.Synthetic(1000, (3, 20, 30), classes=10)
    again = pickle.loads(pickle.dumps(images))
    torch.rand(5)
    for index in (0, 7, 999, -1):
        (image, label), (other, other_label) = images[index], again[index]
        assert torch.equal(image, other)
        assert label == other_label
        assert image.shape == (3, 20, 30)
    assert len(pickle.dumps(images)) < 200
    assert not torch.equal(images[0][0], images[1][0])
    assert not torch.equal(images[0][0], farandole.Synthetic(1000, (3, 20, 30), 10, seed=1)[0][0])


def test_the_global_generators_are_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    farandole.Synthetic(10, (3, 4, 4), classes=2)[3]
    assert torch.equal(torch.rand(3), expected)


def test_it_has_the_moments_of_a_normalised_image_and_all_classes() -> None:
    images = farandole.Synthetic(2000, (3, 16, 16), classes=10)
    pixels = torch.stack([images[index][0] for index in range(2000)])
    assert abs(pixels.mean()) < 0.1
    assert abs(pixels.var() - 1) < 0.15
    counts = Counter(images[index][1] for index in range(2000))
    assert sorted(counts) == list(range(10))
    assert min(counts.values()) > 130  # 200 each, 5 sigma


def test_a_linear_model_learns_the_classes() -> None:
    images = farandole.Synthetic(600, (3, 16, 16), classes=5)
    inputs = torch.stack([images[index][0] for index in range(600)]).flatten(1)
    labels = torch.tensor([images[index][1] for index in range(600)])
    means = torch.stack([inputs[:400][labels[:400] == label].mean(0) for label in range(5)])
    guesses = torch.cdist(inputs[400:], means).argmin(1)
    assert (guesses == labels[400:]).double().mean() > 0.9


@pytest.mark.parametrize("arguments", [(0, (3, 4, 4), 2), (5, (), 2), (5, (3, 0, 4), 2), (5, (3,), 0)])
def test_nonsense_is_refused(arguments: tuple[int, tuple[int, ...], int]) -> None:
    with pytest.raises(UsageError, match=r"\b1\b"):
        farandole.Synthetic(*arguments)
    assert farandole.Synthetic(3, (4,), 2)[2][0].shape == (4,)
    with pytest.raises(IndexError, match=r"\b3\b.*\b3\b"):
        farandole.Synthetic(3, (4,), 2)[3]
