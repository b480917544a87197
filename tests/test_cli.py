"""The command line: output, exit codes, one-line errors."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import glu_probe as gp
from glu_probe import cli
from glu_probe.cli.options import Opening

from .support import llama_config, llama_tensors, write_checkpoint, write_llama
from .text import tiny_models


def test_inspect(run, llama):
    code, out, err = run("inspect", llama)
    assert code == 0
    assert "family      llama" in out
    assert "silu  (config hidden_act)" in out
    assert "12 layers  0-11: dense, d_model 16, d_mlp 24, separate, F32" in out
    assert err == ""
    mlp_and_norm = 12 * (3 * 16 * 24 + 16) * 4
    assert f"a run reads {mlp_and_norm / 1e6:,.1f} MB" in out


def test_inspect_json(run, llama):
    code, out, _ = run("inspect", llama, "--json")
    facts = json.loads(out)
    assert code == 0
    assert len(facts["mlps"]) == 12
    assert facts["mlps"][0]["gate"] == "model.layers.0.mlp.gate_proj.weight"
    assert facts["mlps"][0]["bytes"] == (3 * 16 * 24 + 16) * 4


def test_inspect_names_tensors_shapes_and_the_norm(run, llama):
    _, out, _ = run("inspect", llama)
    assert "gate        model.layers.0.mlp.gate_proj.weight  [24, 16] = [d_mlp, d_model]" in out
    assert "down        model.layers.0.mlp.down_proj.weight  [16, 24] = [d_model, d_mlp]" in out
    assert "norm        model.layers.0.post_attention_layernorm.weight" in out


def test_options_about_reading_are_the_same_everywhere():
    commands = {
        name: inspect.get_annotations(getattr(cli, name)) for name in ("inspect", "check", "report", "neuron", "causal")
    }
    shared = [field.name for field in dataclasses.fields(Opening)]
    assert {"family", "fused_layout", "activation", "expert_layout"} <= {*shared}
    for name in shared:
        assert len({annotations[name] for annotations in commands.values()}) == 1


@pytest.mark.parametrize("command", ["inspect", "check"])
def test_options_about_reading_do_the_same_in_check_as_in_inspect(run, llama, command):
    _, out, _ = run(command, llama, "--family", "olmo2", "--activation", "relu", "--json")
    facts = json.loads(out)
    assert facts["options"]["family"] == "olmo2"
    assert facts["towers"]["text"]["activation"] == "relu"
    assert facts["towers"]["text"]["activation_source"] == "option"


def test_report_and_plot(run, llama, tmp_path):
    out_dir = tmp_path / "out"
    code, out, err = run("report", llama, "-o", out_dir, "--layers", "0:4")
    assert code == 0
    assert "report.html" in out
    assert err == ""  # no progress bar where there is no terminal
    assert len(list((out_dir / "figures").glob("*.png"))) == 13
    provenance = json.loads((out_dir / "provenance.json").read_text())
    assert provenance["layers"] == [0, 1, 2, 3]
    for entry in (out_dir / "figures").iterdir():
        entry.unlink()
    assert run("plot", out_dir)[0] == 0
    assert len(list((out_dir / "figures").glob("*.png"))) == 13


def test_report_options_are_heeded(run, llama, tmp_path):
    code, out, _ = run(
        "report", llama, "-o", tmp_path / "out", "--no-figures", "--no-fold-norm", "--activation", "relu", "--seed", 3,
        "--samples", 8, "--json",
    )  # fmt: skip
    facts = json.loads(out)["provenance"]
    assert code == 0
    assert facts["options"]["fold_norm"] is False
    assert facts["towers"]["text"]["activation"] == "relu"
    assert facts["towers"]["text"]["activation_source"] == "option"
    assert (facts["seed"], facts["samples"]) == (3, [8])
    assert not (tmp_path / "out/report.html").exists()


def test_neuron(run, llama):
    code, out, _ = run("neuron", llama, 3, 5)
    assert code == 0
    assert out == f"{gp.neuron_card(llama, 3, 5)}\n"
    assert json.loads(run("neuron", llama, 3, 5, "--json")[1]) == gp.neuron_card(llama, 3, 5).to_dict()


def test_options_of_neuron_are_heeded(run, tmp_path):
    directory = tiny_models.save(tmp_path / "tiny", "llama")
    text = tmp_path / "text.txt"
    text.write_text(tiny_models.words(300))
    code, _, err = run(
        "activations", directory, "--text", text, "--length", 64, "--contexts", 2, "--neurons", "1:5", "-o", tmp_path / "out",
        "--no-figures",
    )  # fmt: skip
    assert code == 0, err
    card = json.loads(run("neuron", directory, 1, 5, "--report", tmp_path / "out", "--top", 3, "--json")[1])
    assert card["missing"] == {}
    assert (len(card["tokens"]), {row["rank"] for row in card["contexts"]}) == (18, {1, 2})
    assert "a > 0, b > 0" in run("neuron", directory, 1, 5, "--report", tmp_path / "out")[1]
    raw = json.loads(run("neuron", directory, 1, 5, "--no-fold-norm", "--json", "--top", 1)[1])
    assert raw["measures"][0]["value"] != card["measures"][0]["value"]
    assert "not folded" in raw["missing"]["tokens of query"]
    assert run("neuron", directory, 1, 5, "--report", tmp_path)[0] == 2


def test_find(run, tmp_path):
    tensors = llama_tensors(layers=2)
    for name in ("gate_proj", "up_proj"):
        tensors[f"model.layers.1.mlp.{name}.weight"][7] = tensors[f"model.layers.1.mlp.{name}.weight"][3]
    model = write_checkpoint(tmp_path / "model", tensors, llama_config(num_hidden_layers=2))
    code, out, err = run("find", model, "duplicates")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("1 found (pairs that act as one neuron")
    assert lines[1].split() == ["layer", "neuron", "partner", "score", "cos_value"]
    assert lines[2].split()[:4] == ["1", "3", "7", "1"]
    assert run("find", model, "near-duplicates")[1].startswith(
        "0 found (pairs alike in q, k and v: cosine of each at least 0.8)"
    )
    facts = json.loads(run("find", model, "weakening", "--threshold", 0.1, "--layers", "0", "--json")[1])
    wanted = gp.find.weakening(model, threshold=0.1, layers="0")
    assert (facts["what"], facts["threshold"], facts["found"]) == ("weakening", 0.1, len(wanted))
    assert [row["neuron"] for row in facts["neurons"]] == wanted["neuron"].tolist()
    assert {row["layer"] for row in facts["neurons"]} == {0}
    assert len(json.loads(run("find", model, "weakening", "--threshold", 0.1, "--top", 2, "--json")[1])["neurons"]) == 2
    out = run("find", model, "weakening", "--threshold", 0, "--top", 2)[1]
    assert len(out.splitlines()) == 5
    assert "more: --top" in out
    gp.probe(model).save(tmp_path / "report", figures=False)
    first, second = (
        json.loads(run("find", source, "weakening", "--json")[1]) for source in (model, tmp_path / "report")
    )
    assert [row["neuron"] for row in first["neurons"]] == [row["neuron"] for row in second["neurons"]]


@pytest.mark.parametrize(("arguments", "words"), [
    (["nothing"], "there is nothing called 'nothing' to find"),
    (["padded", "--threshold", 1], "padded takes no threshold"),
    (["near_bilinear", "--threshold", 2], "threshold is 2.0"),
    (["near_bilinear", "--layers", "99"], "there is no layer 99"),
])  # fmt: skip
def test_find_refuses_in_one_line(run, llama, arguments, words):
    code, out, err = run("find", llama, *arguments)
    assert (code, out) == (2, "")
    assert words in err


def test_find_in_a_report_takes_no_options_of_reading(run, llama, tmp_path):
    gp.probe(llama, layers=[0]).save(tmp_path / "report", figures=False)
    code, _, err = run("find", tmp_path / "report", "dead", "--family", "llama")
    assert code == 2
    assert "options of how a model is read do not apply to a report" in err
    code, _, err = run("find", tmp_path / "report", "duplicates")
    assert code == 2
    assert f"Give the model: {llama}" in err


def test_ls_finders(run):
    rows = json.loads(run("ls", "finders", "--json")[1])
    out = run("ls", "finders")[1]
    assert {row["name"]: row["meaning"] for row in rows}["near_bilinear"].endswith("bilinear_share at least 0.9")
    for row in rows:
        assert row["meaning"] in out
        assert row["threshold"] is None or row["meaning"].endswith(f" {row['threshold']:g}")
        assert callable(getattr(gp.find, row["name"]))


@pytest.mark.parametrize(("what", "second"), [("measures", "range"), ("interventions", "gauge"), ("finders", "needs")])
def test_ls_has_its_columns_in_line(run, what, second):
    rows, lines = json.loads(run("ls", what, "--json")[1]), run("ls", what)[1].splitlines()
    places = {line.index(f" {row['meaning']}") for row, line in zip(rows, lines, strict=False)}
    assert len(places) == 1
    assert len({line.index(f" {row[second]} ") for row, line in zip(rows, lines, strict=False)}) == 1


def test_the_shares_of_a_relu_are_the_same_two_numbers_everywhere(run):
    """Of its energy 1/2 is bilinear, 1/pi linear in the up branch, the rest neither, with unrelated branches."""
    out = run("ls", "measures")[1]
    shares = gp.gaussian_measures("relu", [1.0], [0.0]).iloc[0]
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    for name, share in (("linear_share", 1 / math.pi), ("residual_share", 0.5 - 1 / math.pi)):
        assert shares[name] == pytest.approx(share)
        line = next(line for line in out.splitlines() if line.startswith(f"{name} "))
        assert f"about {share:.2f} for a ReLU" in line
        assert f"{share:.2f}" in readme


@pytest.mark.parametrize("what", ["measures", "families"])
def test_ls(run, what):
    code, out, _ = run("ls", what)
    rows = json.loads(run("ls", what, "--json")[1])
    assert code == 0
    for row in rows:
        assert (row["name"] if what == "measures" else row["names"][0]) in out


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (["inspect", "/no/such/dir"], 2, "PathNotFound: /no/such/dir: there is no such file or directory"),
    (["report", "MODEL", "-o", "OUT", "--layers", "x"], 2, "BadOption"),
    (["report", "MODEL", "-o", "OUT", "--activation", "foo"], 3, "UnknownActivation: activation 'foo' is not known"),
    (["inspect", "MODEL", "--family", "lama"], 2, "family 'lama' is not in the table"),
    (["inspect", "MODEL", "--fused-layout", "sideways"], 2, "fused_layout is 'sideways'"),
    (["check", "MODEL", "--family", "lama"], 2, "family 'lama' is not in the table"),
    (["check", "MODEL", "--layers", "44"], 2, "there is no layer 44"),
    (["check", "/no/such/dir"], 2, "PathNotFound"),
    (["neuron", "MODEL", "3", "99"], 2, "there is no neuron 99"),
    (["neuron", "MODEL", "77", "0"], 2, "no gated MLP in layer 77"),
    (["plot", "MODEL"], 2, "NoReport"),
    (["ls", "nothing"], 2, "nothing"),
    (["report", "MODEL"], 2, "--out"),
])  # fmt: skip
def test_wrong_input_gets_one_line_and_a_hint(run, llama, tmp_path, arguments, code, words):
    names = {"MODEL": llama, "OUT": tmp_path / "out"}
    found, out, err = run(*(names.get(argument, argument) for argument in arguments))
    assert found == code
    assert words in err
    assert out == ""
    assert "Traceback" not in err
    assert len([line for line in err.splitlines() if line.startswith("error:")]) <= 1


def test_did_you_mean(run, llama):
    assert "Did you mean" in run("inspect", llama, "--family", "qwen33")[2]


@pytest.mark.parametrize(("arguments", "what", "command"), [
    (["--bogus"], "no such option", "glu-probe"),  # how it is quoted depends on the version of typer
    (["reprot", "MODEL"], "no such command 'reprot'", "glu-probe"),
    (["report"], "missing argument 'MODEL'", "glu-probe report"),
    (["report", "MODEL"], "missing option '-o' / '--out'", "glu-probe report"),
    (["report", "MODEL", "-o", "OUT", "--seed", "-1"], "invalid value for '--seed'", "glu-probe report"),
    (["neuron", "MODEL", "first", "0"], "invalid value for 'layer'", "glu-probe neuron"),
    (["ls", "nothing"], "invalid value for 'what", "glu-probe ls"),
])  # fmt: skip
def test_errors_of_usage_look_like_all_others(run, arguments, what, command):
    code, out, err = run(*arguments)
    lines = err.splitlines()
    assert (code, out, len(lines)) == (2, "", 2)
    assert lines[0].lower().startswith(f"error: badoption: {what.lower()}")
    assert "--bogus" in lines[0] or "--bogus" not in arguments
    assert lines[1] == f"hint: `{command} --help` has the arguments and options"


def test_without_arguments_there_is_help(run):
    _, out, err = run()
    assert "Usage: glu-probe" in out + err
    assert "error:" not in err
    assert run("report", "--help")[0] == 0
    assert run("--version")[1].startswith("glu-probe ")


@pytest.mark.parametrize("command", ["inspect", "check", "neuron", "report", "activations", "causal"])
def test_a_report_in_the_place_of_a_model_is_told(run, llama, tmp_path, command):
    gp.probe(llama, layers=[0], samples=8).save(tmp_path / "report", figures=False)
    more = {"neuron": [0, 0], "report": ["-o", tmp_path / "out"], "causal": ["-o", tmp_path / "out"]}.get(command, [])
    code, _, err = run(command, tmp_path / "report", *more)
    assert code == 2
    assert f"hint: Give the model: {llama}" in err


def test_plot_says_what_it_was_given(run, llama, tmp_path):
    (tmp_path / "file.txt").write_text("text")
    for place, words in (
        (tmp_path / "nothing", "nothing: there is no such directory"),
        (tmp_path / "file.txt", "file.txt: this is a file, not the directory of a report"),
        (llama, "there is no complete report here (no provenance.json)"),
    ):
        code, out, err = run("plot", place)
        assert (code, out) == (2, "")
        assert words in err
        assert "hint: " in err


def test_debug_shows_the_traceback(llama):
    done = subprocess.run(
        [sys.executable, "-m", "glu_probe", "inspect", "/no/such", "--debug"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2  # as without it
    assert "Traceback" in done.stderr
    assert "error: PathNotFound: /no/such" in done.stderr


def test_a_failed_open_writes_nothing(run, tmp_path):
    plain = {name: tensor for name, tensor in llama_tensors(layers=2).items() if "gate" not in name}
    model = write_checkpoint(tmp_path / "plain", plain, llama_config(num_hidden_layers=2))
    code, _, err = run("report", model, "-o", tmp_path / "out")
    assert code == 3
    assert "NoGatedMLP" in err
    assert not (tmp_path / "out").exists()


def test_notes_go_to_stderr_and_exit_is_zero(run, tmp_path):
    model = write_llama(tmp_path / "model", layers=2, num_hidden_layers=3)
    code, out, err = run("report", model, "-o", tmp_path / "out", "--no-figures")
    assert code == 0
    assert "note: the config says 3 layers, but the file has 2" in err
    assert "note:" not in out


def test_narrow_consoles_do_not_crash(llama, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "glu_probe", "report", str(llama), "-o", str(tmp_path / "ö ρ"), "--no-figures"],
        capture_output=True, check=False, env={**os.environ, "PYTHONIOENCODING": "cp1252"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "glu_probe", "ls", "measures"], capture_output=True, check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_no_display_is_needed(llama, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "MPLBACKEND")}
    done = subprocess.run(
        [sys.executable, "-m", "glu_probe", "report", str(llama), "-o", str(tmp_path / "out"), "--layers", "0:2"],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/figures/heatmap.png").stat().st_size > 5000


# -- on text --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A language model of a few thousand weights with its tokenizer."""
    from .text.tiny_models import save

    return save(tmp_path_factory.mktemp("tiny") / "tiny", "llama")


def test_activations(run, tiny, tmp_path):
    from .text.tiny_models import words

    (tmp_path / "a.txt").write_text(words(300))
    code, out, err = run(
        "activations", tiny, "--text", tmp_path / "a.txt", "-o", tmp_path / "out", "--length", 32, "--contexts", 2,
        "--neurons", "1:3,2:5", "--layers", "1:",
    )  # fmt: skip
    assert code == 0
    assert "; on the text that was run, the gates' pre-activations have" in out
    assert "layer 1 neuron 3 plus_plus" in out
    assert f"wrote {tmp_path / 'out' / 'report.html'}" in out
    assert "running the text takes about" in err
    report = gp.load_report(tmp_path / "out")
    assert report.layers["layer"].tolist() == [1, 2]
    assert report.neurons["exchange_asymmetry_text"].notna().all()
    assert set(zip(report.contexts["layer"], report.contexts["neuron"], strict=True)) == {(1, 3), (2, 5)}
    assert report.provenance["text"]["document_names"] == ["a.txt"]
    assert (tmp_path / "out/figures/text_profile.png").exists()


def test_activations_on_standard_input_as_json(run, tiny, monkeypatch):
    import io

    from .text.tiny_models import words

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(words(200).encode())))
    code, out, _ = run(
        "activations", tiny, "--text", "-", "--length", 32, "--tokens", 200, "--first-position", "--dtype", "bfloat16",
        "--contexts", 1, "--neurons", "query_norm", "--seed", 4, "--json",
    )  # fmt: skip
    assert code == 0
    facts = json.loads(out)
    text = facts["provenance"]["text"]
    assert (text["tokens"], text["first_position"], text["dtype"]) == (200, True, "bfloat16")
    assert text["document_names"] == ["standard input"]
    assert facts["directory"] is None
    assert facts["provenance"]["seed"] == 4
    assert len({(row["layer"], row["neuron"]) for row in facts["contexts"]}) == 9
    assert any(sentence.startswith("On text") for sentence in facts["findings"])


def test_activations_on_the_sample_that_comes_along(run, tiny):
    code, out, _ = run("activations", tiny, "--length", 128, "--tokens", 500)
    assert code == 0
    assert "On text" in out
    whole = json.loads(run("activations", tiny, "--length", 128, "--tokens", 0, "--json")[1])["provenance"]["text"]
    assert whole["document_names"] == ["sample"]
    assert whole["tokens"] > 8000


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (["MODEL", "--text", "/no/such"], 2, "PathNotFound"),
    (["MODEL", "--text", "EMPTY"], 2, "TextTooShort"),
    (["MODEL", "--text", "LATIN"], 2, "this is not UTF-8"),
    (["MODEL", "--length", "4096"], 2, "has only 128 positions"),
    (["MODEL", "--length", "64", "--dtype", "float8"], 2, "dtype is 'float8'"),
    (["MODEL", "--length", "64", "--device", "nowhere"], 2, "BadOption: device is 'nowhere': Expected one of cpu"),
    (["MODEL", "--length", "64", "--device", "meta"], 2, "device is 'meta'"),
    (["MODEL", "--length", "64", "--layers", "9"], 2, "there is no layer 9"),
    (["MODEL", "--length", "64", "--neurons", "0:1"], 2, "contexts is 0"),
    (["MODEL", "--length", "64", "--contexts", "2", "--neurons", "0:99"], 2, "layer 0 has no neuron 99"),
    (["MODEL", "--length", "64", "--activation", "gelu"], 3, "FactorsDisagree"),
    (["BARE"], 2, "NoTokenizer"),
    (["ROUTED", "--length", "64"], 3, "routed experts run batched"),
])  # fmt: skip
def test_activations_that_cannot_be_run(run, tiny, tmp_path, arguments, code, words):
    from .text.tiny_models import save

    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "latin.txt").write_bytes(b"Gr\xfc\xdfe")
    names = {"MODEL": tiny, "EMPTY": tmp_path / "empty.txt", "LATIN": tmp_path / "latin.txt"}
    if "BARE" in arguments:
        names["BARE"] = save(tmp_path / "bare", "llama", tokenizer=False)
    if "ROUTED" in arguments:
        names["ROUTED"] = save(tmp_path / "routed", "mixtral")
    found, out, err = run(
        "activations", *(names.get(argument, argument) for argument in arguments), "-o", tmp_path / "out"
    )
    assert found == code
    assert words in err
    assert out == ""
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_ls_explains_the_columns_of_text(run):
    out = run("ls", "measures")[1]
    for name in (
        "gate_mean_text",
        "quadrant_plus_minus_text",
        "_text_se",
        "_text_minus_gaussian",
        "output_energy_text",
    ):
        assert f"\n{name} " in out


# -- causal ---------------------------------------------------------------------------------------


@pytest.fixture
def causal(run, tmp_path):
    """Run the command on a tiny model and text; further arguments go behind."""
    from .text.tiny_models import save, words

    model = save(tmp_path / "tiny", "llama")
    (tmp_path / "text.txt").write_text(words(400))
    short = ["--text", tmp_path / "text.txt", "--length", 32, "--tokens", 128, "--calibration", 128]
    return lambda *more, out=tmp_path / "out": run("causal", model, "-o", out, *short, *more)


def test_causal(run, causal, tmp_path):
    import pandas as pd

    code, out, err = causal("--interventions", "identity, exchange,zero_ablation")
    assert code == 0, err
    assert "the runs take about" in err
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line[:1].isalpha()}
    assert lines["identity"][1:4] == ["0", "0", "0"]
    assert float(lines["exchange"][2]) > 0
    written = {
        path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()
    }
    assert written == {
        "causal.parquet", "causal.csv", "provenance.json", "figures/causal_heatmap.png", "figures/causal_profile.png",
        "figures/causal_heatmap_spared.png", "figures/causal_heatmap.svg", "figures/causal_profile.svg",
        "figures/causal_heatmap_spared.svg",
    }  # fmt: skip
    frame = pd.read_parquet(tmp_path / "out/causal.parquet")
    assert len(frame) == 9
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "out/causal.csv")[["kl"]], frame[["kl"]])
    pictures = {path: path.read_bytes() for path in (tmp_path / "out/figures").iterdir()}
    for path in pictures:
        path.unlink()
    assert run("plot", tmp_path / "out")[:2] == (0, f"wrote {tmp_path / 'out/figures'}\n")
    assert {path: path.read_bytes() for path in (tmp_path / "out/figures").iterdir()} == pictures
    provenance = json.loads((tmp_path / "out/provenance.json").read_text())
    assert provenance["model_type"] == "llama"
    assert provenance["command"][0] == "glu-probe"
    assert provenance["text"]["sequences"] == provenance["calibration"]["sequences"] == 4


def test_causal_options_are_heeded(causal, tmp_path):
    code, out, err = causal(
        "--interventions", "exchange", "--layers", "1:3", "--together", "--spare", 0, "--first-position", "--seed", 4,
        "--dtype", "bfloat16", "--subset", "exchange_asymmetry:0.2", "--no-figures", "--json",
    )  # fmt: skip
    assert code == 0, err
    facts = json.loads(out)
    assert [row["layers"] for row in facts["costs"]] == ["1-2"] * 2
    assert facts["costs"][0]["neurons"] == "top 20 % by exchange_asymmetry"
    assert facts["costs"][0]["kl_spared"] is None
    options = facts["provenance"]["options"]
    assert (options["first_position"], options["dtype"], options["seed"]) == (True, "bfloat16", 4)
    assert not (tmp_path / "out/figures").exists()


def test_causal_by_a_measure_on_text(causal):
    rows = json.loads(causal("--interventions", "exchange", "--subset", "exchange_asymmetry_text:0.1", "--json")[1])[
        "costs"
    ]
    assert len(rows) == 6
    assert rows[0]["neurons"] == "top 10 % by exchange_asymmetry_text"


def test_causal_goes_on_where_it_was_interrupted(causal, tmp_path, monkeypatch):
    from glu_probe.text import runs

    whole = json.loads(causal("--interventions", "exchange", "--json", out=tmp_path / "whole")[1])["costs"]
    real, calls = runs.Runs.costs, []

    def stopping(self, target, cases, index):
        calls.append(target.layers)
        if calls.count("1") == 1:
            raise KeyboardInterrupt
        return real(self, target, cases, index)

    monkeypatch.setattr(runs.Runs, "seconds", lambda *_: 1.0)
    monkeypatch.setattr(runs.Runs, "costs", stopping)
    code, out, err = causal("--interventions", "exchange")
    assert code == 130
    assert f"interrupted: 1 finished in {tmp_path / 'out/parts'}: the same command goes on from there" in err
    assert out == ""
    code, _, err = causal("--interventions", "zero_ablation")
    assert code == 2
    assert "parts of another run: interventions differs" in err
    calls.append("1")
    code, out, _ = causal("--interventions", "exchange", "--json")
    assert code == 0
    assert calls == ["0", "1", "1", "1", "2"]
    assert json.loads(out)["costs"] == whole
    assert not (tmp_path / "out/parts").exists()


def test_causal_interrupted_at_once_leaves_nothing(causal, tmp_path, monkeypatch):
    from glu_probe.text import language_model

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(language_model.LanguageModel, "load", stop)
    code, _, err = causal()
    assert code == 130
    assert "interrupted: nothing was finished" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("arguments", "said"), [
    (["--interventions", "swap"], "there is no intervention 'swap'"),
    (["--subset", "exchange_asymmetry"], "subset 'exchange_asymmetry' is not understood"),
    (["--subset", "exchange_asymmetry:0.9"], "is not understood"),
    (["--subset", "nothing_text:0.1"], "gate_std_text"),
    (["--text", "/no/such.txt"], "hint: Check the spelling and give an existing file or directory, - for standard input"),
    (["--subset", "nothing:0.1"], "hint: There are query_norm, value_gain, abs_cos_qk, "),
    (["--layers", "9"], "there is no layer 9"),
    (["--dtype", "float8"], "dtype is 'float8'"),
])  # fmt: skip
def test_causal_with_wrong_options(causal, tmp_path, arguments, said):
    code, out, err = causal(*arguments)
    assert code == 2
    assert said in err
    assert out == ""
    assert not (tmp_path / "out").exists()


def test_ls_interventions(run):
    from glu_probe.text.interventions import INTERVENTIONS

    code, out, _ = run("ls", "interventions")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(INTERVENTIONS)
    assert [row["name"] for row in json.loads(run("ls", "interventions", "--json")[1])] == list(INTERVENTIONS)
