"""What a training costs on machines that come and go: traces of a market, strategies that buy machines, the cheapest
way that was possible. It uses no network, clock or torch.
"""
