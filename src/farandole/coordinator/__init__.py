"""The process that decides views and serves the control port: what strangers, workers and people reach there, its
journal, its end. It only moves bytes and keeps files: the decisions are values of `protocol`. No torch, no tensor.
"""
