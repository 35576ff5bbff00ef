"""The plain sequential reference: what training means, in one loop, without evenstep's machinery.

No engine, no threads, no replicas: each shard in turn through the one model, then the recursion of
the canonical tree as the design states it, then one update. Only the names of the random streams
(`shard_seed`) are evenstep's own: they are a definition, not something to be computed two ways.
"""

import copy

import numpy as np
import torch
import torch.nn.functional as F

from evenstep.batch.rng import shard_seed
from evenstep.checkpoint.fingerprint import named_state


def reference_step(model, optimizer, X, y, *, shards, seed=0, step=0, epoch=0, autocast=None):
    """Do one step on the classification batch (X, y) under cross entropy; return the mean loss."""
    pieces = np.array_split(np.arange(len(X)), shards)
    alone = sum(len(piece) > 0 for piece in pieces) == 1
    parameters, buffers = list(model.parameters()), list(model.buffers())
    opening = [buffer.clone() for buffer in buffers]
    gradients, closing, totals, counts = [], [], [], []
    for shard, piece in enumerate(pieces):
        if len(piece) == 0:
            for leaves in (gradients, closing, totals, counts):
                leaves.append(None)
            continue
        for buffer, value in zip(buffers, opening, strict=True):
            buffer.copy_(value)
        for parameter in parameters:
            parameter.grad = None
        torch.manual_seed(shard_seed(seed, epoch, step, shard))
        with torch.autocast("cpu", autocast or torch.bfloat16, autocast is not None, False):
            output = model(X[piece[0] : piece[-1] + 1].clone())
            total = F.cross_entropy(
                output, y[piece[0] : piece[-1] + 1], reduction="mean" if alone else "sum"
            )
        total.backward()
        weight = 1 if alone else len(piece)
        gradients.append([_kept(p.grad, alone) for p in parameters])
        closing.append([buffer * weight if buffer.is_floating_point() else buffer.clone()
                        for buffer in buffers])  # fmt: skip
        totals.append(total.item())
        counts.append(float(weight))
    count = tree(counts, float.__add__)
    for number, parameter in enumerate(parameters):
        summed = tree([g and g[number] for g in gradients], torch.add)
        parameter.grad = summed if summed is None or count == 1 else summed / count
    for number, buffer in enumerate(buffers):
        if not buffer.is_floating_point():
            buffer.copy_(closing[0][number])
        elif all(c is None or torch.equal(c[number], opening[number] * (1 if alone else len(p)))
                 for c, p in zip(closing, pieces, strict=True)):  # fmt: skip
            buffer.copy_(opening[number])  # nobody wrote it
        else:
            buffer.copy_(tree([c and c[number] for c in closing], torch.add) / count)
    optimizer.step()
    return tree(totals, float.__add__) / count


def _kept(gradient, alone):
    """Return a copy of a shard's gradient; rows that occur in it several times are added up."""
    if gradient is None:
        return None
    return gradient.coalesce() if gradient.is_sparse and not alone else gradient.clone()


def tree(leaves, add):
    """Sum leaves [lo, hi): split at the largest power of two smaller than their number."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1
    while half * 2 < len(leaves):
        half *= 2
    left, right = tree(leaves[:half], add), tree(leaves[half:], add)
    if left is None:
        return right
    return left if right is None else add(left, right)


def reference_training(model, make_optimizer, batches, **settings):
    """Train a copy of `model`; return (its whole state by name, the losses)."""
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model.parameters())
    losses = [
        reference_step(model, optimizer, X, y, step=step, **settings)
        for step, (X, y) in enumerate(batches)
    ]
    return whole_state(model, optimizer), losses


def plain_outputs(model, *inputs):
    """Return what `model` gives in evaluation mode, and leave its mode as it was."""
    training = model.training
    with torch.no_grad():
        found = model.eval()(*inputs)
    model.train(training)
    return found


def whole_state(model, optimizer):
    return dict(named_state(model, optimizer))


def bits_of(tensor):
    """Return shape and bytes of a tensor: unlike `torch.equal`, +0 is not −0, and NaN is NaN."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    whole = tensor.detach().resolve_conj().contiguous().flatten()
    return tensor.shape, whole.view(torch.uint8).numpy().tobytes()


def assert_same_bits(state, reference):
    assert state.keys() == reference.keys()
    for name, value in reference.items():
        if isinstance(value, torch.Tensor):
            assert state[name].dtype == value.dtype, name
            assert bits_of(state[name]) == bits_of(value), name
        else:
            assert state[name] == value, name
