"""The memory of one rank, predicted; no torch.

`formula` is what others ask. Below it, in reading order: `sizes`, what a rank has of a layer;
`tape` and `operations`, what torch's autograd keeps for the backward of an operation; `layer`, a
layer's forward and backward on that tape. What differs from a plain layer stands beside it:
`attention` and `in_flight` (ranks share a row), `mesh`, `experts`, `states` (linear attention),
`head_groups` and `copies`. `passes` runs all layers and the head one after another, and `pipeline`
counts the passes that are under way at a time. `zero` is weights, gradients and the optimizer under
DeepSpeed.
"""
