"""A unit: parameters that are gathered and reduced together, and the life of their tensors.

Every other file uses these words and no others:

    master    the weights that the optimizer updates. This rank's part at the optimizer's depth of the chain, in the
              master dtype. All other copies of the weights are made from it.
    rest      the copy at rest: weights in the compute dtype at the depth of the parameters, stored between steps. Only
              some layouts need one (`Flat.rest_on`), such as those that split the optimizer further than parameters.
    whole     all of the flat in the compute dtype, as forward and backward read it. It lies in a gather
              slot or in memory of its own. The module's parameters are views into it: nothing is copied
              in before a gather or out after it. Where the layout splits nothing and the dtypes agree,
              it is the master (`Flat.master_is_whole`).
    grads     the gradient between micro-batches, at the depth of the gradients, in the reduce dtype.
    final     the part of `grads` at the optimizer's depth; once reduced, the optimizer reads it.
    offloaded the parts of all this on the host or on disk (`offload/host_memory.py`), where the layout says so. A
              gradient that the host reads leaves the device once it is final, or after each micro-batch.

Outside forward and backward the modules of a unit show the `user` parameters: the objects that were there before
`sw.shard`, which stand for the whole weights and have no memory (`user_parameter.py`), so nobody ever reads memory that
is stale, freed or another unit's. While a unit computes they show the `compute` parameters, plain tensors. The
optimizer updates the `resting` parameters: views of this rank's part of the master, one-dimensional where it is split.
All three sets of objects live as long as the unit, so hooks, compiled code and guards stay valid.

Autograd keeps aliases of the compute parameters between forward and backward, so a unit's `whole` must have the same
storage in both. It is written through tensors that share no version counter with the parameters. The engine sets the
parameters' version itself: one value while the memory holds the weights, and another while it does not. When it does:
[Note: states of a unit] in `schedule/unit_status.py`.
"""
