"""The coordinator's side of the protocol. Pure: see the package above."""
