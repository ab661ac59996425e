"""The parts that both sides of the control connection share: the ticket, the proof that a peer knows its secret, TLS,
the API's paths and client, the contents of a status, the paths of a run's files. Code for one side only is elsewhere.
No torch.
"""
