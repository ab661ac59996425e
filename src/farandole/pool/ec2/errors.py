"""What an error of AWS's means to us, and what to do about it. Pure."""

from __future__ import annotations

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
    "Unsupported",  # that type is not in that zone
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
    "AuthFailure": "the credentials are not good; see `aws sts get-caller-identity`",
    "InvalidClientTokenId": "the credentials are not good; see `aws sts get-caller-identity`",
    "UnrecognizedClientException": "the credentials are not good; see `aws sts get-caller-identity`",
    "SignatureDoesNotMatch": "the secret key is not that of the access key",
    "ExpiredToken": "the credentials have expired; get new ones",
    "RequestExpired": "the credentials have expired, or this machine's clock is wrong",
    "UnauthorizedOperation": "this user may not do that; docs/ec2.md has the policy",
    "AccessDenied": "this user may not do that; docs/ec2.md has the policy",
    "AccessDeniedException": "this user may not do that; docs/ec2.md has the policy",
    "InvalidLaunchTemplateName.NotFoundException": "make it, as docs/ec2.md says, or name another region",
    "InvalidLaunchTemplateId.NotFound": "make it, as docs/ec2.md says, or name another region",
    "InvalidInstanceType": "see `aws ec2 describe-instance-type-offerings`",
    "IdempotentParameterMismatch": "this is a bug of farandole's",
}


def meaning(code: str, status: int) -> str:
    """One of the four. `status`: of HTTP. What is in doubt may have been done."""
    if code in NO_CAPACITY:
        return CAPACITY
    if code in TOO_MANY or status == 429:
        return THROTTLED
    if code in ONCE_MORE or status >= 500:
        return DOUBT
    return WRONG


def words(code: str, message: str) -> str:
    """What people are told."""
    remedy = REMEDIES.get(code, "")
    return f"{code}: {message}" + (f"; {remedy}" if remedy else "")
