"""The training loop: steps, gradients, the replica, the learning rate, the progress through the data, and their state.

It communicates with other workers only through the package `worker`: it opens no connection, and decides no view.
"""
