"""The calls of a side's modules, recorded: what each takes and returns, forward and backward.

`torch_trace` alone needs torch.
"""
