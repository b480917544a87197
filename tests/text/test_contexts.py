"""The strongest contexts of a neuron: the right ones, in bounded memory, whatever the order they come in."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

import glu_probe as gp
from glu_probe.errors import BadOption
from glu_probe.text.contexts import QUADRANTS, TopContexts, choose_neurons
from glu_probe.text.texts import read_texts
from glu_probe.text.tokenizing import tokenize

from .test_moments import OneMLP
from .tiny_models import build, save, tokens, words

SITE = OneMLP(6)
RUN = {"text": [words(400)], "length": 32, "tokens": None}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return gp.probe_text(save(tmp_path_factory.mktemp("m") / "llama", "llama"), contexts=3, **RUN)


def run(count: int, order=None, *, act="silu", chosen=(1, 4), sequences: int = 7, gauge=None):
    """Contexts over random activations, sequence by sequence in this order, and what they were."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, sequences, 20, 6, generator=generator)
    gauge = torch.ones(6) if gauge is None else gauge
    top = TopContexts({SITE: list(chosen)}, count)
    top.start(SITE, gp.activation(act), gauge)
    for sequence in order if order is not None else range(sequences):
        top.update(SITE, a[sequence], b[sequence], sequence, 1)
    text = tokenize(read_texts([words(200)]), tokens(), length=21)
    return top.frame("model", text, tokens()), a, b * gauge, text


@pytest.mark.parametrize("count", [1, 4, 1000])
def test_they_are_the_strongest_of_each_quadrant(count):
    gauge = torch.tensor([1.0, -2.0, 1.0, 1.0, 0.5, 1.0])
    frame, a, b, _ = run(count, gauge=gauge)
    for neuron in (1, 4):
        g = gp.activation("silu")(a[..., neuron]) * b[..., neuron]
        signs = {"plus": lambda x: x > 0, "minus": lambda x: x <= 0}
        for quadrant in QUADRANTS:
            first, second = (signs[word] for word in quadrant.split("_"))
            inside = first(a[..., neuron]) & second(b[..., neuron])
            expected = sorted(g[inside].tolist(), key=abs, reverse=True)[:count]
            rows = frame[(frame["neuron"] == neuron) & (frame["quadrant"] == quadrant)]
            np.testing.assert_allclose(rows["value"], expected, rtol=1e-6)
            assert rows["rank"].tolist() == list(range(1, len(expected) + 1))
            for row in rows.itertuples():
                assert row.value == pytest.approx(g[row.sequence, row.position - 1].item(), rel=1e-6)
    assert set(frame["neuron"]) == {1, 4}


def test_the_order_of_sequences_does_not_matter():
    frames = [run(3, order)[0] for order in (range(7), reversed(range(7)), [3, 0, 6, 2, 5, 1, 4])]
    for frame in frames[1:]:
        pd.testing.assert_frame_equal(frame, frames[0], check_exact=True)


def test_ties_go_to_the_earlier_place():
    top = TopContexts({SITE: [0]}, 2)
    top.start(SITE, gp.activation("relu"), torch.ones(6))
    for sequence in (2, 0, 1):
        top.update(SITE, torch.ones(5, 6), torch.ones(5, 6), sequence, 0)
    text = tokenize(read_texts([words(200)]), tokens(), length=21)
    assert top.frame("m", text, tokens())["sequence"].tolist() == [0, 0]


def test_a_relu_that_is_off_is_in_no_context():
    frame, *_ = run(5, act="relu")
    assert set(frame["quadrant"]) == {"plus_plus", "plus_minus"}


def test_token_and_window_are_those_of_the_place():
    frame, _, _, text = run(2)
    for row in frame.itertuples():
        ids = text.sequences[row.sequence].tolist()
        assert row.token == tokens().decode([ids[row.position]])
        assert row.token in row.window
        assert row.window in tokens().decode(ids)


def test_memory_does_not_grow_with_the_text():
    sizes = []
    for count in (5, 200):
        top = TopContexts({SITE: [0, 1]}, 3)
        top.start(SITE, gp.activation("silu"), torch.ones(6))
        generator = torch.Generator().manual_seed(0)
        for sequence in range(count):
            top.update(SITE, *torch.randn(2, 30, 6, generator=generator), sequence, 0)
        sizes.append(sum(part.nbytes for part in top._kept[SITE].arrays.values()))
    assert sizes[0] == sizes[1]


def test_frame_of_a_run(report):
    frame = report.contexts
    assert list(frame) == [
        "model", "tower", "layer", "expert", "neuron", "quadrant", "rank", "value", "sequence", "position", "token", "window",
    ]  # fmt: skip
    assert frame.groupby(["layer", "neuron", "quadrant"])["rank"].max().max() == 3
    assert (frame["position"] > 0).all()  # the first position takes no part
    # by default the neurons with the largest output energy
    for layer, rows in frame.groupby("layer"):
        energies = report.neurons.loc[report.neurons["layer"] == layer, "output_energy"].reset_index(drop=True)
        assert set(rows["neuron"]) == set(energies.nlargest(3).index)
    signs = frame["quadrant"].map({"plus_plus": 1, "plus_minus": -1, "minus_plus": -1, "minus_minus": 1})
    assert (np.sign(frame["value"]) == signs).all()  # SiLU has the sign of a


def test_contexts_do_not_change_the_measures(report, tmp_path):
    plain = gp.probe_text(build("llama"), tokenizer=tokens(), **RUN)
    assert plain.contexts is None
    np.testing.assert_allclose(
        plain.neurons["exchange_asymmetry_text"], report.neurons["exchange_asymmetry_text"], rtol=1e-5
    )


def sites_of(*layers: int):
    return [OneMLP(48, layer=layer) for layer in layers]


def test_choice_of_neurons(report):
    sites = sites_of(0, 1, 2)
    for neurons in ("1:5,2:40", " 1 : 5 , 2:40", [(1, 5), (2, 40)], [(1, None, 5), (2, 40), (1, 5)]):
        assert choose_neurons(neurons, report.neurons, sites) == {sites[1]: [5], sites[2]: [40]}
    by_measure = choose_neurons("query_norm", report.neurons, sites)
    norms = report.neurons["query_norm"].to_numpy().reshape(3, 48)
    assert by_measure == {site: np.argsort(-norms[site.layer])[:3].tolist() for site in sites}
    unknown = report.neurons.assign(output_energy=np.nan)
    assert choose_neurons(None, unknown, sites) == choose_neurons("value_gain", report.neurons, sites)


@pytest.mark.parametrize(("neurons", "words_of_error"), [
    ("1:48", "layer 1 has no neuron 48. It has neurons 0 to 47"),
    ([(1, -1)], "layer 1 has no neuron -1"),
    ("9:1", "layer 9 has 0 MLPs .* There are layers 0, 1, 2"),
    ([], "no neurons are given"),
    ("query_nrm", "'query_nrm' is not a measure of neurons. Did you mean query_norm"),
    ("io_class", "'io_class' is not a measure"),
    ("1-5", "Write LAYER:NEURON"),
    ("missing", "every value of 'missing' is missing"),
])  # fmt: skip
def test_neurons_that_do_not_exist(report, neurons, words_of_error):
    frame = report.neurons.assign(missing=np.nan)
    with pytest.raises(BadOption, match=words_of_error):
        choose_neurons(neurons, frame, sites_of(0, 1, 2))


def test_a_layer_with_several_mlps_needs_the_expert(report):
    sites = [OneMLP(48), OneMLP(48, expert="shared")]
    with pytest.raises(BadOption, match=r"layer 0 has 2 MLPs .*\(layer, expert, neuron\), with experts None, 'shared'"):
        choose_neurons([(0, 3)], report.neurons, sites)
    assert choose_neurons([(0, "shared", 3)], report.neurons, sites) == {sites[1]: [3]}
