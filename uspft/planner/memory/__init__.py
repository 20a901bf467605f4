"""The predicted memory of one rank; no torch.

`formula` is the interface. Below it, in reading order: `sizes`, the sizes of a layer on a rank;
`tape` and `operations`, what torch's autograd saves for the backward of an operation; `layer`, a
layer's forward and backward on that tape. Deviations from a plain layer have their own files:
`attention` and `in_flight` (ranks share a row), `mesh`, `experts`, `states` (linear attention),
`head_groups` and `copies`. `passes` runs all layers and the head one after another, and `pipeline`
counts the micro-batches in flight. `zero` has weights, gradients and the optimizer under DeepSpeed.
The price of a step takes from `passes` what operations beside products read and write, which the
same tape counts.
"""
