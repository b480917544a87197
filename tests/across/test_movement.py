"""Movement of neurons: known angles, what may not change it, and neurons that only changed places."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import glu_probe as gp
from glu_probe.across.fingerprints import same_by_fingerprint
from glu_probe.across.movement import counterparts, movement

from ..support import random_layer


def turned(rows: torch.Tensor, degrees: float, seed: int = 1) -> torch.Tensor:
    """Every row turned by that angle, in a random direction, its norm kept."""
    noise = torch.randn(rows.shape, generator=torch.Generator().manual_seed(seed), dtype=rows.dtype)
    unit = rows / rows.norm(dim=1, keepdim=True)
    across = noise - (noise * unit).sum(1, keepdim=True) * unit
    across /= across.norm(dim=1, keepdim=True)
    angle = torch.deg2rad(torch.tensor(degrees, dtype=rows.dtype))
    return (torch.cos(angle) * unit + torch.sin(angle) * across) * rows.norm(dim=1, keepdim=True)


@pytest.fixture
def base():
    return random_layer(d_mlp=40, d_model=16)


@pytest.mark.parametrize("degrees", [1e-6, 0.3, 30.0, 90.0, 150.0])
def test_known_angles(base, degrees):
    other = replace(
        base,
        query=turned(base.query, degrees),
        key=turned(base.key, degrees / 2),
        value=turned(base.value, degrees / 3),
    )
    moved = movement(base, other)
    np.testing.assert_allclose(moved["angle_q"], degrees, rtol=1e-6)
    np.testing.assert_allclose(moved["angle_k"], degrees / 2, rtol=1e-6)
    np.testing.assert_allclose(moved["angle_v"], degrees / 3, rtol=1e-6)
    np.testing.assert_allclose(moved["query_norm_relative"], 0, atol=1e-12)


def test_nothing_moved_is_exactly_nothing(base):
    for name, values in movement(base, base).items():
        assert (values == 0).all(), name


def test_movement_is_the_distance_of_the_neurons_as_tensors(base):
    other = random_layer(d_mlp=40, d_model=16, seed=3)
    moved = movement(base, other)["movement"]
    for i in range(0, 40, 7):
        one, two = (torch.einsum("a,b,c->abc", m.query[i], m.key[i], m.value[i]) for m in (base, other))
        assert moved[i] == pytest.approx(((two - one).norm() / one.norm()).item(), rel=1e-9)


@settings(max_examples=20, deadline=None)
@given(scale=st.floats(0.01, 100), seed=st.integers(0, 100))
def test_no_choice_of_coordinates_changes_it(scale, seed):
    base = random_layer(d_mlp=12, d_model=8, seed=seed)
    other = replace(
        base, query=turned(base.query, 10.0), key=turned(base.key, 20.0, 2) * 1.5, value=turned(base.value, 35.0, 3)
    )
    signs = torch.randn(12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).sign()
    expected = movement(base, other)
    for one, two in ((base, other.regauge(scale * signs)), (base.regauge(-scale * signs), other)):
        for name, values in movement(one, two).items():
            np.testing.assert_allclose(values, expected[name], rtol=1e-6, atol=1e-9, err_msg=name)
    rotation = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).Q
    rotated = [
        replace(m, query=m.query @ rotation, key=m.key @ rotation, value=m.value @ rotation) for m in (base, other)
    ]
    np.testing.assert_allclose(movement(*rotated)["movement"], expected["movement"], rtol=1e-6)


def test_the_sign_is_one_for_key_and_value_together(base):
    """k alone turned round is a neuron that does the opposite, not the same one in other coordinates."""
    moved = movement(base, replace(base, key=-base.key))
    np.testing.assert_allclose(moved["movement"], 2)
    np.testing.assert_allclose(moved["angle_k"] + moved["angle_v"], 180, rtol=1e-6)
    np.testing.assert_allclose(movement(base, replace(base, query=-base.query))["angle_q"], 180, rtol=1e-6)


def test_the_factor_that_hardly_turned_says_which_sign_it_is(base):
    """A key that turned by more than a right angle is one, as long as the value stays; and the other way round."""
    far, near = turned(base.key, 110.0), turned(base.value, 10.0, 3)
    for one, two, key, value in (
        (far, near, 110.0, 10.0),
        (-far, -near, 110.0, 10.0),
        (turned(base.key, 10.0), turned(base.value, 110.0), 10.0, 110.0),
    ):
        moved = movement(base, replace(base, key=one, value=two))
        np.testing.assert_allclose(moved["angle_k"], key, rtol=1e-6)
        np.testing.assert_allclose(moved["angle_v"], value, rtol=1e-6)


def test_sizes(base):
    moved = movement(base, replace(base, query=base.query * 1.2, key=base.key * 3, value=base.value * 0.5))
    np.testing.assert_allclose(moved["query_norm_relative"], 0.2)
    np.testing.assert_allclose(moved["value_gain_relative"], 0.5)
    np.testing.assert_allclose(moved["movement"], 1.2 * 1.5 - 1)


def test_rows_of_zeros_have_no_angle(base):
    base.query[3] = 0
    base.value[5] = float("nan")
    moved = movement(base, base)
    assert np.isnan(moved["angle_q"]).tolist() == [i == 3 for i in range(40)]
    assert np.isnan(moved["angle_v"]).tolist() == [i == 5 for i in range(40)]
    assert np.isnan(moved["movement"]).sum() == 2


# -- which neuron is which ------------------------------------------------------------------------


def permuted(layer, order):
    return replace(layer, query=layer.query[order], key=layer.key[order], value=layer.value[order])


def test_neurons_that_moved_keep_their_index():
    base = random_layer(d_mlp=300, d_model=64)
    other = replace(
        base, query=turned(base.query, 40.0), key=turned(base.key, 40.0, 2), value=turned(base.value, 40.0, 3)
    )
    found = counterparts(base, other)
    assert (found.identity, found.own, found.elsewhere) == ("index", 1.0, 0)
    assert (found.order == np.arange(300)).all()


@pytest.mark.parametrize("degrees", [0.0, 20.0])
def test_a_permuted_twin_is_noticed_and_matched(degrees):
    base = random_layer(d_mlp=300, d_model=64)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(4))
    other = base if not degrees else replace(base, query=turned(base.query, degrees))
    signs = torch.where(torch.arange(300) % 2 == 0, -1.0, 1.0).double()
    found = counterparts(base, permuted(other.regauge(signs), order))
    assert found.identity == "permuted"
    assert found.own < 0.1
    assert (found.order == np.argsort(order.numpy())).all()
    moved = movement(base, permuted(other, order), found.order)
    np.testing.assert_allclose(moved["angle_q"], degrees, atol=1e-5)
    assert (moved["angle_k"] < 1e-5).all()


def test_two_neurons_that_changed_places_are_no_movement():
    base = random_layer(d_mlp=300, d_model=64)
    order = np.arange(300)
    order[[17, 250]] = 250, 17
    found = counterparts(base, permuted(base, order))
    assert (found.identity, found.elsewhere) == ("permuted", 2)
    assert (found.order == order).all()


def test_a_neuron_that_took_anothers_place_leaves_none():
    base = random_layer(d_mlp=300, d_model=64)
    order = np.arange(300)
    order[17] = 250  # neuron 17 is gone, 250 is there twice
    found = counterparts(base, permuted(base, order))
    assert found.order[250] == 250
    assert found.order[17] == 17  # nothing is more like it than chance


def test_unrelated_layers_of_one_shape():
    found = counterparts(random_layer(d_mlp=300, d_model=64), random_layer(d_mlp=300, d_model=64, seed=8))
    assert found.identity == "unrelated"
    assert found.own < 0.1


def test_copies_of_a_neuron_are_at_home_wherever_they_are():
    base = random_layer(d_mlp=30, d_model=16)
    same = permuted(base, torch.zeros(30, dtype=torch.long))
    assert counterparts(same, same).identity == "index"


# -- without weights ------------------------------------------------------------------------------


def neuron_frame(layer):
    from glu_probe.frames import neuron_frame

    return neuron_frame("m", gp.measure_layer(layer, samples=8))


def test_frames_alone_show_an_order_and_strangers():
    base = random_layer(d_mlp=300, d_model=64)
    order = np.random.default_rng(0).permutation(300)
    frame = neuron_frame(base)
    assert same_by_fingerprint(frame, frame)[::2] == ("index", 1.0)
    identity, found, own = same_by_fingerprint(frame, neuron_frame(permuted(base, order)))
    assert identity == "permuted"
    assert own < 0.1
    assert (found == np.argsort(order)).all()
    assert same_by_fingerprint(frame, neuron_frame(random_layer(d_mlp=300, d_model=64, seed=8)))[0] == "unknown"
