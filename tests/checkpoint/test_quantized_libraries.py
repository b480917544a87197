"""Schemes that a library owns: what it packs is read as that library itself unpacks it."""

from __future__ import annotations

import sys

import pytest
import torch

import glu_probe as gp
from glu_probe.checkpoint.quantized import libraries
from glu_probe.cli import main
from glu_probe.errors import IncompleteTriple, MissingLibrary, QuantizedWeights, ShapeMismatch

from .packing import assert_factors, assert_ranges, awq, packed_model

# -- bitsandbytes --------------------------------------------------------------------------------


@pytest.fixture
def bnb():
    return libraries.bitsandbytes("a test")


BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
FOUR_BITS = {
    "nf4": {"quant_type": "nf4"},
    "fp4": {"quant_type": "fp4"},
    "nf4, scales packed too": {"quant_type": "nf4", "compress_statistics": True},
    "fp4 in larger blocks": {"quant_type": "fp4", "blocksize": 128},
    "blocks that do not divide the whole": {"quant_type": "nf4", "blocksize": 4096},
    "kept as bfloat16": {"quant_type": "nf4", "quant_storage": torch.bfloat16},
}


def four_bits(bnb, dtype=torch.bfloat16, **settings):
    """A weight as `Linear4bit` saves it, and as the library unpacks it when it is given it as one long row.

    Given a matrix whose rows are no whole number of blocks, its kernel for processors (0.50) starts every row with a new
    block, although it packed the matrix as one long row: what it then gives is far from the weight.
    """

    def pack(weight):
        packed, state = bnb.quantize_4bit(weight.to(dtype), **settings)
        parts = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
        shape, state.shape = state.shape, torch.Size((weight.numel(),))
        whole = bnb.dequantize_4bit(packed, state).reshape(shape)
        assert (whole.float() - weight).abs().mean() < 0.2 * weight.abs().mean()
        return {"weight": packed, **parts}, whole

    return pack


@pytest.mark.parametrize("form", FOUR_BITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_4_bits_of_bitsandbytes(form, dtype, bnb, tmp_path):
    model, expected = packed_model(tmp_path / "m", four_bits(bnb, dtype, **FOUR_BITS[form]), BNB)
    assert_factors(model, expected)
    assert_ranges(model)
    kind = FOUR_BITS[form]["quant_type"].upper()
    assert list(gp.open_checkpoint(model).describe()["dtype"]) == [f"bitsandbytes {kind}", "F32"]


def test_enough_blocks_for_their_scales_to_be_several_blocks(bnb, tmp_path):
    sizes = {"d_model": 200, "d_mlp": 312}
    pack = four_bits(bnb, quant_type="nf4", compress_statistics=True)
    model, expected = packed_model(tmp_path / "m", pack, None, **sizes)
    assert_factors(model, expected, **sizes)
    assert_ranges(model)


def test_a_whole_layer_as_transformers_saves_it(bnb, tmp_path):
    """`save_pretrained` of a model quantised by transformers, and `dequantize` of the same model."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=32,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["model.layers.1.mlp", "lm_head"]
    )
    quantised = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=settings, device_map="cpu")
    quantised.save_pretrained(tmp_path / "m")
    mlp = quantised.model.layers[0].mlp
    layer = gp.open_checkpoint(tmp_path / "m", fold_norm=False).layer(0)
    for module, found in ((mlp.gate_proj, layer.query), (mlp.up_proj, layer.key), (mlp.down_proj, layer.value.T)):
        theirs = bnb.dequantize_4bit(module.weight.data, module.weight.quant_state)
        assert torch.equal(found, theirs.float())
    plain = quantised.model.layers[1].mlp.gate_proj.weight
    assert torch.equal(gp.open_checkpoint(tmp_path / "m", fold_norm=False).layer(1).query, plain.float())


@pytest.mark.parametrize("written", [b"{}", b"no JSON", b'{"quant_type": "nf5"}'])
def test_a_state_that_is_not_known(written, bnb, tmp_path):
    def pack(weight):
        stored, expected = four_bits(bnb, quant_type="nf4")(weight)
        stored["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(written), dtype=torch.uint8)
        return stored, expected

    model, _ = packed_model(tmp_path / "m", pack, BNB)
    with pytest.raises(QuantizedWeights, match=r"down_proj\.weight' is packed by bitsandbytes, and .*does not say how"):
        gp.open_checkpoint(model)


def test_fewer_scales_than_blocks(bnb, tmp_path):
    def pack(weight):
        stored, expected = four_bits(bnb, quant_type="nf4")(weight)
        return stored | {"weight.absmax": torch.ones(5)}, expected

    model, _ = packed_model(tmp_path / "m", pack, BNB)
    with pytest.raises(ShapeMismatch, match=r"down_proj\.weight\.absmax' is \[5\]"):
        gp.open_checkpoint(model)


def test_a_block_of_almost_nothing_among_others(bnb, tmp_path):
    """Its scale, itself rounded, may come out below zero."""

    def pack(weight):
        weight[:1] *= 1e-4
        return four_bits(bnb, quant_type="nf4", compress_statistics=True)(weight)

    model, expected = packed_model(tmp_path / "m", pack, BNB)
    assert_factors(model, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_scales_of_blocks_that_no_quantiser_writes(value, bnb, tmp_path):
    def pack(weight):
        stored, expected = four_bits(bnb, quant_type="nf4")(weight)
        stored["weight.absmax"][-1] = value
        return stored, expected

    model, _ = packed_model(tmp_path / "m", pack, BNB)
    with pytest.raises(QuantizedWeights, match=r"gate_proj\.weight' has .* scale, in .*gate_proj\.weight\.absmax'"):
        gp.open_checkpoint(model).layer(0)


@pytest.mark.parametrize("described", [True, False])
def test_8_bits_of_bitsandbytes(described, bnb, tmp_path):
    """No library is needed for these."""

    def pack(weight):
        values, scales, _ = bnb.int8_vectorwise_quant(weight.half())
        layout = {"weight_format": torch.tensor(0, dtype=torch.uint8)} if described else {}
        return {"weight": values, "SCB": scales} | layout, bnb.int8_vectorwise_dequant(values, scales)

    model, expected = packed_model(tmp_path / "m", pack, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    assert_factors(model, expected)
    assert_ranges(model)


def test_8_bits_in_the_layout_of_a_gpu(bnb, tmp_path):
    def pack(weight):
        values, scales, _ = bnb.int8_vectorwise_quant(weight.half())
        return {"weight": values, "SCB": scales, "weight_format": torch.tensor(2, dtype=torch.uint8)}, weight

    model, _ = packed_model(tmp_path / "m", pack, BNB)
    with pytest.raises(QuantizedWeights, match="laid out for a GPU"):
        gp.open_checkpoint(model).layer(0)


# -- compressed-tensors --------------------------------------------------------------------------


def compressed(settings: dict, scheme: str):
    """A weight as the library's own compressor packs it, and as its decompressor unpacks it."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    arguments = QuantizationArgs(**settings)
    how = QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor = BaseCompressor.get_value_from_registry(scheme)

    def pack(weight):
        weight = weight.to(torch.bfloat16)
        with torch.compiler.set_stance("force_eager"):
            stored = compressor.compress({"weight": weight} | observe(weight, arguments), how)
        whole = compressor.decompress(dict(stored), how)["weight"]
        return {name: tensor.detach().clone() for name, tensor in stored.items()}, whole.detach()

    return pack


def observe(weight, arguments):
    """Scales (and zero points) from the smallest and largest values, by the library."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    size = arguments.group_size
    if arguments.strategy == "tensor":
        groups = weight.reshape(1, -1)
    elif arguments.strategy == "channel":
        groups = weight
    elif arguments.strategy == "block":
        rows, columns = arguments.block_structure
        height, width = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        padded = torch.nn.functional.pad(
            weight, (0, width * columns - weight.shape[1], 0, height * rows - weight.shape[0])
        )
        groups = padded.reshape(height, rows, width, columns).transpose(1, 2).flatten(-2)
    else:
        groups = weight.unflatten(-1, (-1, size))
    low, high = groups.amin(-1), groups.amax(-1)
    extra = {}
    if arguments.strategy == "tensor_group":
        extra["weight_global_scale"] = generate_gparam(weight.amin(), weight.amax())
    scale, zero = calculate_qparams(low, high, arguments, global_scale=extra.get("weight_global_scale"))
    if arguments.strategy == "channel":
        scale, zero = scale.reshape(-1, 1), zero.reshape(-1, 1)
    return extra | {"weight_scale": scale} | ({} if arguments.symmetric else {"weight_zero_point": zero})


def group(settings: dict, form: str) -> dict:
    """The config that goes with it."""
    scheme = {"targets": ["Linear"], "weights": settings, "format": form}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": scheme}}


PACKED = {
    "4 bits in groups": ({"num_bits": 4, "group_size": 32, "strategy": "group"}, "pack-quantized", "INT4 x 1x32 scale"),
    "4 bits in groups, with zero points": (
        {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": False},
        "pack-quantized",
        "INT4 x 1x32 scale and zero point",
    ),
    "4 bits by row": ({"num_bits": 4, "strategy": "channel"}, "pack-quantized", "INT4 x row scale"),
    "8 bits by row": ({"num_bits": 8, "strategy": "channel"}, "pack-quantized", "INT8 x row scale"),
    "8 bits by row, with zero points": (
        {"num_bits": 8, "strategy": "channel", "symmetric": False},
        "pack-quantized",
        "INT8 x row scale and zero point",
    ),
    "2 bits in groups": ({"num_bits": 2, "group_size": 16, "strategy": "group"}, "pack-quantized", "INT2 x 1x16 scale"),
    "int8": ({"num_bits": 8, "strategy": "channel"}, "int-quantized", "I8 x row scale"),
    "int8 with zero points": (
        {"num_bits": 8, "strategy": "channel", "symmetric": False},
        "int-quantized",
        "I8 x row scale and zero point",
    ),
    "int8 for the whole": ({"num_bits": 8, "strategy": "tensor"}, "int-quantized", "I8 x tensor scale"),
    "FP8 by row": ({"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized", "F8_E4M3 x row scale"),
    "FP8 for the whole": (
        {"num_bits": 8, "type": "float", "strategy": "tensor"},
        "float-quantized",
        "F8_E4M3 x tensor scale",
    ),
    "FP8 in ragged blocks": (
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [40, 48]},
        "naive-quantized",
        "F8_E4M3 x 40x48 scale",
    ),
    "NVFP4": (
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        "nvfp4-pack-quantized",
        "NVFP4",
    ),
    "MXFP4": ({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, "mxfp4-pack-quantized", "MXFP4"),
    "MXFP8": (
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32},
        "mxfp8-quantized",
        "F8_E4M3 x 1x32 scale",
    ),
}


@pytest.mark.parametrize("form", PACKED)
def test_compressed_tensors(form, tmp_path):
    settings, scheme, words = PACKED[form]
    model, expected = packed_model(tmp_path / "m", compressed(settings, scheme), group(settings, scheme))
    assert_factors(model, expected)
    assert_ranges(model)
    assert words in set(gp.open_checkpoint(model).describe()["dtype"])


def test_columns_in_the_order_of_their_activations(tmp_path):
    """Groups of columns that do not lie together: each column has the scale of the group that X.weight_g_idx names."""
    settings = {"num_bits": 4, "group_size": 32, "strategy": "group"}

    def pack(weight):
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

        generator = torch.Generator().manual_seed(0)
        height, width = weight.shape
        values = torch.randint(-8, 8, (height, width), generator=generator, dtype=torch.int8)
        scale = torch.rand(height, width // 32, generator=generator) + 0.1
        order = (torch.arange(width) // 32)[torch.randperm(width, generator=generator)].int()
        stored = {
            "weight_packed": pack_to_int32(values, 4), "weight_scale": scale, "weight_g_idx": order,
            "weight_shape": torch.tensor(weight.shape),
        }  # fmt: skip
        return stored, values.float() * scale[:, order.long()]

    model, expected = packed_model(tmp_path / "m", pack, group(settings, "pack-quantized"))
    assert_factors(model, expected)
    assert_ranges(model)


def test_an_order_that_is_not_used(tmp_path):
    settings, scheme, _ = PACKED["4 bits in groups"]

    def pack(weight):
        stored, expected = compressed(settings, scheme)(weight)
        return stored | {"weight_g_idx": torch.full((weight.shape[1],), -1, dtype=torch.int32)}, expected

    model, expected = packed_model(tmp_path / "m", pack, group(settings, scheme))
    assert_factors(model, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("form", ["4 bits in groups", "4 bits in groups, with zero points", "8 bits by row", "int8"])
def test_scales_that_no_quantiser_writes(form, value, tmp_path):
    settings, scheme, _ = PACKED[form]

    def pack(weight):
        stored, expected = compressed(settings, scheme)(weight)
        stored["weight_scale"][-1, -1] = value
        return stored, expected

    model, _ = packed_model(tmp_path / "m", pack, group(settings, scheme))
    with pytest.raises(QuantizedWeights, match=r"gate_proj\.weight.* scale.*gate_proj\.weight_scale'"):
        gp.open_checkpoint(model).layer(0)


@pytest.mark.parametrize(("form", "part", "value"), [
    ("NVFP4", "weight_scale", float("nan")), ("NVFP4", "weight_global_scale", 0), ("MXFP4", "weight_scale", 255),
    ("MXFP8", "weight_scale", 255),
])  # fmt: skip
def test_scales_of_floats_that_no_quantiser_writes(form, part, value, tmp_path):
    settings, scheme, _ = PACKED[form]

    def pack(weight):
        stored, expected = compressed(settings, scheme)(weight)
        stored[part].view(-1)[-1] = value
        return stored, expected

    model, _ = packed_model(tmp_path / "m", pack, group(settings, scheme))
    with pytest.raises(QuantizedWeights, match=rf"gate_proj\.weight.*scale.*gate_proj\.{part}'"):
        gp.open_checkpoint(model).layer(0)


def several(*groups: tuple[dict, list[str]]) -> dict:
    found = {str(i): {"weights": weights, "targets": targets} for i, (weights, targets) in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": found}


BY_ROW = {"num_bits": 4, "strategy": "channel"}
EIGHT = {"num_bits": 8, "strategy": "channel"}


def test_groups_with_different_numbers_of_bits(tmp_path):
    """A scale for every row does not tell how many bits there are: the targets do."""
    pack = compressed(BY_ROW, "pack-quantized")
    settings = several((BY_ROW, [r"re:.*mlp\..*"]), (EIGHT, ["re:.*self_attn.*"]))
    model, expected = packed_model(tmp_path / "m", pack, settings)
    assert_factors(model, expected)
    model, _ = packed_model(tmp_path / "n", pack, several((BY_ROW, ["Linear"]), (EIGHT, ["Linear"])))
    with pytest.raises(QuantizedWeights, match="so its number of bits is not known"):
        gp.open_checkpoint(model)


def test_a_config_of_another_number_of_bits_is_noticed(tmp_path):
    model, _ = packed_model(tmp_path / "m", compressed(BY_ROW, "pack-quantized"), several((EIGHT, ["Linear"])))
    with pytest.raises((QuantizedWeights, ShapeMismatch)):
        gp.open_checkpoint(model).layer(0)


def test_packed_weights_without_a_config(tmp_path):
    settings, scheme, _ = PACKED["4 bits in groups"]
    model, _ = packed_model(tmp_path / "m", compressed(settings, scheme), None)
    with pytest.raises(
        QuantizedWeights, match=r"packed by compressed-tensors: .*quantization_config says how is not beside"
    ):
        gp.open_checkpoint(model)


@pytest.mark.parametrize("order", [0, 7])
def test_an_order_with_other_groups_than_there_are(order, tmp_path):
    settings, scheme, _ = PACKED["4 bits in groups"]

    def pack(weight):
        stored, expected = compressed(settings, scheme)(weight)
        return stored | {"weight_g_idx": torch.full((weight.shape[1],), order, dtype=torch.int32)}, expected

    model, _ = packed_model(tmp_path / "m", pack, group(settings, scheme))
    with pytest.raises(QuantizedWeights, match=r"has 2 groups of columns, and .*weight_g_idx' does not name just"):
        gp.open_checkpoint(model).layer(0)


HADAMARD = {"config_groups": {"R4": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}}}


@pytest.mark.parametrize("form", ["4 bits in groups", "int8", "FP8 by row", "MXFP4"])
def test_weights_that_belong_to_a_transform(form, tmp_path):
    settings, scheme, _ = PACKED[form]
    config = group(settings, scheme) | {"transform_config": HADAMARD}
    model, _ = packed_model(tmp_path / "m", compressed(settings, scheme), config)
    with pytest.raises(
        QuantizedWeights, match=r"down_proj\..*go through a transform \(hadamard\), by transform_config"
    ):
        gp.open_checkpoint(model)


def test_an_empty_transform_is_none(tmp_path):
    settings, scheme, _ = PACKED["int8"]
    config = group(settings, scheme) | {"transform_config": {}}
    model, expected = packed_model(tmp_path / "m", compressed(settings, scheme), config)
    assert_factors(model, expected)


def without(*left_out: str):
    """int8 weights with zero points, of which some parts are lost."""
    settings, scheme, _ = PACKED["int8 with zero points"]

    def pack(weight):
        stored, expected = compressed(settings, scheme)(weight)
        return {name: tensor for name, tensor in stored.items() if name not in left_out}, expected

    return pack, group(settings, scheme)


@pytest.mark.parametrize("part", ["weight_zero_point", "weight_scale"])
def test_int8_whose_parts_are_missing(part, tmp_path):
    model, _ = packed_model(tmp_path / "m", *without(part))
    with pytest.raises(
        IncompleteTriple, match=rf"down_proj\.{part}', without which .*down_proj\.weight' means nothing"
    ):
        gp.open_checkpoint(model)


def test_int8_without_zero_points_by_the_group_that_means_it(tmp_path):
    pack, _ = without("weight_zero_point")
    eight = {"num_bits": 8, "strategy": "channel"}
    ours = (eight, [r"re:.*mlp\..*"]), (eight | {"symmetric": False}, [r"re:.*self_attn.*"])
    assert gp.open_checkpoint(packed_model(tmp_path / "a", pack, several(*ours))[0]).layer(0).query.isfinite().all()
    unclear = (eight, ["Linear"]), (eight | {"symmetric": False}, ["Linear"])
    with pytest.raises(IncompleteTriple, match="weight_zero_point"):
        gp.open_checkpoint(packed_model(tmp_path / "b", pack, several(*unclear))[0])


def test_scales_of_channels_that_lie_along_the_columns(tmp_path):
    settings, scheme, _ = PACKED["FP8 by row"]

    def pack(weight):
        stored, expected = compressed(settings, scheme)(weight)
        return stored | {"weight_scale": torch.ones(1, weight.shape[1])}, expected

    model, _ = packed_model(tmp_path / "m", pack, group(settings, scheme))
    with pytest.raises(ShapeMismatch, match=r"weight_scale' is \[1, 96\], which is no grid of blocks"):
        gp.open_checkpoint(model)


LEFT_OVER = {
    "sparse": (
        {"compressed": torch.ones(3), "bitmask": torch.ones(3, dtype=torch.uint8), "shape": torch.ones(2).long()},
        "is a sparse weight without its zeros",
    ),
    "sparse, below weight": (
        {"weight.compressed": torch.ones(3), "weight.bitmask": torch.ones(3, dtype=torch.uint8)},
        r"is a sparse weight without its zeros \(sparse-24-bitmask\)",
    ),
    "floats with a scale": (
        {"weight": torch.ones(4, 4), "weight_scale": torch.ones(4, 1)},
        r"is F32 with .*weight_scale' beside it, and whether that is applied is not known",
    ),
    "16 bits": ({"weight": torch.ones(4, 4, dtype=torch.int16)}, "is of I16, which no known format"),
}


@pytest.mark.parametrize("form", LEFT_OVER)
def test_what_is_not_decoded_is_said_and_not_laid_on_a_missing_config(form, tmp_path):
    stored, words = LEFT_OVER[form]
    settings = group(EIGHT, "int-quantized") | {"sparsity_config": {"format": "sparse-24-bitmask"}}
    copies = {name: tensor.clone() for name, tensor in stored.items()}
    model, _ = packed_model(tmp_path / "m", lambda w: ({k: t.clone() for k, t in copies.items()}, w), settings)
    with pytest.raises(QuantizedWeights, match=words) as caught:
        gp.open_checkpoint(model)
    assert "Use the unquantised checkpoint" in str(caught.value)
    assert "not beside it" not in str(caught.value)


@pytest.mark.parametrize("size", [32])
def test_awq_as_compressed_tensors_converts_it(size, tmp_path):
    """An implementation of AWQ's packing that is not ours reads the same from our fixture."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    model, expected = packed_model(tmp_path / "m", awq(size), {"quant_method": "awq", "group_size": size})
    from safetensors.torch import load_file

    tensors = {name: tensor for name, tensor in load_file(model / "model.safetensors").items() if ".mlp." in name}
    converted = AutoAWQConverter(group_size=size).process(tensors)
    stem = "model.layers.0.mlp.gate_proj.weight_"
    shape = torch.Size(converted[f"{stem}shape"].tolist())
    values = unpack_from_int32(converted[f"{stem}packed"], 4, shape)
    scale = converted[f"{stem}scale"].float().repeat_interleave(size, 1)
    zeros = unpack_from_int32(converted[f"{stem}zero_point"], 4, torch.Size((shape[0], shape[1] // size)), packed_dim=0)
    theirs = ((values - zeros.repeat_interleave(size, 1)).float() * scale).half()
    assert torch.equal(theirs, expected["gate_proj"])
    assert_factors(model, expected)


# -- without them --------------------------------------------------------------------------------


@pytest.fixture
def nothing_installed(monkeypatch):
    """Neither library can be imported."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("bitsandbytes", "compressed_tensors")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)


def test_a_missing_library_is_named_with_the_line_that_installs_it(bnb, tmp_path, request, capsys):
    settings, scheme, _ = PACKED["4 bits in groups"]
    models = {
        "bitsandbytes": packed_model(tmp_path / "b", four_bits(bnb, quant_type="nf4"), BNB)[0],
        "compressed-tensors": packed_model(tmp_path / "c", compressed(settings, scheme), group(settings, scheme))[0],
    }
    request.getfixturevalue("nothing_installed")
    for library, model in models.items():
        assert len(gp.open_checkpoint(model).describe()) == 2  # looking needs no library
        with pytest.raises(MissingLibrary, match=rf'pip install "glu-probe\[{library}\]"') as caught:
            gp.open_checkpoint(model).layer(0)
        assert library in caught.value.what
        with pytest.raises(SystemExit) as stop:
            main(["report", str(model), "-o", str(tmp_path / "out")])
        assert stop.value.code == 3
        assert capsys.readouterr().err.count("pip install") == 1


def test_bitsandbytes_fetches_nothing_when_it_is_imported(monkeypatch):
    """Where the package `kernels` is there, its import would download code and load it."""
    fetched = []
    for name in [name for name in sys.modules if name.split(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    kernels = type(sys)("kernels")
    kernels.get_kernel = lambda *a, **k: fetched.append(a)
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    with libraries._nothing_fetched(), pytest.raises(ImportError):
        from kernels import get_kernel  # noqa: F401
    assert sys.modules["kernels"] is kernels
    assert not fetched
