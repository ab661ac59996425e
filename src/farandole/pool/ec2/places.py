"""In which zones and subnets a pool may ask for instances. Blocks, as `api` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from farandole.errors import UsageError
from farandole.pool.ec2.api import Aws
from farandole.pool.ec2.market import Zone


def places(aws: Aws, data: Mapping[str, Any], types: Sequence[str], named: Sequence[str]) -> tuple[Zone, ...]:
    """The zones that a pool may use: those `named` (or subnets), else the template's own, else all that have a type.

    Raises:
        UsageError: there is none, or one has none of the types.
    """
    offered = aws.zones(types)
    for kind in types:
        if not any(kind in there for there in offered.values()):
            raise UsageError(f"region {aws.region} has no {kind}: name other types=..., or another region=...")
    default = {zone: subnet for subnet, zone in aws.subnets({"default-for-az": ["true"]}).items()}
    if named:
        return tuple(_named(aws, word, offered, default, types) for word in named)
    if subnet := _subnet(data):
        zone = aws.subnets({"subnet-id": [subnet]}).get(subnet, "")
        return (Zone(name=zone, types=offered.get(zone, tuple(types))),)
    found = tuple(Zone(name=zone, subnet=default[zone], types=offered[zone]) for zone in offered if zone in default)
    if not found:
        raise UsageError(f"region {aws.region} has no default subnet: name one, as zones=subnet-...")
    return found


def _named(
    aws: Aws, word: str, offered: Mapping[str, Sequence[str]], default: Mapping[str, str], types: Sequence[str]
) -> Zone:
    if word.startswith("subnet-"):
        subnet, zone = word, aws.subnets({"subnet-id": [word]}).get(word, "")
    else:
        subnet, zone = default.get(word, ""), word
    if not zone or not subnet:
        raise UsageError(
            f"zones={word}: that is no subnet, and no zone with a default subnet, in {aws.region}; name zones of "
            f"{', '.join(default)}, or subnets"
        )
    if not offered.get(zone):
        raise UsageError(f"zones={word}: {zone} has no {' or '.join(types)}; there is in {', '.join(offered)}")
    return Zone(name=zone, subnet=subnet, types=tuple(offered[zone]))


def _subnet(data: Mapping[str, Any]) -> str:
    """What the launch template says, "" for nothing."""
    return data.get("SubnetId") or next((each.get("SubnetId", "") for each in data.get("NetworkInterfaces", ())), "")
