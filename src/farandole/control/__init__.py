"""What both sides of the control connection share: the ticket, the proof that somebody knows its secret, TLS, the
API's paths and client, what a status says, where a run's files are. What one side alone does is not here. No torch.
"""
