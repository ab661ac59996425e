"""Where else a run is to be seen: what `farandole run` was asked for, kept with the run's settings."""

from __future__ import annotations

from pathlib import PurePath

import msgspec


class Exports(msgspec.Struct, frozen=True, kw_only=True):
    """ "" for what is not wanted. `tensorboard`: the folder of its event files; `wandb`: a project's name;
    `metrics_token`: the path of the file whose token opens `/metrics`, never the token.
    """

    tensorboard: str = ""
    wandb: str = ""
    metrics_token: str = ""

    def within(self, folder: PurePath) -> Exports:
        """... of the run in `folder`: a relative place is there."""
        place = self.tensorboard and str(folder / self.tensorboard)
        return msgspec.structs.replace(self, tensorboard=place)

    @property
    def from_file(self) -> bool:
        """Whether anything is to be made of metrics.jsonl, by a process of its own."""
        return bool(self.tensorboard or self.wandb)
