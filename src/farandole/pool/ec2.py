"""A pool of EC2 instances: requests from AWS what `Fleet` decides, and lets the instances' agents start the workers.

An instance joins by itself (`serve`), with the ticket that this pool keeps as a secret in AWS while the run lasts.
Invariant: when `close` has returned without a warning, AWS has reported every instance with the run's and the pool's
tags as ended, except failed ones that must be kept for a while. An instance that comes later finds no ticket and ends
itself.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import csv
import functools
import hashlib
import importlib
import logging
import math
import os
import random
import re
import secrets
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from farandole.control.ticket import Ticket
from farandole.coordinator.listener import is_loopback, parse
from farandole.errors import FarandoleError, UsageError
from farandole.platform.bounds import MAX_WORKERS
from farandole.platform.extras import how_to_install
from farandole.platform.process import up_to
from farandole.pool import clouds
from farandole.pool.agent import UNFIT
from farandole.pool.base import (
    Event,
    Events,
    Host,
    HostPreempted,
    HostState,
    NothingToGive,
    PoolContext,
    Priced,
    WorkerStartFailed,
)
from farandole.pool.remote import AgentLink
from farandole.protocol.messages import Job
from farandole.protocol.settings import PoolTerms

# --- market -----------------------------------------------------------------------------------------------------------
#
# Decides where the next instance is requested. Pure; times are the caller's, in seconds.
#
# A request names one zone and one market, and all instance types that are not cooling there; AWS selects one type.
#
# - One zone is used, unless several are named, because traffic between zones costs money. While there are instances, it
#   is theirs; otherwise it is the first zone that is not cooling. Of several named zones, those with instances come
#   first.
# - A type without capacity in a zone cools there: no request names it. So does a type of which a zone took an instance
#   back. The time doubles each time, until an instance has come. This holds for that market only: on-demand may have
#   what spot does not.

FIRST_COOLING_S, LONGEST_COOLING_S = 30.0, 600.0
SPOT, ON_DEMAND = "spot", "on-demand"
MARKETS = {"spot": (SPOT,), "on-demand": (ON_DEMAND,), "spot+on-demand": (SPOT, ON_DEMAND)}


@dataclass(frozen=True, kw_only=True)
class Zone:
    """A zone. `subnet`: a subnet of it; both are "" if the launch template names them."""

    name: str = ""
    subnet: str = ""
    types: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A market, a zone and the types that a request may name."""

    market: str
    zone: Zone
    types: tuple[str, ...]


@dataclass(kw_only=True)
class _Cooling:
    count: int = 0
    until: float = 0.0


class Market:
    """The state of zones, markets and types. `several`: the user named several zones, so that all may be used at
    once.
    """

    def __init__(self, zones: Sequence[Zone], markets: Sequence[str], *, several: bool = False) -> None:
        self._zones, self._markets, self._several = tuple(zones), tuple(markets), several
        self._cooling: dict[tuple[str, str, str], _Cooling] = {}  # market, zone, type

    def offer(self, used: Sequence[str], now: float) -> Offer | None:
        """The best offer; None: all of them are cooling. `used`: the zones of the present instances."""
        homes = [zone for zone in self._zones if zone.name in used]
        homes.sort(key=lambda zone: -used.count(zone.name))
        others = [zone for zone in self._zones if zone not in homes]
        for market in self._markets:
            for zone in (*homes, *(others if self._several or not homes else ())):
                types = tuple(t for t in zone.types if self._cooling_of(market, zone.name, t).until <= now)
                if types:
                    return Offer(market=market, zone=zone, types=types)
        return None

    def short(self, market: str, zone: str, types: Sequence[str], now: float) -> None:
        """There was no capacity, or AWS took an instance back: these types cool."""
        for each in types:
            cooling = self._cooling_of(market, zone, each)
            cooling.until = now + min(FIRST_COOLING_S * 2.0**cooling.count, LONGEST_COOLING_S)
            cooling.count += 1

    def came(self, market: str, zone: str, kind: str) -> None:
        """An instance has joined, so its type no longer cools."""
        self._cooling.pop((market, zone, kind), None)

    def _cooling_of(self, market: str, zone: str, kind: str) -> _Cooling:
        return self._cooling.setdefault((market, zone, kind), _Cooling())


# --- instances --------------------------------------------------------------------------------------------------------
#
# The state of an instance and of a request for instances, and the actions that are due: values without rules.


@dataclass(frozen=True, kw_only=True)
class ListedInstance:
    """An instance as AWS lists it. `tagged`: it has the run's tag. `state` is AWS's; `shown` is the tag that we set."""

    id: str
    state: str
    type: str = ""
    zone: str = ""
    market: str = ON_DEMAND
    tagged: bool = True
    run: str = ""
    request: str = ""
    group: str = ""
    shown: str = ""
    reason: str = ""
    launched: float = 0.0  # Unix time


@dataclass(kw_only=True)
class Instance:
    """An instance of the pool.

    `since`: when it was launched or restarted. `heard`: when AWS last listed it. `state`: queued, preparing, joined,
    failed, leaving, gone.
    """

    id: str
    since: float
    listed_at: float
    state: str = "queued"
    reason: str = ""
    row: ListedInstance | None = None
    type: str = ""
    zone: str = ""
    market: str = ""
    request: str = ""
    connected: bool = False
    workers: int = 0
    idle: float = math.inf  # start of the idle time
    ended: float = -math.inf  # when AWS was last asked to end it
    ending: bool = False

    @property
    def coming(self) -> bool:
        return self.state in ("queued", "preparing") and not self.ending


@dataclass(kw_only=True)
class InstanceRequest:
    """A request for instances. `open`: the number of its instances that have not appeared yet."""

    token: str
    number: int
    offer: Offer
    requested_at: float
    open: int
    doubt: float = math.inf  # the end of the wait for a request whose answer was lost


@dataclass(kw_only=True)
class FleetActions:
    """The actions that are due, recorded as done. `shown`: the states to write into tags, by instance."""

    asks: list[InstanceRequest] = field(default_factory=list[InstanceRequest])
    ends: list[str] = field(default_factory=list[str])
    lets_go: list[str] = field(default_factory=list[str])  # hosts whose agents must end
    starts: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    shown: dict[str, str] = field(default_factory=dict[str, str])
    forget: list[str] = field(default_factory=list[str])  # hosts that are certainly gone
    events: list[Event] = field(default_factory=list[Event])


# --- prices -----------------------------------------------------------------------------------------------------------
#
# The price of an instance an hour, from a file. Pure except for `read`.
#
#     # 2026-11-01
#     type,zone,market,dollars
#     g4dn.xlarge,us-east-1a,spot,0.2158
#     g4dn.xlarge,,on-demand,0.526           an empty zone: all zones
#
# A price that is not listed is unknown, and never 0.

COLUMNS = ["type", "zone", "market", "dollars"]


@dataclass(frozen=True, kw_only=True)
class PriceTable:
    """Prices by type, zone and market, in dollars an hour, as of `day`; None: there is no file."""

    day: date | None = None
    dollars: Mapping[tuple[str, str, str], float] = field(default_factory=dict[tuple[str, str, str], float])

    def price(self, kind: str, zone: str, market: str) -> float | None:
        return self.dollars.get((kind, zone, market), self.dollars.get((kind, "", market)))


def read(path: Path) -> PriceTable:
    """Read a price file. Raises UsageError: it can't be read, or does not have the format above."""
    try:
        first, *lines = path.read_text(encoding="utf-8-sig").splitlines() or [""]
    except OSError as error:
        raise UsageError(f"prices {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"prices {path}: not text in UTF-8: {error}") from None
    try:
        day = date.fromisoformat(first.lstrip("# ").strip())
    except ValueError:
        raise UsageError(
            f"prices {path}: the first line must be the date of the prices, as # 2026-11-01; it is {first[:40]!r}"
        ) from None
    try:
        header, *rows = [*csv.reader(lines)] or [[]]
    except csv.Error as error:
        raise UsageError(f"prices {path}: not CSV: {error}") from None
    if header != COLUMNS:
        raise UsageError(f"prices {path}: the second line must be {','.join(COLUMNS)}")
    prices: dict[tuple[str, str, str], float] = {}
    for number, row in enumerate(rows, 3):
        if row:
            key, dollars = _price_of(row, f"prices {path}, line {number}")
            if key in prices:
                raise UsageError(f"prices {path}, line {number}: {','.join(key)} has a price already, {prices[key]:g}")
            prices[key] = dollars
    return PriceTable(day=day, dollars=prices)


def _price_of(row: Sequence[str], here: str) -> tuple[tuple[str, str, str], float]:
    """Return type, zone and market, and the price in dollars an hour."""
    fields = [field.strip() for field in row]
    if len(fields) != len(COLUMNS):
        raise UsageError(f"{here}: {','.join(row)!r}; it must be {','.join(COLUMNS)}, of the one day of the file")
    kind, zone, market, text = fields
    if market not in ("spot", "on-demand"):
        raise UsageError(f"{here}: market {market!r}; it must be spot or on-demand")
    try:
        dollars = float(text)
    except ValueError:
        dollars = 0.0
    if not 0 < dollars < 1e6:
        raise UsageError(f"{here}: {text!r}; the price must be dollars an hour, above 0")
    return (kind, zone, market), dollars


@dataclass
class InstanceHours:
    """The hours and the price of each instance that a pool has seen. Times are Unix time."""

    prices: PriceTable
    _instances: dict[str, tuple[float, float, float | None]] = field(
        default_factory=dict[str, tuple[float, float, float | None]]
    )

    def saw(self, instance: str, kind: str, zone: str, market: str, launched: float, now: float) -> tuple[Priced, ...]:
        """Record that the instance exists now. Returns its price the first time."""
        price, new = self.prices.price(kind, zone, market), instance not in self._instances
        self._instances[instance] = (launched, now, price)
        day = self.prices.day.isoformat() if self.prices.day and price is not None else ""
        return (Priced(instance, price, launched, day),) if new else ()

    def dollars(self) -> float:
        """The cost so far of the instances with a known price."""
        return sum(
            (last - first) / 3600 * price for first, last, price in self._instances.values() if price is not None
        )

    def unknown(self) -> int:
        """The number of instances whose price is unknown."""
        return sum(price is None for _, _, price in self._instances.values())


# --- template ---------------------------------------------------------------------------------------------------------
#
# The requirements on a launch template so that its instances join a run and never outlive it; and its user data.
#
# The same template serves all runs, a person at the console and auto scaling groups. The tags of an instance name its
# run, and the instance reads them from its metadata. The ticket is not in the template: the instance's own role reads
# it from a secret. The user data ends the instance in any case: by `shutdown`, for which the template sets `terminate`.

MARK = "# farandole: "
RUN, POOL, STATE, REQUEST = "farandole:run", "farandole:pool", "farandole:state", "farandole:request"
KEEP, UNTIL = "farandole:keep-failed", "farandole:until"
SCRIPT = """#!/bin/sh
{mark}an instance of this launch template joins the run that its tags name, and ends with it.
umask 022
AGAIN=/var/lib/cloud/scripts/per-boot/farandole
if [ -d /var/lib/cloud/scripts ] && [ "$0" != "$AGAIN" ]; then  # an instance that is started again joins again
    mkdir -p /var/lib/cloud/scripts/per-boot && cp "$0" "$AGAIN" && chmod 755 "$AGAIN"
fi
trap 'shutdown -h now' EXIT
{python} -m farandole instance
"""


def user_data(python: str) -> str:
    """The user data script. `python`: the interpreter of the image that has farandole, with the extra `aws`."""
    return SCRIPT.format(mark=MARK, python=shlex.quote(python))


def secret_name(run: str, pool: str) -> str:
    """The name of the parameter that holds the run's ticket."""
    return f"/farandole/{run}/{re.sub(r'[^A-Za-z0-9_.-]', '-', pool)}"


def check(name: str, data: Mapping[str, Any]) -> None:
    """Check `data`, the data of the launch template's version as AWS returns it.

    Raises:
        UsageError: its instances would not join, would outlive their run, or would let others read its ticket.
    """
    wrong = list(_template_problems(data))
    if wrong:
        raise UsageError(f"launch template {name}: " + "; ".join(wrong))


def _template_problems(data: Mapping[str, Any]) -> Iterator[str]:
    try:
        script = base64.b64decode(data.get("UserData", ""), validate=True).decode(errors="replace")
    except binascii.Error:
        script = ""
    metadata = data.get("MetadataOptions", {})
    if MARK not in script:
        yield "its user data does not join a run; set it to the output of `farandole pool user-data`"
    if data.get("InstanceInitiatedShutdownBehavior") != "terminate":
        yield 'an instance that shuts down would only be stopped; set "InstanceInitiatedShutdownBehavior": "terminate"'
    if metadata.get("InstanceMetadataTags") != "enabled":
        yield 'its instances can\'t read their tags; set "MetadataOptions": {"InstanceMetadataTags": "enabled"}'
    if metadata.get("HttpTokens") != "required":
        yield (
            'its instances\' metadata can be read without a token; set "MetadataOptions": {"HttpTokens": "required"}'
        )
    if not data.get("IamInstanceProfile"):
        yield "it has no role, and its instances could not read the run's ticket; set IamInstanceProfile"


# --- errors -----------------------------------------------------------------------------------------------------------
#
# The meaning of an AWS error for a pool, and its remedy. Pure.

CAPACITY, THROTTLED, DOUBT, WRONG = "no capacity", "throttled", "in doubt", "wrong"
NO_CAPACITY = {
    "InsufficientInstanceCapacity",
    "InsufficientHostCapacity",
    "InsufficientReservedInstanceCapacity",
    "InsufficientCapacity",
    "InsufficientFreeAddressesInSubnet",
    "UnfulfillableCapacity",
    "MaxSpotInstanceCountExceeded",
    "SpotMaxPriceTooLow",
    "VcpuLimitExceeded",
    "InstanceLimitExceeded",
    "Unsupported",  # the zone does not have that type
}
TOO_MANY = {
    "RequestLimitExceeded",
    "Throttling",
    "ThrottlingException",
    "ThrottledException",
    "TooManyRequestsException",
    "EC2ThrottledException",
    "SlowDown",
}
ONCE_MORE = {
    "InternalError",
    "InternalFailure",
    "ServiceUnavailable",
    "Unavailable",
    "RequestTimeout",
    "InternalServerError",
}
REMEDIES = {
    "AuthFailure": "the credentials are not valid; see `aws sts get-caller-identity`",
    "InvalidClientTokenId": "the credentials are not valid; see `aws sts get-caller-identity`",
    "UnrecognizedClientException": "the credentials are not valid; see `aws sts get-caller-identity`",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key",
    "ExpiredToken": "the credentials have expired; get new ones",
    "RequestExpired": "the credentials have expired, or this machine's clock is wrong",
    "UnauthorizedOperation": "this user is not allowed to do that; docs/ec2.md has the policy",
    "AccessDenied": "this user is not allowed to do that; docs/ec2.md has the policy",
    "AccessDeniedException": "this user is not allowed to do that; docs/ec2.md has the policy",
    "InvalidLaunchTemplateName.NotFoundException": "create it, as docs/ec2.md says, or name another region",
    "InvalidLaunchTemplateId.NotFound": "create it, as docs/ec2.md says, or name another region",
    "InvalidInstanceType": "see `aws ec2 describe-instance-type-offerings`",
    "IdempotentParameterMismatch": "this is a bug in farandole",
}


def meaning(code: str, status: int) -> str:
    """Return one of the four meanings of an error. `status`: the HTTP status.

    A request in doubt may have been carried out.
    """
    if code in NO_CAPACITY:
        return CAPACITY
    if code in TOO_MANY or status == 429:
        return THROTTLED
    if code in ONCE_MORE or status >= 500:
        return DOUBT
    return WRONG


def words(code: str, message: str) -> str:
    """The error as text for users, with its remedy."""
    remedy = REMEDIES.get(code, "")
    return f"{code}: {message}" + (f"; {remedy}" if remedy else "")


# --- api --------------------------------------------------------------------------------------------------------------
#
# The AWS calls: each is bounded in time and runs in a thread. Throttled calls are repeated with jitter; errors are
# named.
#
# boto3 selects account, region and address (`AWS_ENDPOINT_URL`), as everywhere. boto3's own retries are off: the code
# here decides what may be repeated, and with which token. The methods without `async` block.

CONNECT_S, READ_S = 5.0, 20.0
TRIES = 6
AGAIN_S, LONGEST_S = 0.5, 10.0  # the longest delay between two attempts: first, last; the actual delay is random
AT_ONCE = 100  # instances in one call
_RANDOM = random.SystemRandom()  # Python's own generator belongs to the script


class AwsError(FarandoleError):
    """AWS refused a request or did not answer. `kind`: as `meaning` returns it."""

    def __init__(self, text: str, kind: str, code: str = "") -> None:
        super().__init__(text)
        self.kind, self.code = kind, code


@dataclass(frozen=True, kw_only=True)
class LaunchAnswer:
    """The answer to a request for instances: their ids and types, and the reason if there are fewer than requested."""

    ids: tuple[tuple[str, str], ...]
    why: str = ""


def boto3() -> Any:
    """The boto3 module. Raises UsageError: it is not installed."""
    try:
        return importlib.import_module("boto3")
    except ImportError:
        raise UsageError(f"EC2 needs boto3, which is not installed: {how_to_install('aws')}") from None


class Aws:
    """The AWS clients of one region. `again_s`: the longest first delay between two attempts of a call.

    Raises:
        UsageError: boto3, credentials or a region are missing.
    """

    def __init__(self, region: str = "", again_s: float = AGAIN_S) -> None:
        module = boto3()
        botocore = importlib.import_module("botocore.exceptions")
        config = importlib.import_module("botocore.config").Config(
            connect_timeout=CONNECT_S, read_timeout=READ_S, retries={"total_max_attempts": 1}
        )
        self._refused, self._broken = botocore.ClientError, (botocore.HTTPClientError, botocore.EndpointConnectionError)
        self._again_s = again_s
        try:
            session = module.Session(region_name=region or None)
            if session.get_credentials() is None:
                raise UsageError("no AWS credentials: run `aws configure`, or set AWS_PROFILE or AWS_ACCESS_KEY_ID")
            self.region: str = session.region_name
            self._ec2 = session.client("ec2", config=config)
            self._ssm = session.client("ssm", config=config)
            self._groups = session.client("autoscaling", config=config)
        except botocore.BotoCoreError as error:
            raise UsageError(f"AWS: {error}; set AWS_REGION and AWS_PROFILE, or run `aws configure`") from None

    @property
    def is_local(self) -> bool:
        """Returns True if the address is a server on this machine that imitates AWS; then its instances are here
        too.
        """
        return (urlsplit(self._ec2.meta.endpoint_url).hostname or "") in ("127.0.0.1", "localhost", "::1")

    # --- before a run ----------------------------------------------------------------------------------------

    def template(self, name: str) -> Mapping[str, Any]:
        """The data of the template's default version."""
        version = {"LaunchTemplateId" if name.startswith("lt-") else "LaunchTemplateName": name}
        answer = self._call(self._ec2.describe_launch_template_versions, Versions=["$Default"], **version)
        return answer["LaunchTemplateVersions"][0]["LaunchTemplateData"]

    def slots(self, types: Sequence[str]) -> dict[str, int]:
        """The number of GPUs of each type, 1 for a type without GPUs."""
        answer = self._call(self._ec2.describe_instance_types, InstanceTypes=list(types))
        return {
            each["InstanceType"]: max(sum(gpu["Count"] for gpu in each.get("GpuInfo", {}).get("Gpus", ())), 1)
            for each in answer["InstanceTypes"]
        }

    def zones(self, types: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Return, for each zone of the region, the types among `types` that it offers."""
        offered: dict[str, tuple[str, ...]] = {}
        filters = [{"Name": "instance-type", "Values": list(types)}]
        pages = self._ec2.get_paginator("describe_instance_type_offerings")
        for each in self._pages(pages, "InstanceTypeOfferings", LocationType="availability-zone", Filters=filters):
            zone = each["Location"]
            offered[zone] = tuple(t for t in types if t == each["InstanceType"] or t in offered.get(zone, ()))
        return dict(sorted(offered.items()))

    def subnets(self, filters: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """The zone of each subnet that the filters match."""
        words_ = [{"Name": name, "Values": list(values)} for name, values in filters.items()]
        answer = self._call(self._ec2.describe_subnets, Filters=words_)
        return {each["SubnetId"]: each["AvailabilityZone"] for each in answer["Subnets"]}

    # --- instances -------------------------------------------------------------------------------------------

    async def create(self, name: str, request: InstanceRequest, tags: Mapping[str, str]) -> LaunchAnswer:
        """Request instances. Raises AwsError."""
        return await asyncio.to_thread(self._create, name, request, tags)

    def _create(self, name: str, request: InstanceRequest, tags: Mapping[str, str]) -> LaunchAnswer:
        offer = request.offer
        key = "LaunchTemplateId" if name.startswith("lt-") else "LaunchTemplateName"
        subnet = {"SubnetId": offer.zone.subnet} if offer.zone.subnet else {}
        labels = [{"Key": key, "Value": value} for key, value in tags.items()]
        answer = self._call(
            self._ec2.create_fleet,
            Type="instant",
            ClientToken=request.token,
            LaunchTemplateConfigs=[
                {
                    "LaunchTemplateSpecification": {key: name, "Version": "$Default"},
                    "Overrides": [
                        {"InstanceType": kind, "Priority": float(n), **subnet} for n, kind in enumerate(offer.types)
                    ],
                }
            ],
            TargetCapacitySpecification={
                "TotalTargetCapacity": request.number,
                "DefaultTargetCapacityType": offer.market,
            },
            **_options(offer.market),
            TagSpecifications=[{"ResourceType": "instance", "Tags": labels}],
        )
        return _launch_answer(answer)

    async def list(
        self, filters: Mapping[str, Sequence[str]], ids: Sequence[str] = (), run: str = ""
    ) -> list[ListedInstance]:
        """The instances that the filters match, and those with these ids. Raises AwsError."""
        return await asyncio.to_thread(self.instances, filters, ids, run)

    def instances(
        self, filters: Mapping[str, Sequence[str]], ids: Sequence[str] = (), run: str = ""
    ) -> list[ListedInstance]:
        pages = self._ec2.get_paginator("describe_instances")
        by_tag = [{"Name": name, "Values": list(values)} for name, values in filters.items()]
        listed = {row.id: row for row in _rows(self._pages(pages, "Reservations", Filters=by_tag), run)}
        missing = [each for each in ids if each not in listed]
        for n in range(0, len(missing), AT_ONCE):  # by a filter, so that an unknown id is no error
            by_id = [{"Name": "instance-id", "Values": missing[n : n + AT_ONCE]}]
            listed.update((row.id, row) for row in _rows(self._pages(pages, "Reservations", Filters=by_id), run))
        return list(listed.values())

    async def end(self, ids: Sequence[str]) -> None:
        """Terminate instances. An unknown id is no error. Raises AwsError."""
        for n in range(0, len(ids), AT_ONCE):
            await asyncio.to_thread(self._end, list(ids[n : n + AT_ONCE]))

    def _end(self, ids: list[str]) -> None:
        try:
            self._call(self._ec2.terminate_instances, InstanceIds=ids)
        except AwsError as error:
            if error.code != "InvalidInstanceID.NotFound":
                raise
            for each in ids if len(ids) > 1 else ():  # one unknown id makes AWS refuse the whole call
                self._end([each])

    async def empty(self, group: str) -> None:
        """Set an auto scaling group to size 0: it launches no more and ends its instances. Raises AwsError."""
        await asyncio.to_thread(
            self._call, self._groups.update_auto_scaling_group, AutoScalingGroupName=group, MinSize=0, DesiredCapacity=0
        )

    async def tag(self, shown: Mapping[str, Sequence[str]]) -> None:
        """Set the state tags of instances. `shown`: ids by state. Raises AwsError."""
        for state, ids in shown.items():
            tags = [{"Key": STATE, "Value": state}]
            await asyncio.to_thread(self._call, self._ec2.create_tags, Resources=list(ids), Tags=tags)

    # --- the ticket's secret ---------------------------------------------------------------------------------

    def put_secret(self, name: str, value: str) -> None:
        self._call(self._ssm.put_parameter, Name=name, Value=value, Type="SecureString", Overwrite=True)

    def secret(self, name: str) -> str:
        return self._call(self._ssm.get_parameter, Name=name, WithDecryption=True)["Parameter"]["Value"]

    def delete_secret(self, name: str) -> None:
        self._call(self._ssm.delete_parameters, Names=[name])

    # --- calls -----------------------------------------------------------------------------------------------

    def _pages(self, pages: Any, key: str, **words_: Any) -> Iterator[Any]:
        token = ""
        while True:
            more = {"PaginationConfig": {"StartingToken": token}} if token else {}
            page = self._call(functools.partial(_first, pages), **words_, **more)
            yield from page[key]
            token = page.get("NextToken", "")
            if not token:
                return

    def _call(self, call: Callable[..., Any], **words_: Any) -> Any:
        """Make the call, and repeat it if AWS is too busy or has not answered: none of our calls does harm if it is
        carried out twice. After one attempt without an answer, the call is in doubt, whatever the next answer is.
        """
        doubt = False
        for attempt in range(TRIES):
            try:
                return call(**words_)
            except self._refused as error:
                details = error.response["Error"]
                code, status = details.get("Code", ""), error.response["ResponseMetadata"].get("HTTPStatusCode", 0)
                failure = AwsError(f"AWS: {words(code, details.get('Message', ''))}", meaning(code, status), code)
            except self._broken as error:
                failure = AwsError(f"AWS does not answer: {error}", DOUBT)
            doubt = doubt or failure.kind == DOUBT
            if failure.kind not in (THROTTLED, DOUBT) or attempt == TRIES - 1:
                raise AwsError(str(failure), DOUBT if doubt else failure.kind, failure.code)
            time.sleep(_RANDOM.uniform(0, min(self._again_s * 2.0**attempt, LONGEST_S)))
        raise AssertionError


def _first(pages: Any, **words_: Any) -> Any:
    return next(iter(pages.paginate(**words_)))


def _options(market: str) -> dict[str, Any]:
    """The options of a market. No price cap: it makes interruptions likelier, and spot costs less than on-demand
    anyway.
    """
    if market == SPOT:
        return {"SpotOptions": {"AllocationStrategy": "price-capacity-optimized"}}
    reserved = {"UsageStrategy": "use-capacity-reservations-first"}
    return {"OnDemandOptions": {"AllocationStrategy": "prioritized", "CapacityReservationOptions": reserved}}


def _launch_answer(answer: Mapping[str, Any]) -> LaunchAnswer:
    """The answer's ids and errors. Raises AwsError: there is no instance, and the reason is not missing capacity."""
    ids = tuple((each, group["InstanceType"]) for group in answer.get("Instances", ()) for each in group["InstanceIds"])
    errors = {each["ErrorCode"]: each.get("ErrorMessage", "") for each in answer.get("Errors", ())}
    why = "; ".join(words(code, message) for code, message in errors.items())
    if not ids and errors and not NO_CAPACITY.intersection(errors):
        code = next(iter(errors))
        kind = meaning(code, 0)
        raise AwsError(f"AWS: {why}", WRONG if kind == CAPACITY else kind, code)
    return LaunchAnswer(ids=ids, why=why)


def _rows(reservations: Iterator[Any], run: str) -> Iterator[ListedInstance]:
    for reservation in reservations:
        for each in reservation["Instances"]:
            tags = {tag["Key"]: tag["Value"] for tag in each.get("Tags", ())}
            yield ListedInstance(
                id=each["InstanceId"],
                state=each["State"]["Name"],
                type=each.get("InstanceType", ""),
                zone=each.get("Placement", {}).get("AvailabilityZone", ""),
                market=SPOT if each.get("InstanceLifecycle") == "spot" else ON_DEMAND,
                tagged=tags.get(RUN, "") == run if run else RUN in tags,
                run=tags.get(RUN, ""),
                request=tags.get(REQUEST, ""),
                group=tags.get("aws:autoscaling:groupName", ""),
                shown=tags.get(STATE, ""),
                reason=each.get("StateReason", {}).get("Message", ""),
                launched=each["LaunchTime"].timestamp(),
            )


# --- places -----------------------------------------------------------------------------------------------------------
#
# The zones and subnets in which a pool may request instances. Blocks, as `Aws` does.


def places(aws: Aws, data: Mapping[str, Any], types: Sequence[str], named: Sequence[str]) -> tuple[Zone, ...]:
    """The zones that a pool may use: the `named` zones or subnets, else the template's own, else all that have a type.

    Raises:
        UsageError: there is none, or one has none of the types.
    """
    offered = aws.zones(types)
    for kind in types:
        if not any(kind in kinds for kinds in offered.values()):
            raise UsageError(f"region {aws.region} has no {kind}: name other types=..., or another region=...")
    default = {zone: subnet for subnet, zone in aws.subnets({"default-for-az": ["true"]}).items()}
    if named:
        return tuple(_named_zone(aws, word, offered, default, types) for word in named)
    if subnet := _subnet(data):
        zone = aws.subnets({"subnet-id": [subnet]}).get(subnet, "")
        return (Zone(name=zone, types=offered.get(zone, tuple(types))),)
    usable = tuple(Zone(name=zone, subnet=default[zone], types=offered[zone]) for zone in offered if zone in default)
    if not usable:
        raise UsageError(f"region {aws.region} has no default subnet: name one, as zones=subnet-...")
    return usable


def _named_zone(
    aws: Aws, word: str, offered: Mapping[str, Sequence[str]], default: Mapping[str, str], types: Sequence[str]
) -> Zone:
    if word.startswith("subnet-"):
        subnet, zone = word, aws.subnets({"subnet-id": [word]}).get(word, "")
    else:
        subnet, zone = default.get(word, ""), word
    if not zone or not subnet:
        raise UsageError(
            f"zones={word}: not a subnet, and not a zone with a default subnet, in {aws.region}; name zones of "
            f"{', '.join(default)}, or subnets"
        )
    if not offered.get(zone):
        raise UsageError(f"zones={word}: {zone} has no {' or '.join(types)}; these zones have: {', '.join(offered)}")
    return Zone(name=zone, subnet=subnet, types=tuple(offered[zone]))


def _subnet(data: Mapping[str, Any]) -> str:
    """The subnet in the launch template, "" for none."""
    return data.get("SubnetId") or next((each.get("SubnetId", "") for each in data.get("NetworkInterfaces", ())), "")


# --- account ----------------------------------------------------------------------------------------------------------
#
# The options of `--pool ec2,...`, checked against the account before a run is created. Blocks.

OPTIONS = ("template", "types", "zones", "market", "slots", "region", "prices")
BETWEEN = (
    "traffic between zones costs about 0.01 dollars a gigabyte each way, and each worker sends and receives about "
    "twice its gradients' bytes a step"
)


@dataclass(frozen=True, kw_only=True)
class AccountFacts:
    """The account's facts for a pool. `slots`: for each type."""

    template: str
    zones: tuple[Zone, ...]
    markets: tuple[str, ...]
    slots: Mapping[str, int]
    several: bool
    prices: PriceTable

    def unpriced(self) -> list[str]:
        """The offers that may be requested and have no known price."""
        return [
            f"{kind} {market} in {zone.name}"
            for zone in self.zones
            for kind in zone.types
            for market in self.markets
            if self.prices.price(kind, zone.name, market) is None
        ]

    @property
    def warning(self) -> str:
        """A warning to print before the pool is used, "" for none."""
        return f"zones {', '.join(zone.name for zone in self.zones)}: {BETWEEN}" if self.several else ""


def run_tag(run: str, host: str, folder: str) -> str:
    """The tag of a run, unique in an account: the run's name and a digest of its host and folder."""
    digest = hashlib.sha256("\0".join((host, folder)).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '-', run)[:100]}-{digest}"


def settle(options: Mapping[str, str]) -> tuple[Aws, AccountFacts]:
    """Check the options. Asks AWS once for the same options. Raises UsageError: one is invalid or does not exist."""
    return _settle(*(options.get(name, "") for name in OPTIONS))


def ask_again() -> None:
    """Clear the cached answers of AWS."""
    _settle.cache_clear()


@functools.cache
def _settle(
    name: str, types: str, zones: str, market: str, slots: str, region: str, price_file: str
) -> tuple[Aws, AccountFacts]:
    markets = MARKETS.get(market or "spot")
    if markets is None:
        raise UsageError(f"--pool ec2: unknown market {market!r}; the markets are {', '.join(MARKETS)}")
    if slots and (not slots.isdecimal() or len(slots) > 9 or not 1 <= int(slots) <= MAX_WORKERS):
        raise UsageError(
            f"--pool ec2: slots={slots}: must be a whole number from 1 to {MAX_WORKERS}, the workers of an instance"
        )
    prices = read(Path(price_file)) if price_file else PriceTable()
    aws = Aws(region)
    try:
        data = aws.template(name)
        check(name, data)
        kinds = tuple(filter(None, types.split("+"))) or tuple(filter(None, [data.get("InstanceType", "")]))
        if not kinds:
            raise UsageError(
                f"launch template {name} names no instance type: name some, as types=g4dn.xlarge+g5.xlarge"
            )
        room = aws.slots(kinds)
        named = tuple(filter(None, zones.split("+")))
        usable = places(aws, data, kinds, named)
    except AwsError as error:
        raise UsageError(f"--pool ec2: {error}") from None
    return aws, AccountFacts(
        template=name,
        zones=usable,
        markets=markets,
        slots={kind: int(slots) if slots else room.get(kind, 1) for kind in kinds},
        several=len(named) > 1,
        prices=prices,
    )


def tokens() -> Iterator[str]:
    """Tokens for requests; none is ever repeated, in any process."""
    session = secrets.token_hex(8)
    number = 0
    while True:
        number += 1
        yield f"farandole-{session}-{number}"


# --- fleet ------------------------------------------------------------------------------------------------------------
#
# Decides about instances, requests for instances, and starts that wait for one. Pure; times are the caller's, in s.
#
# Invariant: an instance is known once, by its id, whichever source names it first: the answer to a request, the list of
# all instances with the run's tag, or its agent. A living instance is a host, is becoming one, or is being ended. AWS
# is asked to end it until AWS reports it as ended.
#
# - The answer to a request may be lost. The request is repeated with the same token, for which AWS launches nothing
#   twice; and its instances have the token as a tag. Until this is settled, its instances count as coming.
# - AWS may not list an instance yet, or no longer. It counts as gone only if it was missing for `MISSING_S`. One that
#   was once listed as terminated stays so.
# - A start waits for a slot of any instance that is coming, before another one is requested. If nothing is coming any
#   more for a start, it has failed, or there was no capacity.
# - An instance without waiting starts and without workers is in excess. It is ended after `IDLE_S` if this pool
#   launched it. An instance that was launched otherwise (by an auto scaling group, by a person) is a normal host until
#   the run is over.
# - An instance that loses the run's tag is released: its workers leave, then its agent ends, and the instance with it.

ANOTHER = "another instance"  # the host that stands for an instance that does not exist yet
JOIN_S = 480.0  # time from its launch to its agent's connection
MISSING_S = 120.0
IDLE_S = 60.0
END_AGAIN_S = 20.0  # interval between two requests to end an instance
DOUBT_S = 120.0  # time for instances of a request without an answer to appear
LEAVE_S = 3600.0
UNTAGGED = "the run's tag was removed from it"


class Fleet:
    """The instances and requests of a pool.

    `slots`: for each type. `keep_failed_s`: a failed instance is not ended for this time. `token`: yields new tokens.
    """

    def __init__(
        self, market: Market, slots: Mapping[str, int], token: Iterator[str], keep_failed_s: float = 0.0
    ) -> None:
        self.instances: dict[str, Instance] = {}
        self.requests: dict[str, InstanceRequest] = {}
        self.waiting: list[str] = []
        self._market, self._slots, self._token = market, slots, token
        self._keep_failed_s = keep_failed_s
        self._terminated: set[str] = set()
        self._covered: set[str] = set()  # starts for which an instance was requested
        self._actions = FleetActions()

    # --- requests of the pool --------------------------------------------------------------------------------

    def hosts(self) -> tuple[Host, ...]:
        """The ready hosts, then `ANOTHER`, an instance that may be requested."""
        connected = [i for i in self.instances.values() if i.state in ("joined", "leaving") and i.connected]
        ready = (Host(name=i.id, slots=self.slots(i.type)) for i in connected if not i.ending)
        return (*ready, Host(name=ANOTHER))

    def slots(self, kind: str) -> int:
        return self._slots.get(kind, 1)

    def start(self, worker: str) -> None:
        """Start the worker on an additional instance."""
        self.waiting.append(worker)

    def remember(self, host: str, now: float) -> None:
        """Add an instance of an earlier process of this pool."""
        self._add(host, now, "", None, "")

    def stop(self, worker: str) -> bool:
        """Cancel the start if it is waiting. Returns True if it was."""
        if worker not in self.waiting:
            return False
        self._give_up(worker, WorkerStartFailed(worker, "cancelled before there was an instance for it"))
        return True

    # --- answers of AWS --------------------------------------------------------------------------------------

    def answered(self, token: str, ids: Sequence[tuple[str, str]], now: float, why: str = "") -> None:
        """The request results in these instances, with their types, and no others. `why` there are not more."""
        request = self.requests.pop(token, None)
        for each, kind in ids:
            self._add(each, now, kind, request, token)
        if request is None:
            return
        if len(ids) < request.number:
            self._market.short(request.offer.market, request.offer.zone.name, request.offer.types, now)
            self._fail(why or "AWS has no capacity", capacity=True)

    def refused(self, token: str, reason: str) -> None:
        """The request results in no instance, for a reason other than capacity."""
        if self.requests.pop(token, None):
            self._fail(reason)

    def doubtful(self, token: str, now: float) -> None:
        """The result of the request is unknown."""
        if request := self.requests.get(token):
            request.doubt = min(request.doubt, now + DOUBT_S)

    def listed(self, rows: Sequence[ListedInstance], now: float) -> None:
        """Process the list of all instances, as far as AWS knows them."""
        for row in rows:
            if row.id not in self._terminated:
                self._listed(row, now)
        present = {row.id for row in rows}
        for instance in list(self.instances.values()):
            if instance.id not in present and not instance.connected and now - instance.listed_at > MISSING_S:
                self._remove(instance, "AWS does not list it any more", now)

    def _listed(self, row: ListedInstance, now: float) -> None:
        if row.id not in self.instances and row.state == "terminated":
            self._terminated.add(row.id)
            self._actions.forget.append(row.id)  # an earlier process of this pool may have had workers there
            return
        instance = self._add(row.id, now, row.type, self.requests.get(row.request), row.request)
        previous, instance.row, instance.listed_at = instance.row, row, now
        instance.type, instance.zone, instance.market = row.type or instance.type, row.zone, row.market
        instance.request = instance.request or row.request
        if row.state == "terminated" or (row.state == "shutting-down" and not instance.connected):
            self._terminated.add(row.id)
            self._remove(instance, row.reason or "it was terminated", now)
        elif row.state == "shutting-down":
            instance.ending = True  # it is no longer a host, but its processes have not ended yet
        elif row.state in ("stopping", "stopped"):
            if instance.state != "gone" and not instance.connected:
                self._mark_gone(instance, "it was stopped", now)
        elif instance.state == "gone" and row.state in ("pending", "running"):
            instance.state, instance.since = "queued", now  # it was started again
        elif not row.tagged and (previous is None or previous.tagged):
            self._release(instance)

    def _add(self, each: str, now: float, kind: str, request: InstanceRequest | None, token: str) -> Instance:
        if instance := self.instances.get(each):
            return instance
        instance = self.instances[each] = Instance(id=each, since=now, listed_at=now, type=kind, request=token)
        if request:
            instance.zone, instance.market = request.offer.zone.name, request.offer.market
            request.open -= 1
            if request.open <= 0:
                self.requests.pop(request.token, None)
        return instance

    def _release(self, instance: Instance) -> None:
        instance.state = "leaving"
        self._report_state(instance, "leaving", UNTAGGED)
        self._actions.events.append(HostPreempted(instance.id, LEAVE_S, UNTAGGED))

    # --- reports of its agent --------------------------------------------------------------------------------

    def agent(self, host: str, *, connected: bool, state: str, reason: str, workers: int, now: float) -> None:
        """Process the agent's state: `preparing`, `ready` or `failed`. `workers`: the number running or ordered."""
        if host in self._terminated:
            self._actions.forget.append(host)  # this report was on its way when the instance ended
            return
        instance = self.instances.get(host)
        if instance is None:
            if not connected:
                return
            instance = self._add(host, now, "", None, "")
        instance.connected, instance.workers = connected, workers
        if not connected or instance.ending or instance.state == "leaving":
            return
        if state == "ready" and instance.state != "joined":
            instance.state = "joined"
            self._market.came(instance.market, instance.zone, instance.type)
            self._report_state(instance, "joined", "")
        elif state == "preparing" and instance.state in ("queued", "gone"):
            instance.state = "preparing"
            self._report_state(instance, "preparing", "")
        elif state == "failed" and instance.state != "failed":
            self._failed(instance, reason)

    def leaves(self, host: str) -> None:
        """The host has a preemption notice."""
        if (instance := self.instances.get(host)) and instance.state == "joined":
            instance.state = "leaving"

    # --- consequences ----------------------------------------------------------------------------------------

    def _report_state(self, instance: Instance, state: str, reason: str) -> None:
        self._actions.events.append(HostState(instance.id, state, reason))

    def _failed(self, instance: Instance, reason: str) -> None:
        instance.state, instance.reason = "failed", reason
        self._report_state(instance, "failed", reason)
        self._fail(f"{instance.id}: {reason}")

    def _mark_gone(self, instance: Instance, reason: str, now: float) -> None:
        """Record that the instance has ended, with all of its workers."""
        coming, instance.state = instance.coming, "gone"
        instance.connected, instance.workers, instance.idle = False, 0, math.inf
        self._actions.forget.append(instance.id)
        if not instance.ending:
            self._report_state(instance, "gone", reason)
            if instance.market == SPOT:  # AWS took it back
                self._market.short(instance.market, instance.zone, (instance.type,), now)
        if coming:
            self._fail(f"{instance.id}: {reason}")

    def _remove(self, instance: Instance, reason: str, now: float) -> None:
        del self.instances[instance.id]
        self._mark_gone(instance, reason, now)

    def _supply(self) -> int:
        """The number of slots that are coming."""
        requested = sum(r.open * min(map(self.slots, r.offer.types)) for r in self.requests.values())
        return requested + sum(self.slots(i.type) for i in self.instances.values() if i.coming)

    def _fail(self, reason: str, *, capacity: bool = False) -> None:
        """An instance does not come: the starts that have nothing to wait for any more fail."""
        covered = [worker for worker in self.waiting if worker in self._covered]
        for worker in covered[self._supply() :]:
            self._give_up(worker, NothingToGive(worker, reason) if capacity else WorkerStartFailed(worker, reason))

    def _give_up(self, worker: str, event: Event) -> None:
        self.waiting.remove(worker)
        self._covered.discard(worker)
        self._actions.events.append(event)

    # --- what is due -----------------------------------------------------------------------------------------

    def take_actions(self, now: float) -> FleetActions:
        for request in list(self.requests.values()):
            if now > request.doubt:
                self.refused(request.token, "AWS has not answered, and no instance has appeared")
        for instance in self.instances.values():
            if instance.state == "queued" and not instance.ending and now - instance.since > JOIN_S:
                self._failed(instance, f"its agent has not connected within {JOIN_S:g} s; see its system log")
        self._place()
        self._ask(now)
        self._end(now)
        for instance in self.instances.values():
            if instance.row and instance.row.tagged and instance.row.shown != instance.state:
                self._actions.shown[instance.id] = instance.state
        actions, self._actions = self._actions, FleetActions()
        return actions

    def _place(self) -> None:
        for instance in self.instances.values():
            if instance.state != "joined" or not instance.connected or instance.ending:
                continue
            while self.waiting and instance.workers < self.slots(instance.type):
                worker = self.waiting.pop(0)
                self._covered.discard(worker)
                instance.workers += 1
                self._actions.starts.append((worker, instance.id))

    def _ask(self, now: float) -> None:
        missing = len(self.waiting) - self._supply()
        if missing > 0:
            used = [i.zone for i in self.instances.values() if i.state not in ("gone", "failed") and not i.ending]
            used += [r.offer.zone.name for r in self.requests.values()]
            offer = self._market.offer(used, now)
            self._covered.update(self.waiting)
            if offer is None:
                self._fail("no allowed zone and type had capacity a moment ago", capacity=True)
                return
            number = -(-missing // min(map(self.slots, offer.types)))
            token = next(self._token)
            request = InstanceRequest(token=token, number=number, offer=offer, requested_at=now, open=number)
            self.requests[token] = request
            self._actions.asks.append(request)
        self._covered.update(self.waiting)

    def _end(self, now: float) -> None:
        """End instances that are in excess, have failed or were released; repeat unconfirmed requests to end."""
        uncovered = len(self.waiting)
        for instance in self.instances.values():
            if instance.coming:
                is_needed, uncovered = uncovered > 0, uncovered - self.slots(instance.type)
            else:
                is_needed = instance.workers > 0
            instance.idle = math.inf if is_needed else min(instance.idle, now)
            idle_s = now - instance.idle
            if instance.state == "leaving" and not is_needed and instance.connected:
                self._actions.lets_go.append(instance.id)
            if instance.state == "failed":
                expired = idle_s >= self._keep_failed_s
            elif instance.state == "leaving":
                expired = idle_s >= END_AGAIN_S
            else:
                expired = idle_s >= IDLE_S
            endable = bool(instance.request) or instance.state == "failed"
            if instance.ending or (expired and not is_needed and endable and instance.state != "gone"):
                instance.ending = True
                if now - instance.ended >= END_AGAIN_S:
                    instance.ended = now
                    self._actions.ends.append(instance.id)


# --- pool -------------------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
END_S = 10.0  # time for agents to end
AFTER_S = 600.0  # time from the run's own limit until instances end themselves; the run's end is saved meanwhile
CLOSE_S = 120.0  # time for AWS to report all instances as ended


class Ec2Pool:
    """A pool of EC2 instances. Needs a running event loop. Call `close` in any case.

    `run`: the run's tag. `keep_failed_s`: how long a failed instance is kept. `until`: Unix time at which the run ends;
    soon after, instances end themselves. `look_s`: the interval at which AWS is asked for the instances.
    """

    def __init__(
        self, aws: Aws, account: AccountFacts, *, run: str, ticket: Ticket, job: Job, logs: Path, name: str = "ec2",
        keep_failed_s: float = 0.0, until: float = math.inf, look_s: float = 5.0,
    ) -> None:  # fmt: skip
        self.name = name
        self.bill = InstanceHours(account.prices)
        self._aws, self._account, self._run, self._look_s = aws, account, run, look_s
        self._keep_failed_s, self._until = keep_failed_s, until
        self._events = Events()
        self._link = AgentLink(ticket, name, job, logs, self._events, self._on_change)
        market = Market(account.zones, account.markets, several=account.several)
        self.fleet = Fleet(market, account.slots, tokens(), keep_failed_s)
        self._secret = secret_name(run, name)
        self._ticket = msgspec.json.encode(ticket).decode()
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()
        self._reported_error = ""  # the AWS error that was reported last
        self._closing: asyncio.Task[None] | None = None
        self._tasks = [
            asyncio.create_task(coroutine)
            for coroutine in (self._link.serve(), self._run_fleet(), self._list_forever())
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)
        self._start_call(self._put_ticket())

    # --- the interface of a pool ---------------------------------------------------------------------------

    def list(self) -> Sequence[Host]:
        return self.fleet.hosts()

    def start(self, worker: str, host: str) -> None:
        if host == ANOTHER:
            self.fleet.start(worker)
        elif host in self._link.far.hosts:
            self._link.start(worker, host)
            self._on_change(host)
        else:
            self._events.put(WorkerStartFailed(worker, f"{host} is gone"))
        self._changed.set()

    def stop(self, worker: str) -> None:
        if not self.fleet.stop(worker):
            self._link.stop(worker)
        self._changed.set()

    async def events(self) -> Sequence[Event]:
        """See `Pool`. Raises the error that broke this pool: a bug in farandole, which must end the run."""
        events = await self._events.take()
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()
        return events

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._events.put(HostState("", "broken", str(task.exception())))

    def remember(self, worker: str, host: str) -> None:
        """Add a worker of an earlier process of this pool."""
        self.fleet.remember(host, self._loop.time())
        self._link.remember(worker, host)

    def dollars(self) -> float:
        return self.bill.dollars()

    def over(self) -> None:
        """The run is over."""
        self._link.run_over()

    # --- the loop ------------------------------------------------------------------------------------------

    def _on_change(self, name: str) -> None:
        """The state of the host's agent has changed."""
        if remote := self._link.far.hosts.get(name):
            self.fleet.agent(
                name, connected=remote.connected, state=remote.state, reason=remote.reason, workers=len(remote.workers),
                now=self._loop.time(),
            )  # fmt: skip
            if remote.reported_at:
                self.fleet.leaves(name)
        self._changed.set()

    async def _run_fleet(self) -> None:
        while True:
            self._carry_out(self.fleet.take_actions(self._loop.time()))
            self._changed.clear()
            await up_to(min(1.0, self._look_s), self._changed)

    async def _put_ticket(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self._aws.put_secret, self._secret, self._ticket)
                return
            except AwsError as error:
                self._report_error(str(error))
                await asyncio.sleep(self._look_s)

    def _carry_out(self, actions: FleetActions) -> None:
        for event in actions.events:
            self._events.put(event)
        for host in actions.forget:
            for event in self._link.far.forget(host):
                self._events.put(event)
        for host in actions.lets_go:
            self._link.end(host)
        for worker, host in actions.starts:
            self._link.start(worker, host)
        for request in actions.asks:
            self._start_call(self._ask(request))
        if actions.ends:
            self._start_call(self._end(actions.ends))
        if actions.shown and not any(task.get_name() == "tags" for task in self._calls):
            self._start_call(self._show(actions.shown), "tags")

    def _start_call(self, call: Coroutine[None, None, None], name: str = "") -> None:
        task = asyncio.create_task(call, name=name)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    def _report_error(self, text: str) -> None:
        """Report an error of AWS, once as long as it is the same."""
        if text != self._reported_error:
            self._events.put(HostState("", "AWS", text))
        self._reported_error = text

    # --- calls to AWS ----------------------------------------------------------------------------------------

    async def _list_forever(self) -> None:
        while True:
            with contextlib.suppress(AwsError):
                await self._list_once()
            self._changed.set()
            await asyncio.sleep(self._look_s)

    async def _list_once(self) -> None:
        """List the instances once. Raises AwsError."""
        tags = {f"tag:{RUN}": [self._run], f"tag:{POOL}": [self.name]}
        try:
            rows = await self._aws.list(tags, tuple(self.fleet.instances), self._run)
        except AwsError as error:
            self._report_error(str(error))
            raise
        self._reported_error = ""
        self.fleet.listed(rows, self._loop.time())
        for row in rows:
            if row.id in self.fleet.instances and row.state in ("pending", "running"):
                for priced in self.bill.saw(row.id, row.type, row.zone, row.market, row.launched, time.time()):
                    self._events.put(priced)

    async def _ask(self, request: InstanceRequest) -> None:
        """Send the request until there is an answer, or until the fleet has dropped the request."""
        while request.token in self.fleet.requests:
            try:
                answer = await self._aws.create(self._account.template, request, self._tags(request))
                self.fleet.answered(request.token, answer.ids, self._loop.time(), answer.why)
            except AwsError as error:
                now = self._loop.time()
                if error.kind == CAPACITY:
                    self.fleet.answered(request.token, (), now, str(error))
                elif error.kind != DOUBT:
                    self.fleet.refused(request.token, str(error))
                elif self._closing:
                    return
                else:
                    self.fleet.doubtful(request.token, now)
                    await asyncio.sleep(self._look_s)
            self._changed.set()

    def _tags(self, request: InstanceRequest) -> dict[str, str]:
        return {
            "Name": f"farandole {self._run}",
            RUN: self._run,
            POOL: self.name,
            REQUEST: request.token,
            STATE: "queued",
            **({KEEP: f"{self._keep_failed_s / 60:g}"} if self._keep_failed_s else {}),
            **({UNTIL: f"{self._until + AFTER_S:.0f}"} if self._until < math.inf else {}),
        }

    async def _end(self, ids: Sequence[str]) -> None:
        try:
            await self._aws.end(ids)
        except AwsError as error:  # the fleet repeats it
            self._report_error(str(error))

    async def _show(self, shown: dict[str, str]) -> None:
        by_state = {state: [each for each in shown if shown[each] == state] for state in shown.values()}
        with contextlib.suppress(AwsError):  # the fleet repeats it when AWS has listed the instances
            await self._aws.tag(by_state)
            for each, state in shown.items():
                if (instance := self.fleet.instances.get(each)) and instance.row:
                    instance.row = replace(instance.row, shown=state)

    # --- the end -------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End the agents, then the instances: the run is over or was given up. A second call does nothing."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for task in self._tasks[1:]:
            task.cancel()
        for host in tuple(self._link.far.hosts):
            self._link.end(host)
        until = self._loop.time() + END_S
        while self._loop.time() < until and any(remote.connected for remote in self._link.far.hosts.values()):
            await asyncio.sleep(0.05)
        self._tasks[0].cancel()
        remaining = await self._end_all(self._loop.time() + CLOSE_S)
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._calls, return_exceptions=True)
        if remaining:
            _log.warning(
                "AWS has not reported %s as ended; see `farandole pool list`, and end them with `aws ec2 "
                "terminate-instances --instance-ids %s`", ", ".join(remaining), " ".join(remaining),
            )  # fmt: skip

    async def _end_all(self, until: float) -> tuple[str, ...]:
        """End instances until AWS lists none twice in a row and owes no answer. Returns the ids that may remain."""
        clean_lists, remaining = 0, ("an instance that was requested",)
        secret, emptied = True, set[str]()
        while self._loop.time() < until:
            with contextlib.suppress(AwsError):
                if secret:
                    await asyncio.to_thread(self._aws.delete_secret, self._secret)
                    secret = False
                await self._list_once()
                for group in self._groups() - emptied:
                    await self._empty(group)
                    emptied.add(group)
                remaining = tuple(each.id for each in self.fleet.instances.values() if not self._is_kept(each))
                await self._aws.end(remaining)
                clean_lists = 0 if remaining or self._calls else clean_lists + 1
                if clean_lists == 2:
                    return ()
            await asyncio.sleep(min(self._look_s, 1.0))
        return remaining

    def _groups(self) -> set[str]:
        """Auto scaling groups whose instances have the run's tag: they would replace ended instances."""
        return {i.row.group for i in self.fleet.instances.values() if i.row and i.row.group}

    async def _empty(self, group: str) -> None:
        try:
            await self._aws.empty(group)
        except AwsError as error:
            _log.warning(
                "auto scaling group %s still launches instances: set its desired capacity to 0 (%s)", group, error
            )

    def _is_kept(self, instance: Instance) -> bool:
        """Returns True if it has failed and is kept for debugging. It ends itself."""
        return instance.state == "failed" and not instance.ending and self._keep_failed_s > 0


# --- instance ---------------------------------------------------------------------------------------------------------
#
# The code on an EC2 instance: reads the instance's run from its metadata, joins it, and returns when it is over.
#
# The caller then shuts the instance down in any case (see `SCRIPT`), so this code bounds everything. An instance that
# can't reach its run, or loses it, returns after the orphan limit. A failed one is kept for as long as its tag says.
# None outlives the end of the run that its tag names.

ORPHAN_S = 600.0  # time without a run
JOIN_AGAIN_S, JOIN_LONGEST_S = 1.0, 15.0
METADATA, TOKEN_S = "http://169.254.169.254", 600
METADATA_TRIES = 5


class InstanceMetadata:
    """The metadata of this instance, read with a token (IMDSv2). boto3's own variable can set another address."""

    def __init__(self) -> None:
        self.address = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", METADATA).rstrip("/")

    def read(self, path: str) -> str | None:
        """Return one item; None: it does not exist. Raises FarandoleError: the service does not answer."""
        failure: OSError = TimeoutError()
        for attempt in range(METADATA_TRIES):
            try:
                token = self._ask("api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}, "PUT")
                return self._ask(f"meta-data/{path}", {"X-aws-ec2-metadata-token": token}, "GET")
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    return None
                failure = error
            except OSError as error:
                failure = error
            time.sleep(0.2 * 2.0**attempt)
        raise FarandoleError(f"can't read the metadata of this instance, {self.address}: {failure}") from None

    def _ask(self, path: str, headers: dict[str, str], method: str) -> str:
        request = urllib.request.Request(f"{self.address}/latest/{path}", headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=5.0) as answer:
            return answer.read().decode()

    def tag(self, name: str) -> str:
        """The value of a tag, "" for none."""
        return self.read(f"tags/instance/{name}") or ""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits in the instance's tags. `until`: Unix time, infinite for none."""

    keep_s: float = 0.0
    until: float = float("inf")


def _number(text: str, default: float) -> float:
    try:
        return float(text)
    except ValueError:
        return default


def serve(orphan_s: float = ORPHAN_S) -> None:
    """Join the run that the tags name, until it is over or can't be reached for `orphan_s`."""
    metadata = InstanceMetadata()
    me = metadata.read("instance-id") or ""
    limits = Limits(
        keep_s=60 * _number(metadata.tag(KEEP), 0.0),
        until=_number(metadata.tag(UNTIL), float("inf")),
    )
    reason, reached, unfit = "", time.monotonic(), False
    pause_s = JOIN_AGAIN_S
    while time.time() < limits.until and time.monotonic() - reached < orphan_s and not unfit:
        began = time.monotonic()
        try:
            reason, unfit = _join(metadata, me, limits.until)
        except FarandoleError as error:
            reason = str(error)
        if not reason:
            return
        if time.monotonic() - began > orphan_s:  # the agent has served meanwhile
            reached = time.monotonic()
        _log.warning("%s", reason)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, JOIN_LONGEST_S)
    keep_s = min(limits.keep_s, limits.until - time.time())
    if keep_s > 0:
        _log.warning("keeping the instance for %.0f min for debugging: %s", keep_s / 60, reason)
        time.sleep(keep_s)


def _join(metadata: InstanceMetadata, instance_id: str, until: float) -> tuple[str, bool]:
    """Run the instance's agent until it ends. Returns "" if the run has released it, else what went wrong; and True if
    this instance can't serve the run.
    """
    run, pool = metadata.tag(RUN), metadata.tag(POOL) or "ec2"
    if not run:
        return f"{instance_id} has no tag {RUN}, or may not read its tags: it belongs to no run", False
    region = metadata.read("placement/region") or ""
    zone = metadata.read("placement/availability-zone") or ""
    ticket = Aws(region).secret(secret_name(run, pool))
    command = [sys.executable, "-m", "farandole", "agent", "-", "--pool", pool, "--host", instance_id, "--wait"]
    command += ["--notices", clouds.EC2, "--zone", zone]
    environ = {**os.environ, "FARANDOLE_METADATA": metadata.address}
    remaining_s = until - time.time()
    try:
        agent = subprocess.run(
            command, input=ticket.encode(), stderr=subprocess.PIPE, env=environ, check=False,
            timeout=None if remaining_s > 1e9 else remaining_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "the run's time is over", False
    output = agent.stderr.decode(errors="replace").strip().splitlines()
    why = output[-1] if output else f"the agent ended with code {agent.returncode}"
    return (why if agent.returncode else ""), agent.returncode == UNFIT


# --- kind -------------------------------------------------------------------------------------------------------------


class Ec2Kind:
    """The kind of pool that `--pool ec2,template=NAME` names. See `spec.PoolKind`."""

    options = OPTIONS
    required = ("template",)

    def is_sized(self, terms: PoolTerms) -> bool:
        del terms
        return False

    def check(self, terms: PoolTerms, listen: str, show: Callable[[str], None], *, priced: bool) -> None:
        aws, account = settle(terms.options)
        if is_loopback(parse(listen)[0]) and not aws.is_local:
            raise UsageError(
                f"--pool {terms.name}: instances can't reach a run that listens at {listen} alone; name an address of "
                f"this machine in their network with --listen, or 0.0.0.0"
            )
        if priced and (names := account.unpriced()):
            raise UsageError(
                f"--max-cost: the price of {names[0]} is unknown; name a file with it, as "
                f"--pool {terms.name},prices=FILE (docs/ec2.md)"
            )
        if account.warning:
            show(f"--pool {terms.name}: {account.warning}")

    async def open(self, terms: PoolTerms, context: PoolContext) -> Ec2Pool:
        aws, account = settle(terms.options)
        return Ec2Pool(
            aws, account, run=context.run, ticket=context.ticket, job=context.job, logs=context.logs,
            name=terms.name, keep_failed_s=context.keep_failed_s, until=context.until,
        )  # fmt: skip
