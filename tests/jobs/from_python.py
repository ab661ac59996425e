"""A program that trains by `farandole.integrations.ray.run`, as a driver of Ray.

  python from_python.py OUT STORE [--pace FILE] [--epochs N] [--raises]

It trains `small.py`, which writes OUT, in the run folder STORE/run. With --raises the function fails. At the end
it prints a line: "result ", then a JSON object with the fields of the result.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

import small

from farandole.integrations import ray


def train(config: dict[str, Any]) -> None:
    if config["raises"]:
        raise ValueError("a value that the function does not know")
    sys.argv = ["small.py", *config["arguments"]]
    small.main()


parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("store")
parser.add_argument("--raises", action="store_true")
known, arguments = parser.parse_known_args()
result = ray.run(
    train,
    {"arguments": [known.out, *arguments], "raises": known.raises},
    workers=(1, 2),
    run_config=ray.RunConfig(name="run", storage_path=known.store),
)
print("result", json.dumps(dataclasses.asdict(result)))
