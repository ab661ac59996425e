"""`farandole instance`: what the user data of an EC2 instance runs (see `pool/ec2/template.py`)."""

from __future__ import annotations


def instance() -> None:
    """Join the run that this instance's tags name, and return when it is over."""
    from farandole.pool.ec2.instance import serve

    serve()
