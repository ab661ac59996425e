"""What `--pool ec2,...` asks for, checked against the account: before a run is made. Blocks."""

from __future__ import annotations

import functools
import hashlib
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from farandole.errors import UsageError
from farandole.platform.bounds import MAX_WORKERS
from farandole.pool.ec2 import prices, template
from farandole.pool.ec2.api import Aws, AwsError
from farandole.pool.ec2.market import MARKETS, Zone
from farandole.pool.ec2.places import places

OPTIONS = ("template", "types", "zones", "market", "slots", "region", "prices")
BETWEEN = (
    "traffic between zones costs about 0.01 dollars a gigabyte each way, and each worker sends and gets about twice "
    "its gradients' bytes a step"
)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the account has of it. `slots`: of each type."""

    template: str
    zones: tuple[Zone, ...]
    markets: tuple[str, ...]
    slots: Mapping[str, int]
    several: bool
    prices: prices.Prices

    def unpriced(self) -> list[str]:
        """What may be asked for without a known price."""
        return [
            f"{kind} {market} in {zone.name}"
            for zone in self.zones
            for kind in zone.types
            for market in self.markets
            if self.prices.of(kind, zone.name, market) is None
        ]

    @property
    def said(self) -> str:
        """What is to be said before it is used, "" for nothing."""
        return f"zones {', '.join(zone.name for zone in self.zones)}: {BETWEEN}" if self.several else ""


def run_tag(run: str, host: str, folder: str) -> str:
    """Of one run among all of an account: its name, and a digest of where it is."""
    digest = hashlib.sha256("\0".join((host, folder)).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '-', run)[:100]}-{digest}"


def settle(options: Mapping[str, str]) -> tuple[Aws, Asked]:
    """Raises UsageError: something is not there, or can't be meant. Asks AWS once for the same options."""
    return _settle(*(options.get(name, "") for name in OPTIONS))


def ask_again() -> None:
    """Forget what AWS has said."""
    _settle.cache_clear()


@functools.cache
def _settle(
    name: str, types: str, zones: str, market: str, slots: str, region: str, price_file: str
) -> tuple[Aws, Asked]:
    markets = MARKETS.get(market or "spot")
    if markets is None:
        raise UsageError(f"--pool ec2: no such market as {market!r}; there are {', '.join(MARKETS)}")
    if slots and (not slots.isdecimal() or len(slots) > 9 or not 1 <= int(slots) <= MAX_WORKERS):
        raise UsageError(
            f"--pool ec2: slots={slots}: a whole number from 1 to {MAX_WORKERS}, the workers of an instance"
        )
    known = prices.read(Path(price_file)) if price_file else prices.Prices()
    aws = Aws(region)
    try:
        data = aws.template(name)
        template.check(name, data)
        kinds = tuple(filter(None, types.split("+"))) or tuple(filter(None, [data.get("InstanceType", "")]))
        if not kinds:
            raise UsageError(
                f"launch template {name} names no instance type: name some, as types=g4dn.xlarge+g5.xlarge"
            )
        room = aws.slots(kinds)
        named = tuple(filter(None, zones.split("+")))
        found = places(aws, data, kinds, named)
    except AwsError as error:
        raise UsageError(f"--pool ec2: {error}") from None
    return aws, Asked(
        template=name,
        zones=found,
        markets=markets,
        slots={kind: int(slots) if slots else room.get(kind, 1) for kind in kinds},
        several=len(named) > 1,
        prices=known,
    )


def tokens() -> Iterator[str]:
    """For requests: never the same twice, whoever asks."""
    session = secrets.token_hex(8)
    number = 0
    while True:
        number += 1
        yield f"farandole-{session}-{number}"
