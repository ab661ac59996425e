"""AWS, as words: each call bounded, in a thread, throttling waited out with jitter, errors named.

Which account, region and address (`AWS_ENDPOINT_URL`) is boto3's business, as everywhere. boto3's own retries are off:
what may be asked again, and under which token, is said here. The methods without `async` block.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from farandole.errors import FarandoleError, UsageError
from farandole.platform.extras import how_to_install
from farandole.pool.ec2 import template
from farandole.pool.ec2.errors import CAPACITY, DOUBT, NO_CAPACITY, THROTTLED, WRONG, meaning, words
from farandole.pool.ec2.instances import Request, Row
from farandole.pool.ec2.market import ON_DEMAND, SPOT

CONNECT_S, READ_S = 5.0, 20.0
TRIES = 6
AGAIN_S, LONGEST_S = 0.5, 10.0  # between two tries, at most; the real pause is by chance
AT_ONCE = 100  # instances in one call
_RANDOM = random.SystemRandom()  # Python's own generator is the script's


class AwsError(FarandoleError):
    """AWS has said no, or nothing. `kind`: as `errors.meaning` says."""

    def __init__(self, text: str, kind: str, code: str = "") -> None:
        super().__init__(text)
        self.kind, self.code = kind, code


@dataclass(frozen=True, kw_only=True)
class Answer:
    """To a request for instances: their ids and types, and why there are not more."""

    ids: tuple[tuple[str, str], ...]
    why: str = ""


def boto3() -> Any:
    """Raises UsageError: it is not installed."""
    try:
        return importlib.import_module("boto3")
    except ImportError:
        raise UsageError(f"EC2 takes boto3, which is not installed: {how_to_install('aws')}") from None


class Aws:
    """`again_s`: the longest first pause between two tries of a call.

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
    def here(self) -> bool:
        """It is no AWS, but a server on this machine that speaks for it; and so are its instances."""
        return (urlsplit(self._ec2.meta.endpoint_url).hostname or "") in ("127.0.0.1", "localhost", "::1")

    # --- before a run ----------------------------------------------------------------------------------------

    def template(self, name: str) -> Mapping[str, Any]:
        """The data of its default version."""
        version = {"LaunchTemplateId" if name.startswith("lt-") else "LaunchTemplateName": name}
        answer = self._call(self._ec2.describe_launch_template_versions, Versions=["$Default"], **version)
        return answer["LaunchTemplateVersions"][0]["LaunchTemplateData"]

    def slots(self, types: Sequence[str]) -> dict[str, int]:
        """GPUs of each type, 1 where it has none."""
        answer = self._call(self._ec2.describe_instance_types, InstanceTypes=list(types))
        return {
            each["InstanceType"]: max(sum(gpu["Count"] for gpu in each.get("GpuInfo", {}).get("Gpus", ())), 1)
            for each in answer["InstanceTypes"]
        }

    def zones(self, types: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Which of the types each zone of the region has."""
        found: dict[str, tuple[str, ...]] = {}
        filters = [{"Name": "instance-type", "Values": list(types)}]
        pages = self._ec2.get_paginator("describe_instance_type_offerings")
        for each in self._pages(pages, "InstanceTypeOfferings", LocationType="availability-zone", Filters=filters):
            zone = each["Location"]
            found[zone] = tuple(t for t in types if t == each["InstanceType"] or t in found.get(zone, ()))
        return dict(sorted(found.items()))

    def subnets(self, filters: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Zones of subnets."""
        words_ = [{"Name": name, "Values": list(values)} for name, values in filters.items()]
        answer = self._call(self._ec2.describe_subnets, Filters=words_)
        return {each["SubnetId"]: each["AvailabilityZone"] for each in answer["Subnets"]}

    # --- instances -------------------------------------------------------------------------------------------

    async def create(self, name: str, request: Request, tags: Mapping[str, str]) -> Answer:
        """Raises AwsError."""
        return await asyncio.to_thread(self._create, name, request, tags)

    def _create(self, name: str, request: Request, tags: Mapping[str, str]) -> Answer:
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
        return _answer(answer)

    async def list(self, filters: Mapping[str, Sequence[str]], ids: Sequence[str] = (), run: str = "") -> list[Row]:
        """Those that the filters find, and these. Raises AwsError."""
        return await asyncio.to_thread(self.instances, filters, ids, run)

    def instances(self, filters: Mapping[str, Sequence[str]], ids: Sequence[str] = (), run: str = "") -> list[Row]:
        pages = self._ec2.get_paginator("describe_instances")
        by_tag = [{"Name": name, "Values": list(values)} for name, values in filters.items()]
        found = {row.id: row for row in _rows(self._pages(pages, "Reservations", Filters=by_tag), run)}
        missing = [each for each in ids if each not in found]
        for n in range(0, len(missing), AT_ONCE):  # by a filter: an id that AWS does not know is no error then
            some = [{"Name": "instance-id", "Values": missing[n : n + AT_ONCE]}]
            found.update((row.id, row) for row in _rows(self._pages(pages, "Reservations", Filters=some), run))
        return list(found.values())

    async def end(self, ids: Sequence[str]) -> None:
        """Who is not there is no error. Raises AwsError."""
        for n in range(0, len(ids), AT_ONCE):
            await asyncio.to_thread(self._end, list(ids[n : n + AT_ONCE]))

    def _end(self, ids: list[str]) -> None:
        try:
            self._call(self._ec2.terminate_instances, InstanceIds=ids)
        except AwsError as error:
            if error.code != "InvalidInstanceID.NotFound":
                raise
            for each in ids if len(ids) > 1 else ():  # one that is unknown keeps AWS from ending the others
                self._end([each])

    async def empty(self, group: str) -> None:
        """An auto scaling group launches no more, and ends what it has. Raises AwsError."""
        await asyncio.to_thread(
            self._call, self._groups.update_auto_scaling_group, AutoScalingGroupName=group, MinSize=0, DesiredCapacity=0
        )

    async def tag(self, shown: Mapping[str, Sequence[str]]) -> None:
        """Instances by the state that they are to show. Raises AwsError."""
        for state, ids in shown.items():
            tags = [{"Key": template.STATE, "Value": state}]
            await asyncio.to_thread(self._call, self._ec2.create_tags, Resources=list(ids), Tags=tags)

    # --- the ticket's secret ---------------------------------------------------------------------------------

    def put_secret(self, name: str, value: str) -> None:
        self._call(self._ssm.put_parameter, Name=name, Value=value, Type="SecureString", Overwrite=True)

    def secret(self, name: str) -> str:
        return self._call(self._ssm.get_parameter, Name=name, WithDecryption=True)["Parameter"]["Value"]

    def delete_secret(self, name: str) -> None:
        self._call(self._ssm.delete_parameters, Names=[name])

    # --- calls -----------------------------------------------------------------------------------------------

    def _pages(self, pages: Any, of: str, **words_: Any) -> Iterator[Any]:
        token = ""
        while True:
            more = {"PaginationConfig": {"StartingToken": token}} if token else {}
            page = self._call(functools.partial(_first, pages), **words_, **more)
            yield from page[of]
            token = page.get("NextToken", "")
            if not token:
                return

    def _call(self, call: Callable[..., Any], **words_: Any) -> Any:
        """Asked again where AWS is too busy, or has not answered: all of our calls do no harm twice. Once one was not
        answered, whether it was done is in doubt, whatever is said to the next.
        """
        doubt = False
        for tried in range(TRIES):
            try:
                return call(**words_)
            except self._refused as error:
                told = error.response["Error"]
                code, status = told.get("Code", ""), error.response["ResponseMetadata"].get("HTTPStatusCode", 0)
                failure = AwsError(f"AWS: {words(code, told.get('Message', ''))}", meaning(code, status), code)
            except self._broken as error:
                failure = AwsError(f"AWS does not answer: {error}", DOUBT)
            doubt = doubt or failure.kind == DOUBT
            if failure.kind not in (THROTTLED, DOUBT) or tried == TRIES - 1:
                raise AwsError(str(failure), DOUBT if doubt else failure.kind, failure.code)
            time.sleep(_RANDOM.uniform(0, min(self._again_s * 2.0**tried, LONGEST_S)))
        raise AssertionError


def _first(pages: Any, **words_: Any) -> Any:
    return next(iter(pages.paginate(**words_)))


def _options(market: str) -> dict[str, Any]:
    """Without a price cap: one makes interruptions likelier, and the spot price is below that of on-demand anyway."""
    if market == SPOT:
        return {"SpotOptions": {"AllocationStrategy": "price-capacity-optimized"}}
    reserved = {"UsageStrategy": "use-capacity-reservations-first"}
    return {"OnDemandOptions": {"AllocationStrategy": "prioritized", "CapacityReservationOptions": reserved}}


def _answer(answer: Mapping[str, Any]) -> Answer:
    """Raises AwsError: none came, and not for want of capacity."""
    ids = tuple((each, group["InstanceType"]) for group in answer.get("Instances", ()) for each in group["InstanceIds"])
    errors = {each["ErrorCode"]: each.get("ErrorMessage", "") for each in answer.get("Errors", ())}
    why = "; ".join(words(code, message) for code, message in errors.items())
    if not ids and errors and not NO_CAPACITY.intersection(errors):
        code = next(iter(errors))
        kind = meaning(code, 0)
        raise AwsError(f"AWS: {why}", WRONG if kind == CAPACITY else kind, code)
    return Answer(ids=ids, why=why)


def _rows(reservations: Iterator[Any], run: str) -> Iterator[Row]:
    for reservation in reservations:
        for each in reservation["Instances"]:
            tags = {tag["Key"]: tag["Value"] for tag in each.get("Tags", ())}
            yield Row(
                id=each["InstanceId"],
                state=each["State"]["Name"],
                type=each.get("InstanceType", ""),
                zone=each.get("Placement", {}).get("AvailabilityZone", ""),
                market=SPOT if each.get("InstanceLifecycle") == "spot" else ON_DEMAND,
                tagged=tags.get(template.RUN, "") == run if run else template.RUN in tags,
                run=tags.get(template.RUN, ""),
                request=tags.get(template.REQUEST, ""),
                group=tags.get("aws:autoscaling:groupName", ""),
                shown=tags.get(template.STATE, ""),
                reason=each.get("StateReason", {}).get("Message", ""),
                launched=each["LaunchTime"].timestamp(),
            )
