"""Checkpoints of training runs and files of tensors, on any grid; the door is `ndtp.checkpoint`."""
