"""How experts are stored, which way round, and which stack a layer belongs to: files written by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import glu_probe as gp
from glu_probe.checkpoint.family import Projections
from glu_probe.checkpoint.slabs import Evidence, cut
from glu_probe.checkpoint.source import TensorInfo
from glu_probe.checkpoint.towers import part_of
from glu_probe.cli import main
from glu_probe.errors import BadOption, LayoutAmbiguous, LayoutUnknown, NoExpertsMapped, ShapeMismatch
from glu_probe.testing import TrueMLP, write_tiny_checkpoint

from ..support import D_MLP, D_MODEL, llama_config, llama_tensors, write_checkpoint


def rewritten(path, change=None, **config) -> None:
    """A checkpoint with names or values changed, and keys of the config; None removes one."""
    if change is not None:
        save_file({k: v.contiguous() for k, v in change(load_file(path / "model.safetensors")).items()},
                  path / "model.safetensors")  # fmt: skip
    known = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps({k: v for k, v in known.items() if v is not None}))


def assert_raw(path, truth: list[TrueMLP], **options) -> None:
    """Assert that exactly these factors are read, in this order."""
    layers = list(gp.open_checkpoint(path, fold_norm=False, **options).layers())
    assert [(layer.layer, layer.expert) for layer in layers] == [(mlp.layer, mlp.expert) for mlp in truth]
    for layer, mlp in zip(layers, truth, strict=True):
        for name in ("query", "key", "value"):
            assert torch.equal(getattr(layer, name), getattr(mlp, name)), (layer, name)


# -- gpt-oss: gate and up take turns ---------------------------------------------------------------


def test_gpt_oss_s_columns_take_turns(tmp_path):
    columns = torch.arange(1.0, 49).repeat(3, 16, 1)
    tensors = {
        "model.layers.0.mlp.experts.gate_up_proj": columns,
        "model.layers.0.mlp.experts.gate_up_proj_bias": columns[:, 0],
        "model.layers.0.mlp.experts.down_proj": torch.ones(3, 24, 16),
        "model.layers.0.mlp.experts.down_proj_bias": torch.ones(3, 16),
    }
    config = {"model_type": "gpt_oss", "hidden_size": 16, "num_hidden_layers": 1, "num_local_experts": 3}
    checkpoint = gp.open_checkpoint(write_checkpoint(tmp_path, tensors, config), fold_norm=False)
    for layer in checkpoint.layers():
        assert layer.query[:, 0].tolist() == list(range(1, 48, 2))
        assert layer.key[:, 15].tolist() == list(range(2, 49, 2))
        assert layer.query_bias.tolist() == list(range(1, 48, 2))
        assert layer.key_bias.tolist() == list(range(2, 49, 2))
    assert set(checkpoint.describe()["layout"]) == {"interleaved, stacked, transposed"}


def test_gpt_oss_s_neuron(tmp_path):
    write_tiny_checkpoint("gpt_oss", tmp_path)
    rewritten(tmp_path, swiglu_limit=0.5)
    layer = gp.open_checkpoint(tmp_path, fold_norm=False).layer(0, 1)
    x = 2 * torch.randn(7, D_MODEL)
    a, b = layer.preactivations(x)
    a, b = a.clamp(max=0.5), b.clamp(-0.5, 0.5)
    assert torch.allclose(layer.coefficients(x), (b + 1) * a * torch.sigmoid(1.702 * a), atol=1e-6)
    assert "clamp(b, -0.5, 0.5) + 1" in layer.functional_note()


def test_a_report_of_neurons_that_are_not_linear_in_b(tmp_path):
    """Directions are there, functions are missing, and it can be saved and drawn."""
    write_tiny_checkpoint("gpt_oss", tmp_path / "m")
    report = gp.probe(tmp_path / "m", samples=2)
    assert report.neurons["abs_cos_qk"].notna().all()
    assert report.neurons["exchange_asymmetry"].isna().all()
    assert report.layers["group"].tolist() == ["routed", "routed"]
    assert report.layers["n_experts"].tolist() == [3, 3]
    assert report.layers["n_neurons"].tolist() == [3 * D_MLP, 3 * D_MLP]
    assert all("linear" in note for note in report.layers["note"])
    report.save(tmp_path / "out")


# -- which way round experts are stacked -----------------------------------------------------------

SQUARE = {"2 d_mlp = d_model": {"d_model": 16, "d_mlp": 8}, "d_mlp = d_model": {"d_model": 16, "d_mlp": 16}}


@pytest.mark.parametrize("storage", ["stacked", "stacked-transposed"])
def test_the_shape_decides_between_two_forms_of_one_name(storage, tmp_path):
    truth = write_tiny_checkpoint("qwen3_vl_moe", tmp_path, storage=storage)
    assert_raw(tmp_path, truth)


@pytest.mark.parametrize("sizes", SQUARE)
@pytest.mark.parametrize("storage", ["stacked", "stacked-transposed"])
def test_where_it_does_not_the_option_does(sizes, storage, tmp_path):
    truth = write_tiny_checkpoint("qwen3_vl_moe", tmp_path, storage=storage, **SQUARE[sizes])
    with pytest.raises(LayoutAmbiguous) as caught:
        gp.open_checkpoint(tmp_path)
    message = str(caught.value)
    assert "model.layers.0.mlp.experts." in message
    assert "in rows" in message
    assert "in columns" in message
    assert "--expert-layout rows" in message
    assert "--expert-layout columns" in message
    word = "rows" if storage == "stacked" else "columns"
    assert_raw(tmp_path, truth, expert_layout=word)
    other = "columns" if word == "rows" else "rows"
    with pytest.raises(ShapeMismatch, match=f"in {other}"):
        gp.open_checkpoint(tmp_path, expert_layout=other)


def test_one_axis_turned_alone_is_not_guessed(tmp_path):
    """What a tool makes of square tensors that it takes for the other form: gate and up turned, down not."""
    truth = write_tiny_checkpoint("qwen3_vl_moe", tmp_path, storage="stacked", d_model=16, d_mlp=16)
    rewritten(tmp_path, lambda tensors: {k: v.mT if k.endswith("gate_up_proj") else v for k, v in tensors.items()})
    with pytest.raises(LayoutAmbiguous):
        gp.open_checkpoint(tmp_path)
    assert truth


@pytest.mark.parametrize("sizes", SQUARE)
@pytest.mark.parametrize(
    "family", ["gpt_oss", "llama4_text", "aria_text", "qwen3_5_moe", "granitemoe", "gemma4_text", "jetmoe"]
)
def test_a_family_of_one_form_settles_square_tensors(family, sizes, tmp_path):
    options = {"storage": "stacked"} if family == "qwen3_5_moe" else {}
    options |= {"order": "gate-first"} if options else {}
    assert_raw(tmp_path, write_tiny_checkpoint(family, tmp_path, **options, **SQUARE[sizes]))


@pytest.mark.parametrize("storage", ["stacked", "stacked-transposed"])
def test_separate_names_stacked(storage, tmp_path):
    """By the width that the config says; without one by the norms of the layer."""
    truth = write_tiny_checkpoint("qwen3_moe", tmp_path, storage=storage)
    assert_raw(tmp_path, truth)
    rewritten(tmp_path, hidden_size=None)
    assert_raw(tmp_path, truth)
    rewritten(tmp_path, model_type="newcomer")
    assert_raw(tmp_path, truth)


def test_separate_names_without_a_width(tmp_path):
    truth = write_tiny_checkpoint("qwen3_moe", tmp_path, storage="stacked")
    rewritten(
        tmp_path,
        lambda tensors: {k: v for k, v in tensors.items() if "norm" not in k},
        hidden_size=None,
        model_type="new",
    )
    with pytest.raises(LayoutAmbiguous, match=r"d_model 16 and d_mlp 24 .* or d_model 24 and d_mlp 16"):
        gp.open_checkpoint(tmp_path)
    assert_raw(tmp_path, truth, expert_layout="rows")


def test_the_option_on_the_command_line(tmp_path, capsys):
    write_tiny_checkpoint("qwen3_vl_moe", tmp_path, d_model=16, d_mlp=16)
    with pytest.raises(SystemExit) as stop:
        main(["inspect", str(tmp_path)])
    assert stop.value.code == 3
    assert "LayoutAmbiguous" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["inspect", str(tmp_path), "--expert-layout", "rows", "--json"])
    assert stop.value.code == 0
    described = json.loads(capsys.readouterr().out)
    assert described["options"]["expert_layout"] == "rows"
    assert {mlp["layout"] for mlp in described["mlps"]} == {"gate-first, stacked"}


def test_an_option_that_is_none(llama):
    with pytest.raises(BadOption, match="rows, columns"):
        gp.open_checkpoint(llama, expert_layout="diagonal")


def test_stacks_of_different_numbers(tmp_path):
    write_tiny_checkpoint("qwen3_vl_moe", tmp_path)
    rewritten(tmp_path, lambda tensors: {k: v[:2] if "down" in k else v for k, v in tensors.items()})
    with pytest.raises(ShapeMismatch, match="gate_up_proj"):
        gp.open_checkpoint(tmp_path)


def test_a_config_of_another_width(tmp_path):
    write_tiny_checkpoint("granitemoe", tmp_path)
    rewritten(tmp_path, hidden_size=20)
    with pytest.raises(ShapeMismatch, match="d_model 20"):
        gp.open_checkpoint(tmp_path)


def test_fewer_experts_than_the_config_says(tmp_path):
    write_tiny_checkpoint("granitemoe", tmp_path)
    rewritten(tmp_path, num_local_experts=5)
    with pytest.raises(gp.errors.IncompleteTriple, match="experts 3, 4 are missing"):
        gp.open_checkpoint(tmp_path)


# -- experts below each other ----------------------------------------------------------------------


def test_dbrx_s_values_are_rows(tmp_path):
    truth = write_tiny_checkpoint("dbrx", tmp_path)
    assert_raw(tmp_path, truth)
    stored = load_file(tmp_path / "model.safetensors")["transformer.blocks.1.ffn.experts.mlp.w2"]
    assert torch.equal(gp.open_checkpoint(tmp_path).layer(1, 2).value, stored[48:72])


def test_dbrx_without_a_number_of_experts(tmp_path):
    write_tiny_checkpoint("dbrx", tmp_path)
    rewritten(tmp_path, ffn_config={"ffn_act_fn": {"name": "silu"}})
    with pytest.raises(NoExpertsMapped, match="does not say how many"):
        gp.open_checkpoint(tmp_path)


def test_dbrx_with_a_number_that_does_not_divide(tmp_path):
    write_tiny_checkpoint("dbrx", tmp_path)
    rewritten(tmp_path, ffn_config={"moe_num_experts": 5})
    with pytest.raises(ShapeMismatch, match="not 5 experts"):
        gp.open_checkpoint(tmp_path)


# -- what is read --------------------------------------------------------------------------------------


class CountedSource:
    """Counts how much of a tensor is asked for at once."""

    def __init__(self, source) -> None:
        self.source, self.largest, self.total = source, 0, 0

    def infos(self):
        return self.source.infos()

    def read(self, name, rows=None):
        out = self.source.read(name, rows)
        self.largest = max(self.largest, out.numel())
        self.total += out.numel()
        return out


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "gpt_oss", "dbrx", "step3p7"])
def test_one_expert_is_read_at_a_time(family, tmp_path):
    write_tiny_checkpoint(family, tmp_path, experts=5)
    checkpoint = gp.open_checkpoint(tmp_path, fold_norm=False)
    counted = checkpoint._reader._source = CountedSource(checkpoint._reader._source)
    checkpoint.layer(1, 3)
    assert counted.largest <= 2 * D_MLP * D_MODEL
    biases = 2 * D_MLP + D_MODEL + 2 * D_MLP if family == "gpt_oss" else 0
    assert counted.total <= 3 * D_MLP * D_MODEL + biases
    described = checkpoint.describe().query("layer == 1 and expert == '3'")["bytes"].item()
    assert 4 * 3 * D_MLP * D_MODEL <= described <= 4 * counted.total


def test_a_run_reads_the_file_once(tmp_path):
    """The bytes that are announced are those of the weights and norms, not of every expert's whole tensor."""
    write_tiny_checkpoint("phi3", tmp_path)
    weights = sum(t.numel() * 4 for name, t in load_file(tmp_path / "model.safetensors").items())
    assert gp.open_checkpoint(tmp_path).describe()["bytes"].sum() == weights


@pytest.mark.parametrize("fused", ["gate-first", "up-first", "interleaved"])
@pytest.mark.parametrize("stored", ["rows", "columns"])
def test_slabs_name_every_neuron_once(fused, stored):
    shapes = {"both": (10, 4), "down": (4, 5)}
    if stored == "columns":
        shapes = {name: shape[::-1] for name, shape in shapes.items()}
    infos = {name: TensorInfo(name, "F32", shape, 4, "f") for name, shape in shapes.items()}
    names = Projections("both", "both", "down", fused, stored)
    (one,) = cut(names, {"gate": "both", "up": "both", "down": "down"}, infos, Evidence())
    gate, up = (list(range(10))[one.slabs[role].picked] for role in ("gate", "up"))
    assert sorted(gate + up) == list(range(10))
    assert (one.d_mlp, one.d_model) == (5, 4)
    assert one.slabs["gate"].columns == (stored == "columns") != one.slabs["down"].columns


# -- groups ----------------------------------------------------------------------------------------------


def test_groups_of_a_layer(tmp_path):
    write_tiny_checkpoint("deepseek_v3", tmp_path, layers=3)
    report = gp.probe(tmp_path, samples=2)
    rows = report.layers[["layer", "group", "n_experts", "n_neurons"]].to_numpy().tolist()
    assert rows == [
        [0, "dense", 0, 24], [1, "routed", 3, 72], [1, "shared", 0, 24], [2, "routed", 3, 72], [2, "shared", 0, 24],
    ]  # fmt: skip
    experts = report.neurons.groupby("layer")["expert"].unique()
    assert experts[1].tolist() == ["0", "1", "2", "shared"]
    assert pd.isna(experts[0]).all()


def test_several_dense_mlps_of_a_layer(tmp_path):
    truth = write_tiny_checkpoint("longcat_flash", tmp_path)
    report = gp.probe(tmp_path, samples=2)
    assert report.layers["group"].tolist() == ["dense", "routed"] * 2
    assert report.layers["n_neurons"].tolist() == [48, 72] * 2
    assert set(report.neurons.query("layer == 0")["expert"]) == {"mlps.0", "mlps.1", "0", "1", "2"}
    second = gp.open_checkpoint(tmp_path).layer(0, "mlps.1")
    mine = next(mlp for mlp in truth if mlp.expert == "mlps.1")
    assert torch.allclose(second.query, mine.query * mine.gain)
    assert second.functional_note() is None


def test_several_shared_experts(tmp_path):
    """Stacked, or with numbers of their own."""
    write_tiny_checkpoint("qwen2_moe", tmp_path)
    stacked = torch.arange(2.0)[:, None, None].expand(2, D_MLP, D_MODEL) + 1

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = {k: v for k, v in tensors.items() if "shared_expert" not in k}
        for layer in range(2):
            stem = f"model.layers.{layer}.mlp.shared_experts."
            kept |= {f"{stem}gate_proj.weight": stacked + 0, f"{stem}up_proj.weight": -stacked}
            kept |= {f"{stem}down_proj.weight": stacked.mT + 0}
        return kept

    rewritten(tmp_path, change)
    checkpoint = gp.open_checkpoint(tmp_path, fold_norm=False)
    assert [site.expert for site in checkpoint.sites][:5] == [0, 1, 2, "shared.0", "shared.1"]
    assert checkpoint.layer(0, "shared.1").query.unique().tolist() == [2.0]
    assert checkpoint.layer(0, "shared.1").group == "shared"


def test_experts_that_write_what_they_read(tmp_path):
    """Transformers saves gate and up of LongCat's identity experts, which nothing runs."""
    truth = write_tiny_checkpoint("longcat_flash", tmp_path)
    idle = {
        f"model.layers.0.mlp.experts.{n}.{p}_proj.weight": torch.ones(D_MLP, D_MODEL)
        for n in (3, 4)
        for p in ("gate", "up")
    }
    rewritten(tmp_path, lambda tensors: tensors | idle, zero_expert_num=2)
    assert_raw(tmp_path, truth)
    assert any("2 experts of a layer write what they read" in note for note in gp.open_checkpoint(tmp_path).notes)


def test_a_gated_mlp_outside_the_layers_is_noted(tmp_path):
    tensors = llama_tensors(layers=1)
    merger = {n.replace("model.layers.0.mlp", "visual.merger"): t.clone() for n, t in tensors.items() if ".mlp." in n}
    checkpoint = gp.open_checkpoint(
        write_checkpoint(tmp_path / "a", tensors | merger, llama_config(num_hidden_layers=1))
    )
    assert any("outside the layers were left out: visual.merger" in note for note in checkpoint.notes)
    with pytest.raises(LayoutUnknown, match=r"visual\.merger stand outside"):
        gp.open_checkpoint(write_checkpoint(tmp_path / "b", merger, llama_config()))


# -- stacks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["numbered on", "apart"])
def test_layers_for_further_tokens_are_a_tower_of_their_own(form, tmp_path):
    truth = write_tiny_checkpoint("deepseek_v3", tmp_path, layers=3)

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if form == "numbered on":
            return tensors | {"model.layers.2.eh_proj.weight": torch.ones(D_MODEL, 2 * D_MODEL)}
        return {k.replace("model.layers.2.", "mtp.layers.0."): v for k, v in tensors.items()}

    rewritten(tmp_path, change, num_hidden_layers=2)
    checkpoint = gp.open_checkpoint(tmp_path)
    last = 2 if form == "numbered on" else 0
    assert checkpoint.layers_present == {"text": [0, 1], "mtp": [last]}
    assert {site.layer for site in checkpoint.sites if site.tower == "mtp"} == {last}
    assert not any("layers, but the file has" in note for note in checkpoint.notes)
    mine = next(mlp for mlp in truth if (mlp.layer, mlp.expert) == (2, 1))
    layer = checkpoint.layer(last, 1, tower="mtp")
    assert torch.allclose(layer.query, mine.query * mine.gain)
    assert layer.functional_note() is None
    assert set(gp.probe(checkpoint, towers=["text"], samples=2).layers["tower"]) == {"text"}


def test_a_layer_too_many_is_no_tower(tmp_path):
    """Without the parts that only a layer for further tokens has."""
    write_tiny_checkpoint("deepseek_v3", tmp_path, layers=3)
    rewritten(tmp_path, num_hidden_layers=2)
    checkpoint = gp.open_checkpoint(tmp_path)
    assert checkpoint.layers_present == {"text": [0, 1, 2]}
    assert any("the config says 2 layers, but the file has 3" in note for note in checkpoint.notes)


def test_encoder_and_decoder_are_apart_and_can_be_chosen(tmp_path):
    write_tiny_checkpoint("t5", tmp_path)
    checkpoint = gp.open_checkpoint(tmp_path)
    assert checkpoint.layers_present == {"text": [0, 1], "encoder": [0, 1]}
    assert checkpoint.layer(1).sources["norm"] == "decoder.block.1.layer.2.layer_norm.weight"
    assert checkpoint.layer(1, tower="encoder").sources["norm"] == "encoder.block.1.layer.1.layer_norm.weight"
    assert all(layer.functional_note() is None for layer in checkpoint.layers())
    assert set(gp.probe(checkpoint, towers=["encoder"], samples=2).neurons["tower"]) == {"encoder"}


def test_csm_s_depth_decoder_has_rules_of_its_own(tmp_path):
    write_tiny_checkpoint("csm", tmp_path, prefix="backbone_model.layers")
    depth = llama_tensors(layers=1, d_model=12, d_mlp=20, prefix="depth_decoder.model.")
    part = {"model_type": "csm_depth_decoder_model", "hidden_size": 12, "hidden_act": "gelu"}
    rewritten(tmp_path, lambda tensors: tensors | depth, depth_decoder_config=part)
    checkpoint = gp.open_checkpoint(tmp_path)
    assert [(site.tower, site.layer) for site in checkpoint.sites] == [
        ("text", 0), ("text", 1), ("depth_decoder.model.layers", 0)
    ]  # fmt: skip
    layer = checkpoint.layer(0, tower="depth_decoder.model.layers")
    assert (layer.activation.name, layer.functional_note()) == ("gelu", None)


def test_phi_4_s_two_towers_have_opposite_halves(tmp_path):
    text = write_tiny_checkpoint("phi4_multimodal", tmp_path / "text")
    sound = write_tiny_checkpoint(
        "phi4_multimodal_audio",
        tmp_path / "audio",
        d_model=12,
        d_mlp=20,
        prefix="model.embed_tokens_extend.audio_embed.encoder.encoders",
    )
    config = {"activation": "silu", "hidden_size": 12, "model_type": "phi4_multimodal_audio"}
    rewritten(tmp_path / "text", lambda t: t | load_file(tmp_path / "audio" / "model.safetensors"), audio_config=config)
    assert_raw(tmp_path / "text", text + sound)
    assert all(layer.functional_note() is None for layer in gp.open_checkpoint(tmp_path / "text").layers())


CONFIG = {
    "model_type": "omni",
    "thinker_config": {
        "text_config": {"model_type": "a", "hidden_size": 1},
        "vision_config": {"model_type": "b"},
        "audio_config": {"model_type": "c"},
    },
    "talker_config": {
        "text_config": {"model_type": "d", "hidden_size": 2},
        "code_predictor_config": {"model_type": "e"},
    },
    "token2wav_config": {"dit_config": {"model_type": "f"}},
}


@pytest.mark.parametrize(
    ("tower", "prefix", "model_type"),
    [
        ("text", "thinker.model.layers", "a"),
        ("vision", "thinker.visual.blocks", "b"),
        ("audio", "thinker.audio_tower.layers", "c"),
        ("talker.model.layers", "talker.model.layers", "d"),
        ("talker.code_predictor.model.layers", "talker.code_predictor.model.layers", "e"),
        ("token2wav.dit.layers", "token2wav.dit.layers", "f"),
        ("model.connector.layers", "model.connector.layers", None),
        ("mtp", "mtp.layers", "a"),
    ],
)
def test_the_part_of_the_config_that_speaks_of_a_stack(tower, prefix, model_type):
    assert part_of(CONFIG, tower, prefix).get("model_type") == model_type


@pytest.mark.parametrize(("tower", "prefix"), [("text", "model.decoder.layers"), ("encoder", "model.encoder.layers")])
def test_encoders_and_decoders_with_parts_of_their_own(tower, prefix):
    part = "decoder" if tower == "text" else "encoder"
    for ending in ("", "_config"):
        config = {f"{name}{ending}": {"model_type": name} for name in ("encoder", "decoder")}
        assert part_of(config | {"model_type": "pair"}, tower, prefix)["model_type"] == part


# -- published forms that differ from what transformers saves ------------------------------------------


def test_qwen3_5_s_experts_as_published(tmp_path):
    truth = write_tiny_checkpoint("qwen3_5_moe", tmp_path, order="gate-first", storage="stacked",
                                  prefix="model.language_model.layers")  # fmt: skip
    rewritten(tmp_path, lambda tensors: {k.replace("experts.gate_up_proj.weight", "experts.gate_up_proj").replace(
        "experts.down_proj.weight", "experts.down_proj"): v for k, v in tensors.items()})  # fmt: skip
    names = {site.tensors["gate"] for site in gp.open_checkpoint(tmp_path).sites if isinstance(site.expert, int)}
    assert names == {f"model.language_model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(2)}
    dense = [replace(mlp, expert=mlp.expert) for mlp in truth]
    assert_raw(tmp_path, dense)


@pytest.mark.parametrize(
    "family", ["qwen2_moe", "deepseek_v3", "glm4_moe", "olmoe", "mixtral", "phimoe", "minimax_m2", "jamba"]
)
def test_experts_one_by_one_or_stacked(family, tmp_path):
    """Both forms of the same weights."""
    truth = write_tiny_checkpoint(family, tmp_path, seed=3)
    by_place = {(mlp.layer, mlp.expert): mlp for mlp in truth if isinstance(mlp.expert, int)}

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        gone = {name for mlp in by_place.values() for name in mlp.names}
        out = {k: v for k, v in tensors.items() if k not in gone}
        for layer in {layer for layer, _ in by_place}:
            mine = [mlp for (at, _), mlp in sorted(by_place.items()) if at == layer]
            stem = mine[0].names[0].rsplit(".", 3)[0]
            out[f"{stem}.gate_up_proj"] = torch.stack([torch.cat([mlp.query, mlp.key]) for mlp in mine])
            out[f"{stem}.down_proj"] = torch.stack([mlp.value.T for mlp in mine])
        return out

    rewritten(tmp_path, change)
    assert_raw(tmp_path, truth)


def test_deepseek_v4_under_either_name(tmp_path):
    truth = write_tiny_checkpoint("deepseek_v4", tmp_path)
    swaps = {".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj.", ".ffn.": ".mlp.",
             ".ffn_norm.": ".post_attention_layernorm.", "layers.": "model.layers."}  # fmt: skip

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        out = {}
        for name, value in tensors.items():
            for old, new in swaps.items():
                name = name.replace(old, new)
            out[name] = value
        return out

    rewritten(tmp_path, change)
    assert_raw(tmp_path, truth)
    assert gp.open_checkpoint(tmp_path).layer(0, 0).sources["norm"].endswith("post_attention_layernorm.weight")


@pytest.mark.parametrize(
    "prefix",
    ["language_model.model.layers", "model.language_model.layers", "model.layers", "model.text_model.layers",
     "text_model.model.layers", "thinker.model.layers", "layers", "transformer.blocks", "backbone.layers",
     "language_model.model.blocks"],
)  # fmt: skip
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "granitemoehybrid"])
def test_any_prefix(prefix, family, tmp_path):
    assert_raw(tmp_path, write_tiny_checkpoint(family, tmp_path, prefix=prefix))


@pytest.mark.parametrize("published", [True, False])
def test_qwen2_5_vl_s_vision_tower(published, tmp_path):
    """Published configs call both the whole and the tower qwen2_5_vl, and keep the text's keys at the top."""
    write_tiny_checkpoint("qwen2_5_vl", tmp_path)
    tower = write_tiny_checkpoint("qwen2_5_vl_vision", tmp_path / "v", d_model=12, d_mlp=20, prefix="visual.blocks")
    name = "qwen2_5_vl" if published else "qwen2_5_vl_vision"
    rewritten(tmp_path, lambda tensors: tensors | load_file(tmp_path / "v" / "model.safetensors"),
              vision_config={"model_type": name, "hidden_size": 12, "hidden_act": "silu"})  # fmt: skip
    layer = gp.open_checkpoint(tmp_path).layer(1, tower="vision")
    assert torch.allclose(layer.query, tower[1].query * tower[1].gain)
    assert layer.sources["norm"] == "visual.blocks.1.norm2.weight"
    assert layer.functional_note() is None


def test_a_tower_that_has_the_whole_model_s_name_gets_no_rules_of_its_text(tmp_path):
    write_tiny_checkpoint("qwen2_vl", tmp_path)
    tower = llama_tensors(layers=1, d_model=12, d_mlp=20, prefix="visual.")
    rewritten(tmp_path, lambda tensors: tensors | tower, vision_config={"model_type": "qwen2_vl"})
    layer = gp.open_checkpoint(tmp_path).layer(0, tower="vision")
    assert layer.activation is None
    assert layer.functional_note()
    assert "norm" not in layer.sources
