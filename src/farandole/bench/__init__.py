"""`farandole bench`: measures the cost of farandole for a script on this machine.

Nothing on the main path imports this package.
"""
