"""The torchrun program that learns: model, loss, packing, checkpoints, sender of weights."""
