"""The workloads of `evenstep bench`: what they train, and that all contenders train it."""

import pytest
import torch

from evenstep.bench import lineup, running, workload
from evenstep.bench.workload import Job, Stopwatch, find_workload
from evenstep.bench.workload.kinds import CHARACTERS, TEXT
from evenstep.errors import ModelError

NETWORKS = ["mlp", "chargpt-small", "bert"]


def job(network, **more):
    return Job(network=network, examples=6, warmup_steps=1, steps=1, **more)


def first_batch(network):
    return next(workload.in_memory(workload.make_loader(job(network))))


@pytest.mark.parametrize("network", NETWORKS)
def test_the_totals_of_shards_make_the_mean_loss_of_the_batch(network):
    kind = find_workload(network)
    model = workload.make_network(job(network)).eval()
    batch = first_batch(network)
    parts = [kind.objective(model, *(one[lo : lo + 2] for one in batch)) for lo in (0, 2, 4)]
    total, count = (sum(values) for values in zip(*parts, strict=True))
    torch.testing.assert_close(total / count, kind.loss(model, *batch))


def test_the_targets_of_characters_are_those_that_follow():
    tokens, following = first_batch("chargpt-small")
    assert tokens.shape == following.shape == (6, 128)
    assert tokens[:, 1:].equal(following[:, :-1])
    assert 0 <= tokens.min() <= tokens.max() < CHARACTERS


def test_sentences_are_padded_at_their_end():
    words, mask, labels = first_batch("bert")
    lengths = mask.sum(1)
    assert len(set(lengths.tolist())) > 1
    assert mask.equal((torch.arange(128) < lengths[:, None]).long())
    assert not words[mask == 0].any()
    assert words[mask == 1].all()
    assert labels.shape == (6,)


def test_a_network_that_does_not_exist_is_named():
    with pytest.raises(ModelError, match="got model 'gtp'"):
        find_workload("gtp")


def test_a_stopwatch_measures_the_time_since_its_making():
    watch = Stopwatch()
    first, second = watch.stop(), watch.stop()
    assert 0 < first["seconds"] < second["seconds"]


@pytest.mark.exhaustive
@pytest.mark.timeout(600)  # about ten programs, one after the other
@pytest.mark.parametrize("network", TEXT)
def test_all_contenders_of_text_move_the_weights_alike(network):
    if network == "chargpt":
        pytest.skip("the smaller one is trained the same way")
    settings = {"network": network, "examples": 4, "shards": 4, "warmup_steps": 1, "steps": 1}
    moved = {}
    for contender in lineup.side_by_side(settings, 2):
        if contender.is_installed:
            moved[contender.key] = running.measure(contender)["weights_moved"]
    assert any(".transformers." in key for key in moved)
    assert max(moved.values()) < 1.1 * min(moved.values())
