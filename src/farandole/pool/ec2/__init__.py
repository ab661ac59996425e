"""Hosts that are EC2 instances. Decisions (`fleet`, `market`) are pure; `api` is the only one that names boto3.

pool      the seam: what is asked of the pool, and what has become of it
fleet     instances, requests and starts that wait: what is due
market    where the next instance is asked for
api       AWS, as words: bounded, retried, its errors named
template  what a launch template must have, and the user data that goes there
instance  on an instance: who am I, which run, join it, end with it
prices    what an hour of an instance costs, as a file says
"""
