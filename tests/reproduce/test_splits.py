"""Three ways to split a network: the arithmetic by hand, and the measurement beside it."""

import json

import pytest

from evenstep.reproduce import experiments
from evenstep.reproduce.experiments import jobs
from evenstep.reproduce.splits import measured as splits
from evenstep.reproduce.splits import rows as split_rows
from evenstep.reproduce.splits.costs import LINKS, WAYS, Cost, Perceptron, cost, first_width

TINY = {"widths": [12, 24], "batch_size": 16, "shards": 4, "slices": 6, "steps": 2}
SMALL = Perceptron(width=2, batch=3, shards=8, inputs=4, classes=1)
CORE = 3e10  # operations a second


def test_a_perceptrons_weights_and_products():
    assert SMALL.layers == [(4, 2), (2, 2), (2, 1)]
    assert SMALL.parameters == (8 + 2) + (4 + 2) + (2 + 1)
    assert SMALL.operations == 2 * 3 * 3 * (8 + 4 + 2)


@pytest.mark.parametrize("way", WAYS)
def test_one_device_sends_nothing(way):
    assert cost(way, SMALL, 1) == Cost(nbytes=0, waits=0)


def test_data_sends_the_gradients_twice_but_for_a_devices_own_part():
    assert cost("data", SMALL, 2) == Cost(nbytes=4 * 19, waits=2)
    assert cost("data", SMALL, 4).nbytes == 2 * 4 * 19 * 3 / 4


def test_stages_send_a_hidden_layers_activations_and_wait_for_their_turn():
    two, three = cost("stages", SMALL, 2), cost("stages", SMALL, 3)
    assert (two.nbytes, two.waits, two.idle) == (4 * 3 * 2, 2, 1 / 9)
    assert (three.nbytes, three.waits, three.idle) == (2 * 4 * 3 * 2, 4, 2 / 10)


def test_slices_send_inputs_and_gradients_and_meet_at_each_layer_of_each_shard():
    """To the other device: x of both layers (4 + 2) and half of dy (2); back: y / 2 and dx (2)."""
    found = cost("slices", SMALL, 2)
    assert found.nbytes == 4 * 3 * max(6 + 2, 2 + 2)
    assert found.waits == 2 * 2 * 8


def test_seconds_are_those_of_products_bytes_and_meetings():
    (slow, *_) = LINKS
    found = Cost(nbytes=125e6, waits=4, idle=0.5)
    expected_s = SMALL.operations / 2 / 1e3 / 0.5 + 1.0 + 4 * 50e-6
    assert found.seconds(SMALL, 2, slow, 1e3) == pytest.approx(expected_s)


@pytest.mark.parametrize("way", WAYS)
def test_a_way_wins_from_its_first_width_on(way):
    for link in LINKS:
        width = first_width(way, None, link, CORE, batch=256)
        if width is None:
            continue
        for other, wins in ((width, True), (2 * width, True), (width // 2, False)):
            network = Perceptron(width=other, batch=256)
            two = cost(way, network, 2).seconds(network, 2, link, CORE)
            one = cost(way, network, 1).seconds(network, 1, link, CORE)
            assert (two < one) == wins, (link.name, other)


def test_a_faster_link_pays_from_a_smaller_network_on():
    for way in WAYS:
        widths = [first_width(way, None, link, CORE, batch=256) or 1 << 30 for link in LINKS]
        assert widths == sorted(widths, reverse=True)
        assert widths[0] > widths[-1]


def test_slices_beat_data_in_wide_networks_on_small_batches_only():
    """Gradients grow with the square of the width, activations with the width."""
    link = LINKS[1]
    small, large = (first_width("slices", "data", link, CORE, batch=n) for n in (64, 1024))
    assert small < large


def test_the_table_of_first_widths_has_a_row_for_each_batch_and_way_and_no_none():
    table = split_rows.first_widths(batches=(256, 8192), speed=1e14)
    assert [row[:2] for row in table.rows] == [
        [batch, way] for batch in ("256", "8,192") for way in WAYS
    ]
    assert len(table.head) == len(table.rows[0]) == 2 + len(LINKS)
    assert table.rows[0][2:] == ["never"] * len(LINKS)  # first_width gives None
    found = first_width("stages", None, LINKS[-1], 1e14, batch=8192)
    assert table.rows[4][-1] == f"{found:,}"
    assert repr(table) == table._repr_markdown_() == table.markdown()


def test_what_is_counted_is_what_the_layers_send():
    """x twice, y and dy once, each slice's dx; of the weights a half once, gradients per shard."""
    found = splits.measure({**TINY, "way": "slices", "devices": 2})
    for place, width in enumerate(TINY["widths"]):
        layers = Perceptron(width=width, batch=16).layers[:-1]
        activations = sum(2 * inputs + outputs for inputs, outputs in layers)
        slices_dx = 3 * width  # of the second layer: the data need no gradient
        weights = sum(inputs * outputs + outputs for inputs, outputs in layers) // 2
        assert found["nbytes"][place] == 4 * (
            16 * (activations + slices_dx) + weights * (1 + TINY["shards"])
        )
        assert found["held_nbytes"][place] == 4 * weights
        assert found["meetings"][place] == 2 * 2 * TINY["shards"]


def measured_figures():
    figures = {}
    for way in splits.WAYS:
        for devices in (1, 2, 3):
            key = f"splits.{way}.{devices}"
            found = splits.measure({**TINY, "way": way, "devices": devices})
            assert json.loads(json.dumps(found)) == found
            figures[f"{key}.round0"] = {"round": 0, "key": key, **found}
    return figures


def test_every_way_and_every_device_ends_with_one_fingerprint():
    figures = measured_figures()
    rows = {row.text: row for row in split_rows.rows(TINY, figures)}
    assert rows["fingerprint, split by data, stages, slices, on 1 to 3 devices"].here == "equal"
    assert rows["slices: lines of a program to change"].here == "2"
    assert rows["slices, 2 devices: synchronisations in a step"].here == "16"
    assert rows["data, 2 devices: share of the weights on the second"].here == "100%"
    first, second = 784 * 24 + 24, 24 * 24 + 24 + 24 * 10 + 10  # the first layer, the other two
    share = f"{second / (first + second):.0%}"
    assert rows["stages, 2 devices: share of the weights on the second"].here == share
    assert rows["stages, 2 devices: synchronisations in a step"].here == str(2 * TINY["shards"])
    assert "slices, 3 devices, width 24: examples a second" in rows
    figures["splits.data.1.round0"]["fingerprints"] = ["bad0" * 16] * 2
    (same, *_) = split_rows.rows(TINY, figures)
    assert same.here == "DIFFERENT"
    assert "the promise is broken" in same.why


def test_a_way_that_wins_at_some_widths_wins_at_these_only():
    speeds = {"data.1": [10.0, 10.0, 10.0], "stages.2": [11.0, 9.0, 12.0], "slices.2": [9.0] * 3}
    figures = {f"splits.{name}.round0": {"examples_per_s": one} for name, one in speeds.items()}
    found = [*split_rows._where_it_wins(figures, {"widths": [48, 192, 768]})]
    assert [(row.text.partition(",")[0], row.here) for row in found] == [
        ("stages", "48, 768"),
        ("slices", "none of these"),
    ]


def test_parts_that_are_missing_leave_no_rows():
    assert split_rows.rows(TINY, {}) == []
    key = "splits.data.1"
    found = splits.measure({**TINY, "way": "data", "devices": 1})
    rows = split_rows.rows(TINY, {f"{key}.round0": {"round": 0, "key": key, **found}})
    assert "data, 1 device, width 24: examples a second" in {row.text for row in rows}


def test_the_experiment_is_one_of_the_books():
    (one,) = (one for one in experiments("quick") if one.name == "splits")
    assert [part.key for part in one.parts] == [
        f"splits.{way}.{devices}.round0" for way in splits.WAYS for devices in (1, 2, 3)
    ]
    assert one.rows({}) == []
    assert all(width % jobs("full")["splits"]["slices"] == 0 for width in TINY["widths"])
