"""Sums over a stream of tokens against the definitions, against Gaussian input, and their errors against repetition."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import glu_probe as gp
from glu_probe.measures.registry import TEXT_SHARED
from glu_probe.text.activations import measure
from glu_probe.text.contexts import TopContexts
from glu_probe.text.documents import Document
from glu_probe.text.moments import GaugeMoments, NeuronMoments, OutputMoments
from glu_probe.text.tokenizing import tokenize

from ..support import random_layer
from .tiny_models import tokens, words

ACTIVATIONS = ("silu", "gelu", "relu")


def by_definition(act, a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    """THEORY of single neurons on a sample [token, neuron], in its own gauge, straight from the definitions."""

    def S(z):
        return act(torch.from_numpy(z)).numpy()

    c = np.sqrt((a * a).mean(0) / (b * b).mean(0)) * np.where((a * b).mean(0) < 0, -1, 1)
    b = b * c
    g, swapped, rescaled = S(a) * b, S(b) * a, S(2 * a) * b / 2

    def share(changed):
        return ((g - changed) ** 2).mean(0) / 2 / ((g**2).mean(0) + (changed**2).mean(0))

    linear, both = [], []
    for j in range(a.shape[1]):
        for basis, out in ((b[:, j : j + 1], linear), (np.stack([b[:, j], a[:, j] * b[:, j]], 1), both)):
            fit = basis @ np.linalg.lstsq(basis, g[:, j], rcond=None)[0]
            out.append((fit**2).sum() / (g[:, j] ** 2).sum())
    linear, both = np.array(linear), np.array(both)
    return {
        "exchange_asymmetry": share(swapped),
        "scaling_asymmetry": share(rescaled),
        "linear_share": linear,
        "bilinear_share": both - linear,
        "residual_share": 1 - both,
        "energy": (g**2).mean(0) / c**2,
        "gate_mean": a.mean(0),
        "gate_std": a.std(0),
        "gate_active": (a > 0).mean(0),
        "branch_correlation": np.array([np.corrcoef(a[:, j], b[:, j])[0, 1] for j in range(a.shape[1])]),
        "quadrant_plus_plus": ((a > 0) & (b > 0)).mean(0),
        "quadrant_plus_minus": ((a > 0) & (b <= 0)).mean(0),
        "quadrant_minus_plus": ((a <= 0) & (b > 0)).mean(0),
        "quadrant_minus_minus": ((a <= 0) & (b <= 0)).mean(0),
    }


def streamed(act, a: torch.Tensor, b: torch.Tensor, *, pieces: int = 10, cut: int = 97):
    """The same through the sums: gauge from everything, then in pieces of each group."""
    gauges = GaugeMoments(a.shape[1])
    for start in range(0, len(a), cut):
        gauges.update(a[start : start + cut], b[start : start + cut])
    moments = NeuronMoments(act, gauges.gauge())
    for group, (part_a, part_b) in enumerate(zip(a.chunk(pieces), b.chunk(pieces), strict=True)):
        for start in range(0, len(part_a), cut):
            moments.update(part_a[start : start + cut], part_b[start : start + cut], group)
    return moments


@pytest.mark.parametrize("name", [*ACTIVATIONS, "gelu_tanh", "sigmoid"])
def test_streamed_sums_are_the_definitions(name):
    act, generator = gp.activation(name), torch.Generator().manual_seed(1)
    mixed = torch.randn(3000, 12, generator=generator)
    a, b = mixed[:, :6] * torch.linspace(0.1, 4, 6) + 0.3, mixed[:, 6:] - 0.7 * mixed[:, :6] * torch.linspace(-1, 1, 6)
    moments = streamed(act, a, b)
    assert moments.tokens == 3000
    found = moments.estimates().values
    expected = by_definition(act, a.double().numpy(), b.double().numpy())
    assert set(found) == set(expected)
    for measure_name, values in expected.items():
        np.testing.assert_allclose(found[measure_name], values, rtol=2e-5, atol=2e-6, err_msg=measure_name)


def test_exact_cases():
    a = torch.tensor([[1.0], [-2.0], [0.5], [-0.25]]).repeat(8, 1)
    linear = streamed(gp.activation("linear"), a, 3 * a, pieces=4).estimates()
    assert linear.values["exchange_asymmetry"] == pytest.approx(0, abs=1e-12)
    assert linear.values["bilinear_share"] + linear.values["linear_share"] == pytest.approx(1)
    relu = streamed(gp.activation("relu"), a, -a, pieces=4).estimates()
    assert relu.values["scaling_asymmetry"] == pytest.approx(0, abs=1e-12)
    assert relu.values["branch_correlation"] == pytest.approx(1)  # in the canonical gauge E[ab] >= 0
    assert relu.values["quadrant_minus_minus"] == 0.5


def test_a_dead_neuron_is_missing_and_its_neighbour_is_not():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 500, 2, generator=generator)
    b[:, 1] = 0
    found = streamed(gp.activation("silu"), a, b).estimates()
    assert np.isnan(found.values["exchange_asymmetry"]).tolist() == [False, True]
    assert np.isnan(found.errors["exchange_asymmetry"]).tolist() == [False, True]
    assert found.values["energy"][1] == 0
    assert np.isfinite(found.mean_errors["exchange_asymmetry"])


def test_one_group_has_values_and_no_errors():
    a, b = torch.randn(2, 100, 3, generator=torch.Generator().manual_seed(0))
    found = streamed(gp.activation("silu"), a, b, pieces=1).estimates()
    assert np.isfinite(found.values["exchange_asymmetry"]).all()
    assert np.isnan(found.errors["exchange_asymmetry"]).all()
    assert math.isnan(found.mean_errors["exchange_asymmetry"])


def test_the_gauge_of_the_weights_of_b_changes_nothing():
    """(c b, v / c), c of either sign: the same numbers, as long as the gauge is found anew."""
    generator = torch.Generator().manual_seed(3)
    a, b = torch.randn(2, 800, 5, generator=generator)
    b = b + 0.4 * a
    c = torch.tensor([3.0, -0.2, -1.0, 100.0, -0.01])
    plain, changed = (streamed(gp.activation("silu"), a, x).estimates() for x in (b, b * c))
    for name in plain.values:
        scale = (1 / c**2).numpy() if name == "energy" else 1.0  # E[g^2], whose |v|^2 changes the other way
        np.testing.assert_allclose(changed.values[name] * scale, plain.values[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_errors_are_those_of_repetition(name):
    """Jackknife errors of one run against the spread over many, for tokens that depend on each other in sequences."""
    act, runs, generator = gp.activation(name), 120, torch.Generator().manual_seed(5)
    # one neuron per column: independent repetitions of the same one
    common = torch.randn(40, 1, 2 * runs, generator=generator)  # shared by the 50 tokens of each of 40 sequences
    x = 0.6 * common + 0.8 * torch.randn(40, 50, 2 * runs, generator=generator)
    a, b = x[..., :runs].reshape(-1, runs), (0.5 * x[..., :runs] + x[..., runs:]).reshape(-1, runs)
    found = streamed(act, a, b, pieces=10).estimates()
    for measure_name in (*TEXT_SHARED, "gate_mean", "branch_correlation"):
        values, errors = found.values[measure_name], found.errors[measure_name]
        if values.std() < 1e-9:  # scaling under ReLU
            continue
        ratio = np.sqrt((errors**2).mean()) / values.std(ddof=1)
        assert 0.75 < ratio < 1.35, (measure_name, ratio)


@dataclass(frozen=True)
class OneMLP:
    """As much of a site as is asked for."""

    d_mlp: int
    layer: int = 0
    tower: str = "text"
    expert: str | None = None
    where: str = "layer 0"


class GaussianRunner:
    """In place of a language model: one MLP whose input is x ~ N(0, I)."""

    def __init__(self, layer: gp.GatedLayer, seed: int = 0) -> None:
        self._layer, self._seed, self._calls = layer, seed, 0
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def activation(self, site):
        return self._layer.known_activation()

    def value(self, site):
        return self._layer.value.float()

    def listen(self, ids, sites, receive):
        for site in sites:
            x = torch.stack([self._input(tuple(row.tolist())) for row in ids])
            receive(site, *(branch.float() for branch in self._layer.preactivations(x)))

    def _input(self, ids: tuple[int, ...]) -> torch.Tensor:
        """The same for the same sequence in both passes."""
        if ids not in self._known:
            generator = torch.Generator().manual_seed(self._seed + len(self._known))
            shape = len(ids), self._layer.d_model
            self._known[ids] = torch.randn(shape, generator=generator, dtype=torch.float64)
        return self._known[ids]


def gaussian_text(sequences: int, length: int = 128):
    text = tokenize([Document("words", words(sequences * length // 3))], tokens(), length=length)
    assert len(text.sequences) >= sequences
    return text


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gaussian_input_in_place_of_text_gives_the_gaussian_measures(name):
    """Within the errors, and the errors jointly right: the mean square of the deviations in units of them is about 1."""
    layer = random_layer(d_mlp=200, activation=name, seed=2)
    site = OneMLP(layer.d_mlp)
    found = measure(GaussianRunner(layer), [site], gaussian_text(160))[site]
    scale = layer.query.norm(dim=1).numpy()
    rho = torch.nn.functional.cosine_similarity(layer.query, layer.key).abs().numpy()
    expected = gp.gaussian_measures(name, scale, rho)
    clear = rho > 0.05  # below that the sample may not tell the sign of the canonical gauge
    assert clear.sum() > 150
    for measure_name in TEXT_SHARED:
        values, errors = (part[measure_name][clear] for part in (found.neurons.values, found.neurons.errors))
        difference = values - expected[measure_name].to_numpy()[clear]
        if np.abs(difference).max() < 1e-6:  # exact, as scaling under ReLU
            continue
        z = difference / errors
        assert np.abs(z).max() < 8, measure_name  # Student's t with 9 degrees of freedom, 200 neurons
        # sqrt(9 / 7) of Student's t; the neurons share the tokens, and so part of their errors
        assert 0.8 < np.sqrt((z**2).mean()) < 1.6, (measure_name, np.sqrt((z**2).mean()))
        mean_error = found.neurons.mean_errors[measure_name]
        mean_difference = found.neurons.values[measure_name].mean() - expected[measure_name].mean()
        assert abs(mean_difference) < 6 * mean_error + 2e-3, measure_name
    active = (found.neurons.values["gate_active"] - 0.5) / found.neurons.errors["gate_active"]
    assert np.abs(active).max() < 8


def test_the_output_on_gaussian_input():
    layer = random_layer(d_mlp=60, activation="silu", seed=4)
    site = OneMLP(layer.d_mlp)
    text = gaussian_text(60)
    found = measure(GaussianRunner(layer), [site], text)[site].outputs
    x = torch.randn(60_000, layer.d_model, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    plain, canonical = layer.forward(x), layer.canonical()
    for name, changed in (
        ("exchange_asymmetry_output", canonical.exchange("raw").forward(x)),
        ("scaling_asymmetry_output", canonical.rescale(2.0).forward(x)),
    ):
        gap = (plain - changed).square().sum()
        expected = (gap / 2 / (plain.square().sum() + changed.square().sum())).item()
        assert found.values[name][0] == pytest.approx(expected, abs=5 * found.errors[name][0] + 1e-3)
        assert 0 < found.errors[name][0] < 0.05


def test_output_sums_are_the_definition():
    layer = random_layer(d_mlp=10, activation="gelu", seed=1)
    a, b = (branch.float() for branch in layer.preactivations(torch.randn(300, layer.d_model, dtype=torch.float64)))
    gauge = torch.linspace(-2, 2, 10)
    moments = OutputMoments(layer.activation, gauge, layer.value.float())
    for group, start in enumerate(range(0, 300, 100)):
        moments.update(a[start : start + 100], b[start : start + 100], group)
    act = layer.activation
    plain, swapped = act(a) * b @ layer.value.float(), act(b * gauge) * a / gauge @ layer.value.float()
    expected = (plain - swapped).square().sum() / 2 / (plain.square().sum() + swapped.square().sum())
    assert moments.estimates().values["exchange_asymmetry_output"][0] == pytest.approx(expected.item(), rel=1e-4)


def test_memory_does_not_grow_with_the_text():
    act, sizes = gp.activation("silu"), []
    for count in (100, 10_000):
        moments = streamed(act, *torch.randn(2, count, 4, generator=torch.Generator().manual_seed(0)))
        sizes.append(sum(part.nbytes for part in vars(moments).values() if hasattr(part, "nbytes")))
    assert sizes[0] == sizes[1]


def test_contexts_see_what_the_sums_see():
    """The strongest token of each quadrant is the strongest of the whole sample."""
    layer = random_layer(d_mlp=8, activation="silu", seed=6)
    site = OneMLP(8)
    text, runner = gaussian_text(12), GaussianRunner(layer)
    top = TopContexts({site: [5, 2]}, 3)
    measure(runner, [site], text, top=top)
    frame = top.frame("m", text, tokens())
    x = torch.stack([runner._input(tuple(ids.tolist())) for ids in text.sequences if len(ids) == 128])[:, 1:]
    gauge = GaugeMoments(8)
    some = [runner._input(tuple(ids.tolist()))[1:] for ids in text.split_every(4)[1].sequences]
    gauge.update(*(branch.float() for branch in layer.preactivations(torch.cat(some))))
    a, b = layer.preactivations(x)
    b = b * gauge.gauge()
    g = layer.activation(a) * b
    for neuron in (5, 2):
        inside = (a[..., neuron] > 0) & (b[..., neuron] <= 0)
        best = torch.where(inside, g[..., neuron].abs(), 0).max().item()
        row = frame[(frame["neuron"] == neuron) & (frame["quadrant"] == "plus_minus") & (frame["rank"] == 1)].iloc[0]
        assert abs(row["value"]) >= best * (1 - 1e-5)
        if row["sequence"] < len(x):
            assert row["value"] == pytest.approx(g[row["sequence"], row["position"] - 1, neuron].item(), rel=1e-4)
