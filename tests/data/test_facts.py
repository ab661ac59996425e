"""What a dataset says of itself reaches the worker's signature, through what torch wraps around it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset

import farandole
from farandole.data.facts import facts_of
from farandole.data.loader import Loader
from farandole.errors import UsageError
from farandole.plan.batch import GlobalBatch
from farandole.protocol.difference import first_difference
from farandole.protocol.messages import Signature
from farandole.protocol.numeric_facts import numeric_differences, numerics_refusal, without_numerics
from farandole.training.progress import Length
from farandole.training.replica import Replica
from farandole.training.run_state import signature


class Saying(Dataset[int]):
    def __init__(self, *pairs: Any) -> None:
        self.pairs = pairs

    def facts(self) -> Any:
        return self.pairs

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index


class Silent(Dataset[int]):
    facts = 3  # of its own, and no method

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index


A, B = ("words", "a"), ("decoding of JPEG", "b 1")


@pytest.mark.parametrize(
    ("dataset", "facts"),
    [
        (Saying(A, B), {"words": "a", "decoding of JPEG": "b 1"}),
        (Saying(), {}),
        (Silent(), {}),
        ([1, 2], {}),
        (Subset(Saying(A), [1, 2]), {"words": "a"}),
        (Subset(Subset(Saying(A), [1, 2]), [0]), {"words": "a"}),
        (ConcatDataset([Saying(A), Silent(), Subset(Saying(B), [1])]), {"words": "a", "decoding of JPEG": "b 1"}),
        (ConcatDataset([Saying(A), Saying(A)]), {"words": "a"}),
        (ConcatDataset([Saying(("words", "z")), Saying(A), Saying(A)]), {"words": "z; a"}),
        (StackDataset(Saying(A), Saying(B)), {"words": "a", "decoding of JPEG": "b 1"}),
        (StackDataset(x=Saying(A), y=Silent()), {"words": "a"}),
    ],
)
def test_what_is_said_is_what_those_say_of_which_it_is_made(dataset: Any, facts: dict[str, str]) -> None:
    assert facts_of(dataset) == facts


@pytest.mark.parametrize("pair", [("words", 1), "ab", ("a", "b", "c"), 7])
def test_what_is_no_pair_of_texts_is_named(pair: Any) -> None:
    with pytest.raises(UsageError, match=r"Saying\.facts\(\).*\(name, value\)"):
        facts_of(Saying(pair))


def signed(dataset: Any) -> Signature:
    model = torch.nn.Linear(2, 1)
    loader = Loader(dataset, GlobalBatch(4, micro=2), seed=0)
    return signature(torch.device("cpu"), loader, Length.parse(1, None), Replica({"model": model}))


@pytest.mark.failure(
    "Data and loader processes",
    "a joiner decodes images with another library or version, or the `facts()` of its dataset differ",
    seen="an event `refused`, with the name of the difference and both values",
    outcome=(
        "the run continues without it; under `--bits any` another decoder is admitted, with `RESULTS NOT REPRODUCIBLE "
        "AFTER STEP 7`"
    ),
)
def test_a_worker_whose_data_says_something_else_is_refused_by_name() -> None:
    run = signed(Subset(Saying(A, B), range(8)))
    other_words, other_decoder = (
        signed(Subset(Saying(("words", "c"), B), range(8))),
        signed(Subset(Saying(A, ("decoding of JPEG", "c 2")), range(8))),
    )
    assert not numeric_differences(run.facts, other_words.facts).bits
    assert re.search(r"\bwords: .*\ba\b.*\bc\b", first_difference(run, other_words))
    found = numeric_differences(run.facts, other_decoder.facts)
    assert numerics_refusal(found, "same") == numerics_refusal(found, "portable")
    assert re.search(r"\bdecoding of JPEG\b.*\bb 1\b.*\bc 2\b.*--bits any\b", numerics_refusal(found, "same"))
    assert numerics_refusal(found, "any") == ""
    assert first_difference(without_numerics(run), without_numerics(other_decoder)) == ""


def test_images_in_shards_say_by_what_they_are_decoded(shards: Path) -> None:
    plain = farandole.ShardedImages(shards)
    fitted = farandole.ShardedImages(shards, transform=farandole.Resize(16, crop=16))
    assert set(facts_of(plain)) == {"decoding of JPEG", "decoding of other images"}
    assert set(facts_of(Subset(fitted, [1]))) == {*facts_of(plain), "decoding to a size"}

    class Mine:
        def __call__(self, image: Any) -> Any:
            return image

        def facts(self) -> Any:
            return {"colours": "8"}

    assert facts_of(farandole.ShardedImages(shards, transform=Mine()))["colours"] == "8"
    assert {name for name, _ in signed(fitted).facts} >= set(facts_of(fitted))
