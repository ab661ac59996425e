"""The process that decides views and serves the control port: its connections, its requests, its journal and its end.
It only moves bytes and keeps files; the decisions are values of `protocol`. No torch, no tensor.
"""
