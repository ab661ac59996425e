"""The loop of a training script: steps, gradients, the replica, the learning rate, the way through the data."""
