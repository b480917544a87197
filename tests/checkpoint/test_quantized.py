"""Weights with scales beside them, and those whose packing is simple: FP8, FP4, INT8, BitNet, GPTQ, AWQ."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import glu_probe as gp
from glu_probe.checkpoint.files import open_files
from glu_probe.checkpoint.ref import parse_ref
from glu_probe.errors import IncompleteTriple, LayoutUnknown, QuantizedWeights, ShapeMismatch, UnscaledFP8

from ..support import llama_config, llama_tensors, write_checkpoint
from .packing import (
    MODULES,
    RAGGED,
    STEM,
    WIDE,
    assert_factors,
    assert_ranges,
    awq,
    blocks_of,
    draw,
    e2m1,
    gptq,
    half_bytes,
    packed_model,
)

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def fp8(rows: int, columns: int, suffix: str = "weight_scale_inv", dtype: torch.dtype = torch.float32, shape=None):
    """FP8 in blocks; a size beyond the weight's means all of it."""

    def pack(weight):
        height, width = weight.shape
        small, grid, expected = blocks_of(weight, min(rows, height), min(columns, width), dtype)
        grid = grid if shape is None else grid.reshape(shape)
        return {"weight": small, suffix: grid}, expected.to(dtype)

    return pack


WHOLE = 10**6
FP8_FORMS = {
    "a scale for the whole": (fp8(WHOLE, WHOLE, shape=()), None, WIDE, "tensor"),
    "of one number": (fp8(WHOLE, WHOLE, shape=(1,)), FP8, WIDE, "tensor"),
    "of one number, as a matrix": (fp8(WHOLE, WHOLE, "weight_scale"), None, WIDE, "tensor"),
    "for every row": (fp8(1, WHOLE, "weight_scale"), {"quant_method": "fbgemm_fp8"}, WIDE, "row"),
    "for every row, as a vector": (fp8(1, WHOLE, "weight_scale", shape=(-1,)), None, WIDE, "row"),
    "for every row, in bfloat16": (fp8(1, WHOLE, "weight_scale", torch.bfloat16), None, WIDE, "row"),
    "128x128": (fp8(128, 128), FP8, RAGGED, "128x128"),
    "128x128, undeclared": (fp8(128, 128), None, RAGGED, "128x128"),
    "128x128, in bfloat16": (fp8(128, 128, dtype=torch.bfloat16), FP8, RAGGED, "128x128"),
    "128x128, as DeepSeek-V4 names it": (fp8(128, 128, "scale"), FP8, RAGGED, "128x128"),
    "as Mistral names it": (fp8(WHOLE, WHOLE, "qscale_weight", shape=()), FP8, WIDE, "tensor"),
    "48x40": (fp8(48, 40), FP8 | {"weight_block_size": [48, 40]}, RAGGED, "48x40"),
    "40x40, undeclared": (fp8(40, 40), None, RAGGED, "40x40"),
    "compressed-tensors, blocks": (
        fp8(64, 48, "weight_scale"),
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"block_structure": [64, 48]}}}},
        RAGGED,
        "64x48",
    ),
}


@pytest.mark.parametrize("form", FP8_FORMS)
def test_fp8_is_multiplied_with_its_scale(form, tmp_path):
    pack, quantization, sizes, words = FP8_FORMS[form]
    model, expected = packed_model(tmp_path / "m", pack, quantization, **sizes)
    assert_factors(model, expected, **sizes)
    assert_ranges(model)
    frame = gp.open_checkpoint(model).describe()
    assert list(frame["dtype"]) == [f"F8_E4M3 x {words} scale", "F32"]
    assert gp.open_checkpoint(model).provenance()["towers"]["text"]["dtypes"] == ["F32", f"F8_E4M3 x {words} scale"]


def test_the_bytes_that_a_run_reads_include_the_scales(tmp_path):
    model, _ = packed_model(tmp_path / "m", fp8(128, 128), FP8, **RAGGED)
    read = gp.open_checkpoint(model, fold_norm=False).describe()["bytes"]
    assert list(read) == [3 * 160 * 200 + 3 * 4 * 4, 3 * 160 * 200 * 4]


def test_e5m2(tmp_path):
    def pack(weight):
        small = (weight * 100).to(torch.float8_e5m2)
        return {"weight": small, "weight_scale": torch.tensor(0.01)}, small.float() * 0.01

    model, expected = packed_model(tmp_path / "m", pack, None)
    assert_factors(model, expected)


_HAS_E8M0 = hasattr(torch, "float8_e8m0fnu")  # since torch 2.7
_POWERS = [torch.uint8, *([torch.float8_e8m0fnu] if _HAS_E8M0 else [])]


@pytest.mark.parametrize("named", _POWERS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (128, 128)])
def test_scales_that_are_powers_of_two(named, rows, columns, tmp_path):
    def pack(weight):
        height, width = weight.shape
        small = (weight * 64).to(torch.float8_e4m3fn)
        exponents = draw(-(-height // rows), -(-width // columns), low=118, high=124)
        stored = torch.from_numpy(exponents.astype(np.uint8)).view(named)
        spread = np.repeat(np.repeat(exponents, rows, 0), columns, 1)[:height, :width]
        return {"weight": small, "weight_scale_inv": stored}, small.float() * torch.from_numpy(
            2.0 ** (spread - 127)
        ).float()

    sizes = WIDE if columns == 32 else RAGGED
    model, expected = packed_model(tmp_path / "m", pack, {"quant_method": "mxfp8"} if columns == 32 else FP8, **sizes)
    assert_factors(model, expected, **sizes)
    assert_ranges(model)


def test_a_scale_of_transformers_own_quantiser(tmp_path):
    """What `Fp8Quantize` of transformers stores means what its `Fp8Dequantize` makes of it."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    class Quantizer:
        quantization_config = FineGrainedFP8Config(weight_block_size=(32, 16))

    def pack(weight):
        stored = {
            name.rpartition(".")[2]: tensor
            for name, tensor in Fp8Quantize(Quantizer()).convert({"x.weight": weight}).items()
        }
        whole = Fp8Dequantize(Quantizer()).convert({name: [tensor] for name, tensor in stored.items()})["weight"]
        return stored, whole

    model, expected = packed_model(tmp_path / "m", pack, FP8 | {"weight_block_size": [32, 16]})
    assert_factors(model, expected)


def test_fp8_without_a_scale_means_nothing(tmp_path):
    model, _ = packed_model(tmp_path / "m", lambda w: ({"weight": w.to(torch.float8_e4m3fn)}, w), FP8)
    with pytest.raises(UnscaledFP8, match=r"down_proj\.weight' is F8_E4M3 and no weight_scale_inv") as caught:
        gp.open_checkpoint(model)
    assert str(model / "model.safetensors") in str(caught.value)


@pytest.mark.parametrize("shape", [(3, 2), (2, 3), (1, 2, 2), (160, 3), (4,)])
def test_a_scale_of_the_wrong_shape(shape, tmp_path):
    def pack(weight):
        return {"weight": weight.to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(shape)}, weight

    model, _ = packed_model(tmp_path / "m", pack, FP8, **RAGGED)
    with pytest.raises(ShapeMismatch, match=r"down_proj\.weight_scale_inv' is \[.*down_proj\.weight' \[160, 200\]"):
        gp.open_checkpoint(model)


@pytest.mark.parametrize("quantization", [
    None, {"quant_method": "fp8"}, {"quant_method": "compressed-tensors", "config_groups": {}},
])  # fmt: skip
@pytest.mark.parametrize("shape", [(2, 4), (4, 4), (1, 256), (2, 256), (1, 2)])
def test_blocks_of_an_unusual_size_are_not_taken_for_meant(shape, quantization, tmp_path):
    """(2, 4) is the grid of [512, 256] turned round, (1, 256) a scale for every row that lies along the columns."""

    def pack(weight):
        scales = shape if weight.shape == (512, 256) else ()
        return {"weight": weight.to(torch.float8_e4m3fn), "weight_scale": torch.ones(scales)}, weight

    model, _ = packed_model(tmp_path / "m", pack, quantization, d_model=256, d_mlp=512)
    with pytest.raises(ShapeMismatch, match=r"gate_proj\.weight_scale' is \[.*no grid of blocks .* of a usual size"):
        gp.open_checkpoint(model)


@pytest.mark.parametrize(("rows", "columns"), [(1, 40), (1, 128), (40, 40), (128, 128)])
def test_blocks_that_need_no_word(rows, columns, tmp_path):
    model, expected = packed_model(tmp_path / "m", fp8(rows, columns), None, **RAGGED)
    assert_factors(model, expected, **RAGGED)
    assert_ranges(model)


def test_columns_with_a_scale_each_if_the_config_says_so(tmp_path):
    settings = FP8 | {"weight_block_size": [200, 1]}
    model, expected = packed_model(tmp_path / "m", fp8(WHOLE, 1), settings, **RAGGED)
    assert_factors(model, expected, **RAGGED)
    assert_ranges(model)


def test_two_scales(tmp_path):
    def pack(weight):
        scales = {name: torch.ones(1) for name in ("weight_scale", "weight_scale_inv")}
        return {"weight": weight.to(torch.float8_e4m3fn)} | scales, weight

    model, _ = packed_model(tmp_path / "m", pack, FP8)
    with pytest.raises(QuantizedWeights, match="has 2 scales beside it"):
        gp.open_checkpoint(model)


def test_scales_of_the_input_are_left_alone(tmp_path):
    def pack(weight):
        stored, expected = fp8(WHOLE, WHOLE, shape=(1,))(weight)
        return stored | {
            "activation_scale": torch.ones(1),
            "input_zero_point": torch.ones(1, dtype=torch.int8),
        }, expected

    model, expected = packed_model(tmp_path / "m", pack, FP8)
    assert_factors(model, expected)


ODD = ("weight_zero_point", "pre_quant_scale", "input_smooth", "weight.extra", "gain")


@pytest.mark.parametrize("part", ODD)
@pytest.mark.parametrize("method", ["fp8", "gptq", "awq"])
def test_parts_of_a_meaning_that_is_not_known(part, method, tmp_path):
    pack, settings = {
        "fp8": (fp8(WHOLE, WHOLE, "weight_scale_inv"), FP8),
        "gptq": (gptq(), {"quant_method": "gptq"}),
        "awq": (awq(), {"quant_method": "awq", "group_size": 32}),
    }[method]

    def with_more(weight):
        stored, expected = pack(weight)
        return stored | {part: torch.ones(weight.shape[0])}, expected

    model, _ = packed_model(tmp_path / "m", with_more, settings)
    with pytest.raises(
        (QuantizedWeights, LayoutUnknown), match=rf"_proj.*' (has|holds|is stored as) .*{part.split('.')[0]}"
    ):
        gp.open_checkpoint(model)


@pytest.mark.parametrize("prefix", ["model.attn_layers.layers.", "attention_free.layers.", "model.attention.0.layers."])
def test_only_the_block_says_what_is_attention(prefix, tmp_path):
    model, expected = packed_model(tmp_path / "m", fp8(128, 128), FP8, **RAGGED)
    stored = load_file(model / "model.safetensors")
    renamed = {name.replace("model.layers.", prefix): tensor for name, tensor in stored.items()}
    source = stacked(tmp_path / "n", renamed, FP8)
    name = f"{prefix}0.mlp.gate_proj.weight"
    if prefix == "model.attention.0.layers.":  # where the first number is the layer's, and what follows is its block
        assert not source.infos()[f"{prefix}0.self_attn.q_proj.weight"].decoded
    assert source.infos()[name].decoded
    assert torch.equal(source.read(name), expected["gate_proj"])


NAN, INF = float("nan"), float("inf")
SCHEMES = {
    "fp8": (fp8(128, 128), FP8, "weight_scale_inv"),
    "gptq": (gptq(), {"quant_method": "gptq"}, "scales"),
    "awq": (awq(), {"quant_method": "awq", "group_size": 32}, "scales"),
}


def with_one_scale(scheme, value):
    """Weights of which one scale, not the first, is changed."""
    pack, settings, part = SCHEMES[scheme]

    def changed(weight):
        stored, expected = pack(weight)
        stored[part][-1, -1] = value
        return stored, expected

    return changed, settings


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("value", "words"), [
    (NAN, "no number as scale"), (INF, "an infinite scale"), (-INF, "an infinite scale"), (0, "a scale of 0 erases"),
])  # fmt: skip
def test_scales_that_no_quantiser_writes(scheme, value, words, tmp_path):
    model, _ = packed_model(tmp_path / "m", *with_one_scale(scheme, value), **RAGGED)
    with pytest.raises(QuantizedWeights, match=rf"gate_proj\..*{words}.*gate_proj\.{SCHEMES[scheme][2]}'"):
        gp.open_checkpoint(model).layer(0)


def test_negative_scales_are_those_of_integers(tmp_path):
    """Quantisers that use the whole range of integers write them."""
    for scheme in ("gptq", "awq"):
        model, expected = packed_model(tmp_path / scheme, *with_one_scale(scheme, -1.0), **RAGGED)
        found = gp.open_checkpoint(model, fold_norm=False).layer(0).query
        assert (found[-1] != expected["gate_proj"][-1].float()).any()
        assert torch.equal(found[:-1], expected["gate_proj"][:-1].float())
    model, _ = packed_model(tmp_path / "fp8", *with_one_scale("fp8", -1.0), **RAGGED)
    with pytest.raises(QuantizedWeights, match="a negative scale"):
        gp.open_checkpoint(model).layer(0)


def test_a_scale_of_0_for_zeros(tmp_path):
    def pack(weight):
        stored, expected = fp8(1, WHOLE, "weight_scale")(weight)
        stored["weight"][-1] = 0
        stored["weight_scale"][-1], expected[-1] = 0, 0
        return stored, expected

    model, expected = packed_model(tmp_path / "m", pack, None)
    assert_factors(model, expected)


def test_shards_that_part_weight_and_scale(tmp_path):
    model, expected = packed_model(tmp_path / "m", fp8(128, 128), FP8, **RAGGED)
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    index = {name: f"model-0000{1 + name.endswith('scale_inv')}-of-00002.safetensors" for name in tensors}
    for part in set(index.values()):
        save_file({name: tensors[name] for name in tensors if index[name] == part}, model / part)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert_factors(model, expected, **RAGGED)


def test_a_torch_file(tmp_path):
    model, expected = packed_model(tmp_path / "m", fp8(128, 128), FP8, **RAGGED)
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    assert_factors(model, expected, **RAGGED)


def test_a_scheme_in_the_text_part_of_the_config(tmp_path):
    model, expected = packed_model(tmp_path / "m", gptq(), None)
    config = json.loads((model / "config.json").read_text())
    config = {"model_type": "llava", "text_config": config | {"quantization_config": {"quant_method": "gptq"}}}
    (model / "config.json").write_text(json.dumps(config))
    assert_factors(model, expected)


# -- stacked experts -----------------------------------------------------------------------------


def stacked(tmp_path, tensors, quantization=None):
    """The source over a file of these tensors."""
    config = llama_config(quantization_config=quantization)
    return open_files(parse_ref(write_checkpoint(tmp_path / "m", tensors, config))).source


def test_mxfp4_experts_as_transformers_unpacks_them(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stem = "model.layers.0.mlp.experts.gate_up_proj"
    blocks = torch.from_numpy(draw(3, 48, 2, 16, low=0, high=255).astype(np.uint8))
    scales = torch.from_numpy(draw(3, 48, 2, low=100, high=130, seed=1).astype(np.uint8))
    source = stacked(tmp_path, {f"{stem}_blocks": blocks, f"{stem}_scales": scales, f"{stem}_bias": torch.ones(3, 48)})
    info = source.infos()[stem]
    assert (info.dtype, info.shape, info.nbytes) == ("MXFP4", (3, 48, 64), blocks.numel() + scales.numel())
    assert info.rows_first
    assert set(source.infos()) == {stem, f"{stem}_bias"}
    theirs = convert_moe_packed_tensors(blocks, scales)  # [experts, in, out]
    assert torch.equal(source.read(stem), theirs.transpose(1, 2))
    assert torch.equal(source.read(stem, slice(1, 2)), theirs.transpose(1, 2)[1:2])
    # and by hand: low half first, and the scale is that of 32 values
    codes = np.stack((blocks.numpy() & 15, blocks.numpy() >> 4), -1).reshape(3, 48, 2, 32)
    by_hand = e2m1(codes) * torch.from_numpy(2.0 ** (scales.numpy().astype(float) - 127)).float()[..., None]
    assert torch.equal(source.read(stem).float(), by_hand.reshape(3, 48, 64))


def test_mxfp4_experts_whose_shapes_do_not_tell_which_way_they_lie(tmp_path):
    """gpt-oss has d_model = d_mlp: in bfloat16 its experts are [in, out], unpacked from blocks they are [out, in]."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    size, stem, whole = 64, "model.layers.0.mlp.experts.", {}
    norm = {"model.layers.0.post_attention_layernorm.weight": torch.ones(size)}
    biases = {"gate_up_proj_bias": torch.randn(3, 2 * size), "down_proj_bias": torch.randn(3, size)}
    plain = norm | {stem + name: tensor for name, tensor in biases.items()}
    packed = dict(plain)
    for seed, (name, rows) in enumerate((("gate_up_proj", 2 * size), ("down_proj", size))):
        blocks = torch.from_numpy(draw(3, rows, 2, 16, low=0, high=255, seed=seed).astype(np.uint8))
        scales = torch.from_numpy(draw(3, rows, 2, low=118, high=124, seed=seed).astype(np.uint8))
        packed |= {f"{stem}{name}_blocks": blocks, f"{stem}{name}_scales": scales}
        whole[name] = convert_moe_packed_tensors(blocks, scales)  # [experts, in, out], as the model multiplies
        plain[stem + name] = whole[name].clone()
    config = llama_config(
        model_type="gpt_oss", num_hidden_layers=1, hidden_size=size, intermediate_size=size, num_local_experts=3
    )
    method = {"quantization_config": {"quant_method": "mxfp4"}}
    models = [
        write_checkpoint(tmp_path / "packed", packed, config | method),
        write_checkpoint(tmp_path / "plain", plain, config),
    ]
    for expert in range(3):
        for model in models:
            layer = gp.open_checkpoint(model, fold_norm=False).layer(0, expert)
            assert torch.equal(layer.query, whole["gate_up_proj"][expert, :, 0::2].T.float())
            assert torch.equal(layer.key, whole["gate_up_proj"][expert, :, 1::2].T.float())
            assert torch.equal(layer.value, whole["down_proj"][expert].float())
    assert set(gp.open_checkpoint(models[0]).describe()["dtype"]) == {"MXFP4"}


def test_mxfp4_with_an_exponent_that_stands_for_no_number(tmp_path):
    stem = "model.layers.0.mlp.experts.gate_up_proj"
    scales = torch.full((3, 48, 2), 120, dtype=torch.uint8)
    scales[1, 5, 1] = 255
    blocks = torch.ones(3, 48, 2, 16, dtype=torch.uint8)
    source = stacked(tmp_path, {f"{stem}_blocks": blocks, f"{stem}_scales": scales})
    assert source.read(stem, slice(0, 1)).isfinite().all()
    with pytest.raises(QuantizedWeights, match=rf"{stem}_blocks' has no number as scale, in '{stem}_scales'"):
        source.read(stem, slice(1, 2))


def test_mxfp4_without_scales(tmp_path):
    stem = "model.layers.0.mlp.experts."
    tensors = {
        f"{stem}{name}_blocks": torch.ones(3, 48, 2, 16, dtype=torch.uint8) for name in ("gate_up_proj", "down_proj")
    }
    model = write_checkpoint(tmp_path / "m", tensors, llama_config(model_type="gpt_oss"))
    with pytest.raises(
        IncompleteTriple, match=r"down_proj_scales', without which .*_blocks' means nothing, is missing"
    ):
        gp.open_checkpoint(model)


@pytest.mark.parametrize("odd", ["gate_up_proj_scale_2", "gate_up_proj.gain"])
def test_mxfp4_experts_with_a_part_of_a_meaning_that_is_not_known(odd, tmp_path):
    stem, tensors = "model.layers.0.mlp.experts.", {"model.layers.0.post_attention_layernorm.weight": torch.ones(64)}
    for name, rows in (("gate_up_proj", 128), ("down_proj", 64)):
        tensors[f"{stem}{name}_blocks"] = torch.ones(3, rows, 2, 16, dtype=torch.uint8)
        tensors[f"{stem}{name}_scales"] = torch.ones(3, rows, 2, dtype=torch.uint8)
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_local_experts": 3}
    config = llama_config(model_type="gpt_oss", quantization_config={"quant_method": "mxfp4"}, **sizes)
    assert gp.open_checkpoint(write_checkpoint(tmp_path / "a", tensors, config)).layer(0, 0).query.isfinite().all()
    model = write_checkpoint(tmp_path / "b", tensors | {f"{stem}{odd}": torch.ones(3)}, config)
    with pytest.raises((QuantizedWeights, LayoutUnknown), match=odd.removeprefix("gate_up_proj")[1:]):
        gp.open_checkpoint(model)


def test_fp8_experts_in_one_tensor(tmp_path):
    name = "model.layers.0.mlp.experts.down_proj"
    weight = torch.randn(3, 200, 160, generator=torch.Generator().manual_seed(0)) / 10
    small, grids, expected = (
        torch.stack(parts) for parts in zip(*(blocks_of(w, 128, 128) for w in weight), strict=True)
    )
    source = stacked(tmp_path, {name: small, f"{name}_scale_inv": grids}, FP8)
    assert source.infos()[name].dtype == "F8_E4M3 x 128x128 scale"
    assert source.infos()[name].rows_first is None
    assert torch.equal(source.read(name), expected)
    assert torch.equal(source.read(name, slice(2, 3)), expected[2:3])


def test_fp8_experts_with_scales_of_their_columns(tmp_path):
    name = "model.layers.0.feed_forward.experts.gate_up_proj"
    small = torch.randn(3, 16, 48, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 1, 48, generator=torch.Generator().manual_seed(1))
    source = stacked(tmp_path, {name: small, f"{name}_scale": scale}, {"quant_method": "fbgemm_fp8"})
    assert source.infos()[name].dtype == "F8_E4M3 x column scale"
    assert source.infos()[name].rows_first is False
    assert torch.equal(source.read(name, slice(1, 3)), (small.float() * scale)[1:3])


# -- FP4 and INT8 in int8 ------------------------------------------------------------------------


@pytest.mark.skipif(not _HAS_E8M0, reason="its scales are of a type of torch 2.7")
def test_fp4_in_int8(tmp_path):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    def pack(weight):
        height, width = weight.shape
        packed = half_bytes(draw(height, width, low=0, high=15)).view(torch.int8)
        scale = torch.from_numpy(draw(height, width // 32, low=118, high=124).astype(np.uint8)).view(
            torch.float8_e8m0fnu
        )
        return {"weight": packed, "scale": scale}, Fp8Dequantize(None)._dequantize_one(packed, scale)

    model, expected = packed_model(tmp_path / "m", pack, FP8)
    assert_factors(model, expected)
    assert_ranges(model)
    assert "FP4 x 1x32 scale" in set(gp.open_checkpoint(model).describe()["dtype"])


def test_int8_with_a_float_scale_is_no_fp4(tmp_path):
    def pack(weight):
        return {
            "weight": torch.ones(weight.shape, dtype=torch.int8),
            "weight_scale": torch.ones(weight.shape[0], 1),
        }, weight

    model, _ = packed_model(tmp_path / "m", pack, FP8)
    with pytest.raises(QuantizedWeights, match="is int8 with a scale of F32: neither FP8 nor FP4"):
        gp.open_checkpoint(model)


# -- BitNet --------------------------------------------------------------------------------------


@pytest.mark.parametrize("linear", ["bitlinear", "autobitlinear"])
def test_bitnet_is_what_transformers_own_layers_multiply_with(linear, tmp_path):
    from transformers.integrations import bitnet

    def pack(weight):
        height, width = weight.shape
        ternary = torch.from_numpy(draw(height, width, low=-1, high=1)).float()
        layer = (bitnet.BitLinear if linear == "bitlinear" else bitnet.AutoBitLinear)(width, height, bias=False)
        packed = bitnet.pack_weights(ternary.clone())
        if linear == "bitlinear":
            layer.weight = torch.nn.Buffer(packed)
            layer.dtype = torch.float32
        else:
            layer.weight.data = ternary
        layer.weight_scale = torch.nn.Buffer(torch.tensor([0.37]))
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            columns = layer(torch.eye(width))
        return {"weight": packed, "weight_scale": layer.weight_scale.clone()}, columns.T

    model, expected = packed_model(tmp_path / "m", pack, {"quant_method": "bitnet", "linear_class": linear})
    first = gp.open_checkpoint(model, fold_norm=False).layer(0)
    # their layers round the inputs to 8 bits, and scale back: the last bit differs
    torch.testing.assert_close(first.query, expected["gate_proj"], rtol=1e-6, atol=0)
    torch.testing.assert_close(first.value, expected["down_proj"].T, rtol=1e-6, atol=0)
    assert first.query.abs().max() == pytest.approx(0.37 if linear == "autobitlinear" else 1 / 0.37, rel=1e-6)
    assert_ranges(model)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_bitnet_with_a_scale_that_no_quantiser_writes(value, tmp_path):
    def pack(weight):
        packed = torch.zeros(weight.shape[0] // 4, weight.shape[1], dtype=torch.uint8)
        return {"weight": packed, "weight_scale": torch.tensor([value])}, weight

    model, _ = packed_model(tmp_path / "m", pack, {"quant_method": "bitnet"})
    with pytest.raises(QuantizedWeights, match=r"gate_proj\.weight' has .* scale.*gate_proj\.weight_scale'"):
        gp.open_checkpoint(model).layer(0)


def test_bitnet_weights_that_are_made_ternary_at_run_time(tmp_path):
    settings = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    model, _ = packed_model(tmp_path / "m", lambda w: ({"weight": w}, w), settings)
    with pytest.raises(QuantizedWeights, match="ternary weights are made when the model runs"):
        gp.open_checkpoint(model)


def test_bitnet_with_a_norm_in_every_linear_layer(tmp_path):
    def pack(weight):
        return {
            "weight": torch.zeros(weight.shape[0] // 4, weight.shape[1], dtype=torch.uint8),
            "weight_scale": torch.ones(1),
        }, weight

    model, _ = packed_model(tmp_path / "m", pack, {"quant_method": "bitnet", "use_rms_norm": True})
    with pytest.raises(QuantizedWeights, match="use_rms_norm"):
        gp.open_checkpoint(model)


# -- GPTQ and AWQ --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq(form, bits, act_order, tmp_path):
    model, expected = packed_model(
        tmp_path / "m", gptq(bits, 32, form, act_order=act_order), {"quant_method": "gptq", "checkpoint_format": form}
    )
    assert_factors(model, expected)
    assert_ranges(model)
    assert f"GPTQ INT{bits} x 1x32" in set(gp.open_checkpoint(model).describe()["dtype"])


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [32, 40])
def test_gptq_without_the_order_of_its_groups(size, symmetric, tmp_path):
    def pack(weight):
        stored, expected = gptq(4, size, symmetric=symmetric)(weight)
        del stored["g_idx"]
        return stored, expected

    model, expected = packed_model(tmp_path / "m", pack, {"quant_method": "gptq", "group_size": size, "sym": symmetric})
    assert_factors(model, expected)


def test_gptq_in_the_wrong_form_is_noticed_where_it_can_be(tmp_path):
    """A zero point one off, which nothing but symmetry gives away."""
    model, _ = packed_model(
        tmp_path / "m",
        gptq(form="gptq_v2", symmetric=True),
        {"quant_method": "gptq", "checkpoint_format": "gptq", "sym": True},
    )
    with pytest.raises(QuantizedWeights, match=r"is symmetric by the config, but .*qzeros' in the format 'gptq'"):
        gp.open_checkpoint(model).layer(0)


def test_gptq_zero_points_that_overflowed(tmp_path):
    def pack(weight):
        stored, expected = gptq(form="gptq_v2")(weight)
        return stored | {"qzeros": torch.full_like(stored["qzeros"], -1)}, expected

    model, _ = packed_model(tmp_path / "m", pack, {"quant_method": "gptq"})
    with pytest.raises(QuantizedWeights, match="overflowed"):
        gp.open_checkpoint(model).layer(0)


def test_gptq_groups_that_are_not_there(tmp_path):
    def pack(weight):
        stored, expected = gptq()(weight)
        return stored | {"g_idx": stored["g_idx"] + 1}, expected

    model, _ = packed_model(tmp_path / "m", pack, {"quant_method": "gptq"})
    with pytest.raises(QuantizedWeights, match="groups that are not there"):
        gp.open_checkpoint(model).layer(0)


def test_gptq_in_the_order_of_activations_needs_that_order(tmp_path):
    def pack(weight):
        stored, expected = gptq(act_order=True)(weight)
        del stored["g_idx"]
        return stored, expected

    settings = {"quant_method": "gptq", "group_size": 32, "desc_act": True}
    model, _ = packed_model(tmp_path / "m", pack, settings)
    with pytest.raises(IncompleteTriple, match=r"down_proj\.g_idx', without which .*qweight' means nothing"):
        gp.open_checkpoint(model)


def test_gptq_in_one_group_needs_no_order(tmp_path):
    def pack(weight):
        stored, expected = gptq(size=WHOLE)(weight)
        del stored["g_idx"]
        return stored, expected

    settings = {"quant_method": "gptq", "group_size": -1, "desc_act": True}
    model, expected = packed_model(tmp_path / "m", pack, settings)
    assert_factors(model, expected)


def test_gptq_groups_without_inputs(tmp_path):
    def pack(weight):
        stored, expected = gptq()(weight)
        return stored | {"g_idx": torch.zeros_like(stored["g_idx"])}, expected

    model, _ = packed_model(tmp_path / "m", pack, {"quant_method": "gptq"})
    with pytest.raises(QuantizedWeights, match=r"has 2 groups of inputs, of which .*gate_proj\.g_idx' leaves some"):
        gp.open_checkpoint(model).layer(0)


@pytest.mark.parametrize("size", [32, 40])
def test_awq(size, tmp_path):
    settings = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"}
    model, expected = packed_model(tmp_path / "m", awq(size), settings)
    assert_factors(model, expected)
    assert_ranges(model)
    assert list(gp.open_checkpoint(model).describe()["dtype"]) == [f"AWQ INT4 x 1x{size}", "F32"]


def test_awq_whose_groups_the_config_does_not_say(tmp_path):
    model, _ = packed_model(tmp_path / "m", awq(), {"quant_method": "awq"})
    with pytest.raises(ShapeMismatch, match="by the config's group_size, which is None"):
        gp.open_checkpoint(model)


DAMAGED = {
    "qzeros": (torch.zeros(2, 5, dtype=torch.int32), ShapeMismatch, r"qzeros' is \[2, 5\]"),
    "scales": (torch.ones(2, 7, dtype=torch.float16), ShapeMismatch, r"(scales|qzeros)' is \["),
    "qweight": (torch.zeros(8, 5), QuantizedWeights, "not words of 32 bits"),
}


@pytest.mark.parametrize("part", DAMAGED)
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_parts_that_do_not_fit(part, method, tmp_path):
    tensor, kind, words = DAMAGED[part]

    def pack(weight):
        stored, expected = (gptq() if method == "gptq" else awq())(weight)
        return stored | {part: tensor.clone()}, expected

    model, _ = packed_model(tmp_path / "m", pack, {"quant_method": method})
    with pytest.raises(kind, match=words):
        gp.open_checkpoint(model)


@pytest.mark.parametrize("part", ["qzeros", "scales"])
def test_parts_that_are_missing(part, tmp_path):
    def pack(weight):
        stored, expected = gptq()(weight)
        del stored[part]
        return stored, expected

    model, _ = packed_model(tmp_path / "m", pack, {"quant_method": "gptq"})
    with pytest.raises(
        IncompleteTriple, match=rf"down_proj\.{part}', without which .*down_proj\.qweight' means nothing"
    ):
        gp.open_checkpoint(model)


FORMS = {
    "gptq marlin": ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "in the format 'marlin'"),
    "awq gemv": ({"quant_method": "awq", "version": "gemv"}, "in the version 'gemv'"),
    "awq without zero points": ({"quant_method": "awq", "zero_point": False}, "without zero points"),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_that_are_not_decoded(form, tmp_path):
    quantization, words = FORMS[form]
    pack = awq() if quantization["quant_method"] == "awq" else gptq()
    model, _ = packed_model(tmp_path / "m", pack, quantization)
    with pytest.raises(QuantizedWeights, match=words):
        gp.open_checkpoint(model)


@pytest.mark.parametrize("pack", [gptq(), awq()])
def test_which_of_both_it_is_the_config_says(pack, tmp_path):
    model, _ = packed_model(tmp_path / "m", pack, None)
    with pytest.raises(
        QuantizedWeights, match=r"packed by GPTQ or AWQ: .*quantization_config says how is not beside it"
    ):
        gp.open_checkpoint(model)


# -- schemes that are not decoded ----------------------------------------------------------------


INTS = torch.ones(24, 16, dtype=torch.int8)
UNKNOWN = {
    "hqq": ({"W_q": INTS.view(torch.uint8), "meta": torch.ones(3)}, "HQQ"),
    "aqlm": ({"codes": INTS, "codebooks": torch.ones(3, 3), "scales": torch.ones(3)}, "AQLM"),
    "eetq": ({"weight": INTS, "weight_scales": torch.ones(24)}, "EETQ"),
    "quanto": ({"weight._data": INTS, "weight._scale": torch.ones(24, 1)}, "quanto"),
    "torchao": ({"_weight_qdata": INTS, "_weight_scale": torch.ones(24, 1)}, "torchao"),
    "spqr": ({"dense_weights": INTS, "row_offsets": INTS}, "SpQR"),
    "vptq": ({"centroids.weight": torch.ones(3, 3), "indices": INTS}, "VPTQ"),
    "higgs": ({"weight": INTS, "scales": torch.ones(3), "tables": torch.ones(3), "tables2": torch.ones(3)}, "HIGGS"),
    "fp_quant": ({"qweight": INTS, "scales": INTS, "dqweight": torch.ones(3)}, "FP-Quant"),
    "quark": ({"weight": INTS, "weight_scale": torch.ones(1)}, "a scheme"),
    "modelopt": (
        {"weight": INTS.view(torch.uint8), "weight_scale": torch.ones(1), "weight_scale_2": torch.ones(1)},
        "NVFP4",
    ),
}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("method", UNKNOWN)
def test_other_schemes_are_refused_by_name(method, named, tmp_path):
    """By what the config calls them, and without a config by what their tensors are called."""
    stored, words = UNKNOWN[method]
    model, _ = packed_model(
        tmp_path / "m",
        lambda w: ({k: v.clone() for k, v in stored.items()}, w),
        {"quant_method": method} if named else None,
    )
    with pytest.raises(QuantizedWeights, match=f"packed by {method if named else words}.*down_proj'"):
        gp.open_checkpoint(model)


def test_what_another_scheme_calls_the_same_is_not_taken_for_known(tmp_path):
    """FP8 weights of a scheme that may mean something else by them."""
    model, _ = packed_model(tmp_path / "m", fp8(WHOLE, WHOLE, "weight_scale"), {"quant_method": "newquant"})
    with pytest.raises(QuantizedWeights, match="packed by newquant"):
        gp.open_checkpoint(model)


def test_a_weight_that_is_there_packed_and_plain(tmp_path):
    model, _ = packed_model(tmp_path / "m", lambda w: (gptq()(w)[0] | {"weight": w}, w), {"quant_method": "gptq"})
    with pytest.raises(
        QuantizedWeights, match=r"is stored packed, and 'model\.layers\.0\.mlp\.down_proj\.weight' is there too"
    ):
        gp.open_checkpoint(model)


def test_plain_files_are_read_as_ever(tmp_path):
    config = llama_config(num_hidden_layers=2, quantization_config={"quant_method": "gptq"})
    model = write_checkpoint(tmp_path / "m", llama_tensors(layers=2), config)
    plain = llama_tensors(layers=2)
    layer = gp.open_checkpoint(model, fold_norm=False).layer(0)
    assert torch.equal(layer.query, plain[f"{STEM}{MODULES[0]}.weight"])
