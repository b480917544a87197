"""Every model type that transformers can build small, in the table or not: read rightly, or refused by name.

A few minutes: run with `-m slow`. Types that have no small model here are skipped with the reason.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

import glu_probe as gp
from glu_probe.activations import ACTIVATIONS
from glu_probe.checkpoint.families import FAMILIES
from glu_probe.errors import NoGatedMLP, UnsupportedModel
from glu_probe.neurons import GatedLayer

from .shrunk import CannotBuild, build, configuration
from .witness import Witness, error

transformers.logging.set_verbosity_error()
IN_THE_TABLE = {name for family in FAMILIES for name in family.names}
# Reads as much as a plain MLP: what it computes besides is no function of one neuron's three weights.
BESIDES = ("feed_forward_",)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", sorted(CONFIG_MAPPING))
def test_a_type_is_read_rightly_or_refused_by_name(model_type, tmp_path):
    try:
        model = build(configuration(model_type))
        model.save_pretrained(tmp_path)
    except CannotBuild as reason:
        pytest.skip(f"no small model: {reason}")
    except (NotImplementedError, RuntimeError, OSError) as reason:
        pytest.skip(f"cannot be saved: {reason}"[:200])
    try:
        raw = gp.open_checkpoint(tmp_path, fold_norm=False)
        gp.open_checkpoint(tmp_path).describe()
    except NoGatedMLP:
        assert not gated_modules(model)
        return
    except UnsupportedModel:
        assert model_type not in IN_THE_TABLE
        return
    witness = Witness(model)
    with torch.no_grad():
        read = {check(layer, witness) for layer in raw.layers()}
    left = {name for name in gated_modules(model) if name not in read and not any(name in note for note in raw.notes)}
    assert not left, f"passed over: {sorted(left)}"
    assert tmp_path.joinpath("config.json").exists()


def check(layer: GatedLayer, witness: Witness) -> str:
    """Assert that a layer is a module of the model and computes what it computes; the module's name."""
    name, _ = witness.place(layer)
    note = layer.functional_note() or ""
    claims = layer.activation is not None and not any(word in note for word in ("coupled", "low-rank"))
    if any(part in name for part in BESIDES):
        return name
    try:
        x = torch.randn(5, layer.d_model, generator=torch.Generator().manual_seed(1))
        expected = witness.function(layer)(x)
    except Exception:  # a module that wants more than its input
        assert not claims, f"{name} cannot be run"
        return name
    gates = [layer.activation] if claims else list(ACTIVATIONS.values())
    straight, swapped = (
        min(error(replace(one, activation=gate).forward(x), expected) for gate in gates)
        for one in (layer, layer.exchange(gauge="raw"))
    )
    assert straight < 1e-5 or (not claims and swapped > 1e-2), (name, straight, swapped)
    assert swapped > 1e-3
    return name


def gated_modules(model: PreTrainedModel) -> list[str]:
    """Modules of an MLP's name whose own linear layers have the shapes of one with a gate."""
    found = []
    for name, module in model.named_modules():
        if not any(word in name.rpartition(".")[2] for word in ("mlp", "ffn", "feed_forward")):
            continue
        shapes = [tuple(child.weight.shape) for child in module.children() if isinstance(child, nn.Linear)]
        if len(shapes) == 3 and any(shapes.count((f, d)) == 2 and (d, f) in shapes and f != d for f, d in shapes):
            found.append(name)
    return found


def test_the_witness_is_not_fooled(tmp_path: Path):
    """Exchanged factors fail the check that every type must pass."""
    model = build(configuration("llama"))
    model.save_pretrained(tmp_path)
    layer, witness = gp.open_checkpoint(tmp_path, fold_norm=False).layer(0), Witness(model)
    with torch.no_grad():
        assert check(layer, witness) == "model.layers.0.mlp"
        with pytest.raises(AssertionError):
            check(layer.exchange(gauge="raw"), witness)
        with pytest.raises(AssertionError):
            check(replace(layer, activation="gelu"), witness)
