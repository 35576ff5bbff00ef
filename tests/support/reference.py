"""The plain sequential reference: what training means, in one loop, without evenstep's machinery.

No engine, no threads, no replicas: each shard in turn through the one model, then the recursion of
the canonical tree as the design states it, then one update. Only the names of the random streams
(`shard_seed`) are evenstep's own: they are a definition, not something to be computed two ways.
"""

import copy
import functools

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from evenstep.batch.seeds import shard_seed
from evenstep.checkpoint.fingerprint import named_state

CROSS_ENTROPY = nn.CrossEntropyLoss()


def reference_step(model, optimizer, *batch, before_update=None, **settings):
    """Do one step on a batch as `reference_backward` takes it; return the mean loss."""

    def evaluate():
        loss = reference_backward(model, *batch, **settings)
        if before_update is not None:
            before_update(model)
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        return optimizer.step(evaluate)
    loss = evaluate()
    optimizer.step()
    return loss


def reference_backward(model, *batch, shards, seed=0, step=0, epoch=0, autocast=None, **loss):
    """Give each parameter the batch's mean gradient, write the buffers; return the mean loss.

    The loss is `objective(model, *batch) -> (total, count)`, or the mean `loss(output, *targets)`:
    cross entropy if neither is given.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    pieces = [piece for piece in np.array_split(np.arange(len(tensors[0])), shards) if len(piece)]
    alone = len(pieces) == 1
    divisor = 1 if alone else len(tensors[0])
    parameters, opening = list(model.parameters()), [buffer.clone() for buffer in model.buffers()]
    gradients, closing, totals, counts, weights = [], [], [], [], []
    for shard, piece in enumerate(pieces):
        for buffer, value in zip(model.buffers(), opening, strict=True):
            buffer.copy_(value)
        for parameter in parameters:
            parameter.grad = None
        torch.manual_seed(shard_seed(seed, epoch, step, shard))
        with torch.autocast("cpu", autocast or torch.bfloat16, autocast is not None, False):
            part = pytree.tree_map(functools.partial(_rows, piece), batch)
            total, count = shard_loss(model, part, None if alone else len(piece), **loss)
        if total.requires_grad:
            (total / divisor).backward()
        gradients.append([_kept(parameter.grad, alone) for parameter in parameters])
        closing.append([buffer.clone() for buffer in model.buffers()])
        totals.append(total.item())
        counts.append(float(count))
        weights.append(1 if alone else len(piece))
    empty = [None] * (shards - len(pieces))
    count = tree(counts + empty, float.__add__)
    for parameter, leaves in zip(parameters, zip(*gradients, strict=True), strict=True):
        summed = tree([*leaves, *empty], torch.add)
        alike = summed is None or count == divisor  # complex zeros over 1 change their signs
        parameter.grad = summed if alike else summed / (count / divisor)
    for buffer, old, leaves in zip(
        model.buffers(), opening, zip(*closing, strict=True), strict=True
    ):
        buffer.copy_(_closing(old, leaves, weights, empty))
    return tree(totals + empty, float.__add__) / count


def shard_loss(model, batch, examples, *, objective=None, loss=CROSS_ENTROPY):
    """Return a shard's (total, count); its (mean, 1) if it is the whole batch (no `examples`)."""
    if objective is not None:
        total, count = objective(model, *batch)
        return (total, count) if examples is not None else (total / count, 1)
    output, targets = model(batch[0]), batch[1:]
    if examples is None:
        return loss(output, *targets), 1
    if not _counts_targets(loss):
        return loss(output, *targets) * examples, examples
    target, settings = targets[0], getattr(loss, "keywords", None) or vars(loss) | loss._buffers
    names = {"weight", "ignore_index", "label_smoothing"} & settings.keys()
    if settings.get("weight") is None and output.dtype in (torch.float16, torch.bfloat16):
        output = output.float()  # sums in half precision are too coarse
    function = F.nll_loss if isinstance(loss, nn.NLLLoss) else F.cross_entropy
    total = function(output, target, reduction="sum", **{name: settings[name] for name in names})
    if target.is_floating_point():
        places = target.numel() // target.shape[1] // examples
        return total / places, examples
    known, weight = target != settings.get("ignore_index", -100), settings.get("weight")
    places = target.numel() // examples
    if weight is None:
        return total / places, known.sum() / places
    return total / places, torch.where(known, weight[target.where(known, 0)], 0.0).sum() / places


def _counts_targets(loss):
    """Whether a mean loss divides by something else than the number of examples."""
    function = getattr(loss, "func", loss)
    kinds = nn.CrossEntropyLoss, nn.NLLLoss
    own = getattr(type(loss), "forward", None)
    return function is F.cross_entropy or own in [kind.forward for kind in kinds]


def _rows(piece, leaf):
    """Return a copy of a shard's rows of a tensor; whole what every shard gets."""
    if isinstance(leaf, torch.Tensor):
        return leaf[piece[0] : piece[-1] + 1].clone()
    return leaf.tensor.clone() if hasattr(leaf, "tensor") else leaf


def _closing(opening, leaves, weights, empty):
    """Return a buffer's value after a step: the mean of what shards left, or a number's first."""
    if not (opening.is_floating_point() or opening.is_complex()):
        return leaves[0]
    if all(torch.equal(leaf, opening) for leaf in leaves):  # nobody wrote it
        return opening
    weighted = [leaf * weight for leaf, weight in zip(leaves, weights, strict=True)]
    return tree([*weighted, *empty], torch.add) / sum(weights)


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
        reference_step(model, optimizer, *batch, step=step, **settings)
        for step, batch in enumerate(batches)
    ]
    return whole_state(model, optimizer), losses


def plain_training(
    model, optimizer, batches, loss=CROSS_ENTROPY, *, before_update=None, after_update=None
):
    """Train `model` itself by plain torch's loop over whole batches; return the losses."""
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        if before_update is not None:
            before_update(model)
        optimizer.step()
        if after_update is not None:
            after_update(model)
        losses.append(value.item())
    return losses


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
