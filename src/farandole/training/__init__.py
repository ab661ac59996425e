"""The loop of a training script: steps, gradients, the replica, the learning rate, the way through the data, and the
state of all of it. It sees other workers through `worker` alone: no connection is opened here, and no view decided.
"""
