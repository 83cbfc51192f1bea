"""Records the calls of a side's modules: the arrays of each call, forward and backward.

Only `torch_trace` needs torch.
"""
