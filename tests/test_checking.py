"""Factors against transformers' modules: what is right is called right, and every kind of wrong reading is found."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

import glu_probe as gp
from glu_probe import cli, comparison
from glu_probe.checkpoint import rules
from glu_probe.checkpoint.family import Norm
from glu_probe.checkpoint.safetensors import SafetensorsFile
from glu_probe.comparison import TOLERANCE
from glu_probe.errors import BadOption
from glu_probe.reference_model import NotComparable, ReferenceModel, function_of

from .checkpoint.shrunk import build, configuration
from .checkpoint.writers import gguf_tensors, write_gguf

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}


def save(directory: Path, model_type: str, *, dtype: torch.dtype = torch.float32, **config) -> Path:
    """A tiny model of transformers with random weights, norms away from 1 and biases away from 0."""
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**SIZES | config))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise + 0.7 if parameter.ndim == 1 else noise)
    model.to(dtype).save_pretrained(directory)
    return directory


def edit_config(directory: Path, **changes) -> Path:
    """The same model with another config; None removes a key."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return directory


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command line."""
    code = 0
    try:
        cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code or 0
    out = capsys.readouterr()
    return code, out.out, out.err


def assert_reproduced(frame) -> None:
    """Every row is compared in all ways, and is as it should be."""
    assert set(frame["verdict"]) == {"reproduced"}
    assert set(frame["reason"]) == {""}
    assert frame["relative_error"].max() < TOLERANCE
    assert frame["exchanged_error"].min() > 0.1


# -- what is right -------------------------------------------------------------------------------


@pytest.mark.parametrize(("model_type", "config", "fed_by"), [
    ("llama", {}, "post_attention_layernorm"),
    ("llama", {"mlp_bias": True, "hidden_act": "gelu"}, "post_attention_layernorm"),
    ("phi3", {}, "post_attention_layernorm"),
    ("gemma2", {}, "pre_feedforward_layernorm"),
    ("olmo", {}, "post_attention_layernorm"),
    ("stablelm", {"use_parallel_residual": True}, "input_layernorm"),
])  # fmt: skip
def test_factors_reproduce_the_module_and_its_norm(tmp_path, model_type, config, fed_by):
    check = gp.check(save(tmp_path, model_type, **config))
    assert_reproduced(check.frame)
    assert check.frame["folded_error"].max() < TOLERANCE
    assert list(check.frame["layer"]) == [0, 1, 3]
    assert [name.split(".")[-1] for name in check.frame["fed_by"]] == [fed_by] * 3
    assert check.ok


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_files_of_other_precision(tmp_path, dtype):
    assert_reproduced(gp.check(save(tmp_path, "phi3", dtype=dtype)).frame)


def test_a_family_without_a_norm_in_front(tmp_path):
    frame = gp.check(save(tmp_path, "olmo2")).frame
    assert_reproduced(frame)
    assert frame["folded_error"].isna().all()
    assert set(frame["fed_by"]) == {""}


def test_experts_are_compared_one_by_one(tmp_path):
    frame = gp.check(save(tmp_path, "mixtral", **EXPERTS)).frame
    assert_reproduced(frame)
    assert list(frame["expert"]) == ["0", "2", "4"] * 3
    assert set(frame["module"]) == {"MixtralExperts"}
    assert frame["folded_error"].max() < TOLERANCE


def test_shared_and_dense_mlps_beside_experts(tmp_path):
    config = {
        "moe_intermediate_size": 10, "n_routed_experts": 3, "n_shared_experts": 2, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    }  # fmt: skip
    frame = gp.check(save(tmp_path, "deepseek_v3", **config), layers=[0, 3]).frame
    assert_reproduced(frame)
    found = {
        (row.layer, None if row.expert is None else row.expert) for row in frame.fillna({"expert": ""}).itertuples()
    }
    assert found == {(0, ""), (3, "0"), (3, "1"), (3, "2"), (3, "shared")}


@pytest.mark.parametrize(("model_type", "changes", "modules"), [
    ("gpt_oss", {}, {"GptOssExperts"}),  # interleaved, transposed, with limits
    ("dbrx", {}, {"DbrxExperts"}),  # experts below each other
    ("qwen3_vl_moe", {}, {"Qwen3VLMoeTextExperts"}),  # stacked and transposed in the file, not in memory
    ("granitemoe", {}, {"GraniteMoeExperts"}),  # other names in the file
    ("llama4_text", {}, {"Llama4TextExperts", "Llama4TextMLP"}),  # all experts in one product
    ("longcat_flash", {}, {"LongcatFlashExperts", "LongcatFlashMLP"}),  # two MLPs a layer, and experts that do nothing
    ("step3p7", {"text_config.swiglu_limits": [0.0, 0.5], "text_config.swiglu_limits_shared": [0.6, 0.7]},
     {"Step3p7MLP", "Step3p7Experts"}),
    ("phi4_multimodal", {}, {"Phi4MultimodalMLP", "Phi4MultimodalAudioMLP"}),  # a module with its norm inside
    ("mt5", {}, {"MT5DenseGatedActDense"}),  # an encoder and a decoder
    ("dinov2", {"use_swiglu_ffn": True}, {"Dinov2SwiGLUFFN"}),  # pictures
    ("falcon_h1", {}, {"FalconH1MLP"}),  # multipliers
])  # fmt: skip
def test_every_way_of_storing(tmp_path, model_type, changes, modules):
    build(configuration(model_type, **changes)).save_pretrained(tmp_path)
    check = gp.check(tmp_path)
    assert set(check.frame["verdict"]) == {"reproduced"}
    assert set(check.frame["module"]) == modules
    assert check.frame["relative_error"].max() < TOLERANCE
    assert check.frame["folded_error"].max() < TOLERANCE
    assert check.frame["exchanged_error"].min() > 0.1


def test_the_tower_of_a_wrapper(tmp_path):
    """Gemma 3 keeps its language model under a prefix that transformers renames."""
    vision = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CONFIG_MAPPING["gemma3"](
        text_config=SIZES | {"model_type": "gemma3_text"},
        vision_config=vision | {"image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    old = {
        name.replace("model.language_model.", "language_model.model."): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    frame = gp.check(tmp_path).frame
    assert_reproduced(frame)
    assert frame["tensor"][0] == "language_model.model.layers.0.mlp.gate_proj.weight"


# -- what is wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(("order", "advice"), [
    ("up-first", "with gate and up exchanged (see --fused-layout) they do"),
    ("interleaved", "read as --fused-layout gate-first they do"),
])  # fmt: skip
def test_a_wrong_order_of_halves_is_found(tmp_path, capsys, order, advice):
    save(tmp_path, "phi3")
    code, out, _ = run(capsys, "check", tmp_path, "--fused-layout", order)
    assert code == 3
    assert advice in out
    assert "3 of 3 MLPs are not what the model computes" in out
    frame = gp.check(tmp_path, fused_layout=order).frame
    assert frame["relative_error"].min() > 0.1
    assert set(frame["verdict"]) == {"mismatch"}


@pytest.mark.parametrize(("model_type", "wrong", "right"), [
    ("llama", "gelu", "silu"),
    ("gemma2", "gelu", "gelu_tanh"),
    ("gemma2", "quick_gelu", "gelu_tanh"),
])  # fmt: skip
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_wrong_activation_is_found_whatever_the_scale_of_the_weights(tmp_path, model_type, wrong, right, scale):
    save(tmp_path, model_type)
    tensors = load_file(tmp_path / "model.safetensors")
    scaled = {name: tensor * scale if "gate_proj" in name else tensor for name, tensor in tensors.items()}
    save_file(scaled, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert gp.check(tmp_path).ok
    check = gp.check(tmp_path, activation=wrong)
    assert not check.ok
    assert set(check.frame["verdict"]) == {"mismatch"}
    assert all(f"with --activation {right} they do" in reason for reason in check.frame["reason"])


def test_a_gain_of_w_in_place_of_1_plus_w_is_found(tmp_path):
    check = gp.check(save(tmp_path, "gemma"), family="llama", activation="gelu_tanh")
    assert set(check.frame["verdict"]) == {"mismatch"}
    assert check.frame["relative_error"].max() < TOLERANCE  # the MLP alone is right
    assert check.frame["folded_error"].min() > 0.1
    assert "post_attention_layernorm (GemmaRMSNorm) is not RMSNorm, gain w" in check.frame["reason"][0]


@pytest.mark.parametrize(("model_type", "family", "words"), [
    ("llama", "cohere", "reads the output of post_attention_layernorm, but the norm folded in is input_layernorm"),
    ("llama", "olmo2", "reads the output of post_attention_layernorm, which is not folded in"),
])  # fmt: skip
def test_a_norm_that_the_mlp_does_not_read_is_found(tmp_path, model_type, family, words):
    """Its module and the MLP's would agree with the factors: only the running model shows that they do not belong."""
    check = gp.check(save(tmp_path, model_type), family=family, activation="silu")
    assert set(check.frame["verdict"]) == {"mismatch"}
    assert all(words in reason for reason in check.frame["reason"])


@pytest.mark.parametrize(("norm", "folded"), [
    (Norm("post_attention_layernorm"), "post_attention_layernorm"),
    (Norm("not_in_the_file", kind="layer", weight="none"), "LayerNorm, no gain"),
    (Norm("not_in_the_file", weight="none"), "RMSNorm, no gain"),
])  # fmt: skip
@pytest.mark.parametrize("model_type", ["olmo2", "olmo3", "exaone4", "flex_olmo"])
def test_a_norm_where_the_mlp_reads_the_stream_is_found(tmp_path, monkeypatch, model_type, norm, folded):
    """These models have no norm in front of their MLPs. One without weights has no tensor that would stand elsewhere."""
    experts = {"num_experts": 3, "num_experts_per_tok": 2} if model_type == "flex_olmo" else {}
    assert gp.check(save(tmp_path, model_type, **experts)).ok
    family = replace(rules.find_family(model_type, gguf=False, tower="text"), norm=norm, places={})
    monkeypatch.setattr(rules, "find_family", lambda name, **_: family)
    check = gp.check(tmp_path)
    words = f"reads no module's output but the residual stream, but the norm folded in is {folded}"
    assert set(check.frame["verdict"]) == {"mismatch"}
    assert all(words in reason for reason in check.frame["reason"])


def test_verdicts_do_not_hang_on_how_notes_are_worded(tmp_path, monkeypatch):
    monkeypatch.setattr(rules, "_NO_NORM", "nothing")
    monkeypatch.setattr(rules, "_norm_words", lambda known, norm, *, folded: "somehow")
    monkeypatch.setattr(comparison, "_explained", lambda *_: None)
    assert set(gp.check(save(tmp_path / "a", "olmo2"), activation="gelu").frame["verdict"]) == {"mismatch"}
    frame = gp.check(save(tmp_path / "b", "olmo")).frame
    assert_reproduced(frame)
    assert frame["folded_error"].max() < TOLERANCE


def test_gates_that_cannot_be_told_from_ups_are_no_success(tmp_path):
    save(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    same = {name: tensors[name.replace("up_proj", "gate_proj")].clone() for name in tensors}
    save_file(same, tmp_path / "model.safetensors", metadata={"format": "pt"})
    frame = gp.check(tmp_path).frame
    assert all("interchangeable here" in reason for reason in frame["reason"])


# -- what writes nothing -------------------------------------------------------------------------


def rewrite(directory: Path, change) -> Path:
    """The same model with other tensors: what `change` makes of them, by name."""
    tensors = {name: change(name, t).contiguous() for name, t in load_file(directory / "model.safetensors").items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("which", ["down_proj", "gate_proj"])
def test_an_mlp_that_writes_nothing_is_not_compared(tmp_path, which):
    model = rewrite(save(tmp_path, "llama"), lambda name, t: t * 0 if f"0.mlp.{which}" in name else t)
    frame = gp.check(model).frame
    assert list(frame["verdict"]) == ["not compared", "reproduced", "reproduced"]
    assert "it writes nothing" in frame["reason"][0]
    assert frame["relative_error"].isna().tolist() == [True, False, False]


def test_an_mlp_that_writes_nothing_behind_its_norm(tmp_path):
    model = rewrite(save(tmp_path, "llama"), lambda name, t: t * 0 if "0.post_attention_layernorm" in name else t)
    frame = gp.check(model).frame
    assert set(frame["verdict"]) == {"reproduced"}
    assert "behind post_attention_layernorm it writes nothing" in frame["reason"][0]
    assert frame["folded_error"].isna().tolist() == [True, False, False]


def test_an_mlp_that_writes_nothing_with_its_norm_inside(tmp_path):
    build(configuration("phi4_multimodal")).save_pretrained(tmp_path)
    assert gp.check(rewrite(tmp_path, lambda name, t: t * 0 if "down_proj" in name else t)).ok
    frame = gp.check(tmp_path).frame
    assert set(frame["verdict"]) == {"not compared"}
    assert frame["reason"].str.contains("it writes nothing").all()


def test_an_mlp_that_writes_less_than_float32_holds(tmp_path):
    tiny = rewrite(save(tmp_path, "llama"), lambda name, t: t * 1e-25 if ".mlp." in name else t)
    frame = gp.check(tiny).frame
    assert_reproduced(frame)
    assert frame["folded_error"].max() < TOLERANCE


def test_rows_where_no_neuron_is_active(tmp_path):
    """Of one neuron with ReLU about half are zero."""
    config = {"hidden_act": "relu", "intermediate_size": 1}
    assert_reproduced(gp.check(save(tmp_path, "llama", **config)).frame)
    frame = gp.check(tmp_path, activation="silu").frame
    assert set(frame["verdict"]) == {"mismatch"}


def test_factors_that_write_something_where_the_module_writes_nothing():
    layer = gp.GatedLayer(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3), gp.activation("relu"))
    found = comparison.compare(layer, torch.ones(4, 3, dtype=torch.float64), [], torch.zeros_like)
    assert found.error == float("inf")
    assert not found.silent
    assert not found.equal


# -- what cannot be compared ---------------------------------------------------------------------


def test_a_module_that_does_more_than_its_neurons(tmp_path):
    """BitNet has a norm inside its MLP. The report claims nothing about its function, so this contradicts nothing."""
    check = gp.check(save(tmp_path, "bitnet", hidden_act="silu"))
    assert check.ok
    assert set(check.frame["verdict"]) == {"not compared"}
    assert set(check.frame["module"]) == {"BitNetMLP"}
    assert check.frame["relative_error"].min() > 0.1
    assert all("does more than its neurons: a norm over all neurons" in reason for reason in check.frame["reason"])


def test_an_unknown_model_type_is_said_and_is_no_error(tmp_path, capsys):
    edit_config(save(tmp_path, "llama"), model_type="oddling")
    code, out, err = run(capsys, "check", tmp_path)
    assert code == 0
    assert "has no model_type 'oddling'" in out
    assert "[24, 16] = [d_mlp, d_model]" in out
    assert "reproduced" not in out
    assert "not in the table" in err


def test_code_of_a_repository_is_never_run(tmp_path, capsys):
    marker = tmp_path / "ran"
    directory = save(tmp_path / "model", "llama")
    (directory / "modeling_trap.py").write_text(f"open({str(marker)!r}, 'w').write('ran')\nclass Trap: pass\n")
    trap = {name: "modeling_trap.Trap" for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM")}
    edit_config(directory, auto_map=trap)
    assert_reproduced(gp.check(directory).frame)  # transformers has this one itself
    edit_config(directory, model_type="oddling", architectures=["Trap"])
    code, out, _ = run(capsys, "check", directory)
    assert code == 0
    assert "the code that the repository brings along is never run" in out
    assert not marker.exists()


@pytest.mark.parametrize("model_type", ["stablelm", "olmo2"])
def test_a_family_that_is_not_in_the_table(tmp_path, monkeypatch, model_type):
    """The layout is right, activation and norm are found out, and said."""
    monkeypatch.setattr(rules, "find_family", lambda name, **_: None)
    check = gp.check(save(tmp_path, model_type))
    assert check.ok
    assert set(check.frame["verdict"]) == {"reproduced"}
    for reason in check.frame["reason"]:
        assert "with --activation silu, which was not known" in reason
        assert "the norm in front is not known" in reason
        assert ("the model feeds it from post_attention_layernorm" in reason) == (model_type == "stablelm")


@pytest.mark.parametrize(("order", "verdict"), [
    ("gate-first", "reproduced"), ("up-first", "mismatch"), ("interleaved", "mismatch"),
])  # fmt: skip
def test_the_order_of_halves_of_an_unknown_family_can_be_tried(tmp_path, monkeypatch, order, verdict):
    monkeypatch.setattr(rules, "find_family", lambda name, **_: None)
    check = gp.check(save(tmp_path, "phi3"), fused_layout=order)
    assert set(check.frame["verdict"]) == {verdict}
    assert all("--activation silu" in reason for reason in check.frame["reason"])
    if verdict == "mismatch":
        assert all("--fused-layout" in reason for reason in check.frame["reason"])


def test_gguf_files_are_described_and_not_compared(tmp_path, capsys):
    code, out, _ = run(capsys, "check", write_gguf(tmp_path / "model.gguf", gguf_tensors()))
    assert code == 0
    assert out.count("a GGUF file does not hold the configuration") == 1
    assert "`glu-probe activations` compares the factors with the running model" in " ".join(out.split())
    assert "blk.0.ffn_gate.weight" in out


def test_a_file_without_config(tmp_path, capsys):
    directory = save(tmp_path, "llama")
    (directory / "config.json").unlink()
    code, out, _ = run(capsys, "check", directory)
    assert code == 0
    assert "without a model_type" in out


def test_a_config_that_transformers_rejects(tmp_path):
    frame = gp.check(edit_config(save(tmp_path, "llama"), num_attention_heads=5)).frame
    assert set(frame["verdict"]) == {"not compared"}
    assert all("transformers cannot build it from the config" in reason for reason in frame["reason"])


def test_a_config_of_other_sizes(tmp_path):
    frame = gp.check(edit_config(save(tmp_path, "llama"), intermediate_size=40)).frame
    assert set(frame["verdict"]) == {"not compared"}
    assert all("down_proj.weight of LlamaMLP is [16, 40], from the file [16, 24]" in r for r in frame["reason"])


def test_mlps_beyond_the_limit_of_memory_are_left_out(tmp_path, capsys):
    save(tmp_path, "llama")
    code, out, _ = run(capsys, "check", tmp_path, "--max-gb", "1e-6")
    assert code == 0
    assert "GB of memory, above the limit of 1e-06" in out


def test_a_stack_that_transformers_leaves_out(tmp_path):
    save(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {f"mtp.{name.removeprefix('model.')}": t.clone() for name, t in tensors.items() if ".layers.0." in name}
    save_file(tensors | extra, tmp_path / "model.safetensors", metadata={"format": "pt"})
    frame = gp.check(tmp_path).frame.set_index("tower")
    assert set(frame.loc[["text"], "verdict"]) == {"reproduced"}
    assert frame.loc["mtp", "verdict"] == "not compared"
    assert (
        "no parameter of LlamaForCausalLM is loaded from mtp.layers.0.mlp.gate_proj.weight"
        in frame.loc["mtp", "reason"]
    )


# -- what it takes -------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch):
    """Names of the tensors that are read, and how many rows of them."""
    seen = []
    real = SafetensorsFile.read

    def read(self, name, rows=None):
        seen.append(name)
        return real(self, name, rows)

    monkeypatch.setattr(SafetensorsFile, "read", read)
    return seen


def test_only_the_compared_mlps_and_their_norms_are_read(tmp_path, reads):
    gp.check(save(tmp_path, "llama"), layers="2")
    leaves = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm")
    assert {*reads} == {f"model.layers.2.{leaf}.weight" for leaf in leaves}


def test_other_experts_are_not_read(tmp_path, reads):
    gp.check(save(tmp_path, "mixtral", **EXPERTS), layers=[0])
    experts = {name.split(".")[5] for name in reads if "experts" in name}
    assert experts == {"0", "2", "4"}
    assert {name.split(".")[2] for name in reads} == {"0"}


def test_models_are_built_without_memory(tmp_path, monkeypatch):
    """The whole model has no weights; what is copied out of it has one MLP's."""
    sizes = []
    real = ReferenceModel.filled

    def filled(self, path, names, read, **options):
        assert all(parameter.is_meta for parameter in self._model.parameters())
        module = real(self, path, names, read, **options)
        sizes.append(sum(parameter.numel() for parameter in module.parameters()))
        return module

    monkeypatch.setattr(ReferenceModel, "filled", filled)
    gp.check(save(tmp_path, "mixtral", **EXPERTS), layers=[0])
    assert max(sizes) == 3 * 16 * 24  # of 5 experts, one


def test_layers_are_chosen_and_wrong_ones_refused(tmp_path):
    save(tmp_path, "llama")
    assert list(gp.check(tmp_path, layers="1:3").frame["layer"]) == [1, 2]
    with pytest.raises(BadOption, match="no layer 9"):
        gp.check(tmp_path, layers=[9])


def test_an_open_checkpoint_is_checked_as_it_was_opened(tmp_path):
    save(tmp_path, "phi3")
    assert not gp.check(gp.open_checkpoint(tmp_path, fused_layout="up-first", fold_norm=False)).ok
    with pytest.raises(BadOption, match="already open"):
        gp.check(gp.open_checkpoint(tmp_path), family="llama")


def test_the_same_seed_gives_the_same_numbers(tmp_path):
    save(tmp_path, "llama")
    first, second, other = (gp.check(tmp_path, seed=seed).frame for seed in (1, 1, 2))
    assert first.equals(second)
    assert not first["exchanged_error"].equals(other["exchanged_error"])


def test_json(tmp_path, capsys):
    save(tmp_path, "phi3")
    code, out, _ = run(capsys, "check", tmp_path, "--json", "--layers", "0")
    facts = json.loads(out)
    assert code == 0
    assert facts["ok"] is True
    assert facts["compared_with"].endswith("Phi3ForCausalLM")
    assert facts["mlps"][0]["tensor"] == "model.layers.0.mlp.gate_up_proj.weight"
    assert facts["mlps"][0]["expert"] is None
    assert facts["mlps"][0]["exchanged_error"] > 0.1
    code, out, _ = run(capsys, "check", tmp_path, "--json", "--fused-layout", "up-first")
    assert code == 3
    assert json.loads(out)["ok"] is False


def test_nothing_is_left_changed(tmp_path):
    save(tmp_path, "llama")
    state, level, filters = torch.get_rng_state(), logging.getLogger("transformers").level, list(warnings.filters)
    gp.check(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert logging.getLogger("transformers").level == level
    assert warnings.filters == filters


def test_without_transformers(tmp_path, monkeypatch):
    save(tmp_path, "llama")
    monkeypatch.setitem(sys.modules, "transformers", None)
    frame = gp.check(tmp_path).frame
    assert all("transformers is not installed" in reason for reason in frame["reason"])


def test_experts_that_are_called_in_an_unknown_way(tmp_path):
    class Strange(nn.Module):
        def forward(self, x, mask, order, weights):
            return x

    with pytest.raises(NotComparable, match="it takes x, mask, order, weights"):
        function_of(Strange(), routed=True)
