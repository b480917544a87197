"""Where results of a run stand already: the same run may replace them, another one only when told to."""

from __future__ import annotations

import pytest

import glu_probe as gp
from glu_probe.cli import application, saving

from .support import write_llama
from .text.tiny_models import save, words


def contents(directory) -> dict:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_report_is_not_replaced_by_another_unasked(run, llama, tmp_path):
    out = tmp_path / "out"
    common = ("-o", out, "--no-figures")
    assert run("report", llama, *common)[0] == 0
    before = contents(out)
    for other in (["--layers", "0:2"], ["--seed", 3], ["--no-fold-norm"]):
        code, text, err = run("report", llama, *common, *other)
        assert (code, text) == (2, "")
        assert (
            f"error: BadOption: {out}: this directory holds a report of another run: `glu-probe report {llama} -o"
            in err
        )
        assert "--fresh" in err
        assert contents(out) == before
    other = write_llama(tmp_path / "other", layers=2)
    assert run("report", other, *common)[0] == 2
    assert contents(out) == before
    # the same run, on other workers and with another choice of what is written
    code, _, err = run("report", "--json", llama, "-o", out, "--backend", "threads", "--workers=2", "--no-figures")
    assert (code, err) == (0, "")
    assert gp.load_report(out).layers["layer"].nunique() == 12
    assert run("report", llama, *common, "--layers", "0:2", "--fresh")[0] == 0
    assert gp.load_report(out).layers["layer"].tolist() == [0, 1]


def test_a_report_of_python_is_not_replaced_either(run, llama, tmp_path):
    gp.probe(llama, layers=[0], samples=8).save(tmp_path / "out", figures=False)
    code, _, err = run("report", llama, "-o", tmp_path / "out", "--no-figures")
    assert code == 2
    assert "holds a report of another run: a run in Python on llama" in err


def test_results_of_two_kinds_are_not_mixed(run, llama, tmp_path):
    gp.probe(llama, layers=[0], samples=8).save(tmp_path / "report", figures=False)
    gp.compare(llama, llama, layers=[0], samples=8, rounding=False).save(tmp_path / "compared", figures=False)
    for arguments, place, words_ in (
        (
            ("compare", llama, llama),
            "report",
            "holds a report, and its files would be mixed with those of a comparison",
        ),
        (("causal", llama), "report", "holds a report, and its files would be mixed with those of costs"),
        (("report", llama), "compared", "holds a comparison, and its files would be mixed with those of a report"),
        (("activations", llama), "compared", "holds a comparison"),
        (("demo", "--model", "gemma3"), "compared", "holds a comparison"),
    ):
        before = contents(tmp_path / place)
        for fresh in ([], ["--fresh"]):
            code, _, err = run(*arguments, "-o", tmp_path / place, *fresh)
            assert code == 2, arguments
            assert words_ in err
            assert contents(tmp_path / place) == before


@pytest.mark.parametrize("command", ["activations", "causal", "compare"])
def test_other_commands_ask_too(run, tmp_path, command):
    model, out = save(tmp_path / "tiny", "llama"), tmp_path / "out"
    (tmp_path / "text.txt").write_text(words(400))
    text = ("--text", tmp_path / "text.txt", "--length", 32, "--tokens", 128)
    first = {
        "activations": (model, *text), "causal": (model, *text, "--calibration", 128, "--interventions", "exchange"),
        "compare": (model, model, "--samples", 8, "--no-rounding"),
    }[command]  # fmt: skip
    common = (command, *first, "-o", out, "--no-figures")
    assert run(*common)[0] == 0
    before = contents(out)
    code, _, err = run(*common, "--layers", 1)
    assert code == 2
    assert f"of another run: `glu-probe {command}" in err
    assert contents(out) == before
    assert run(*common)[0] == 0
    assert run(*common, "--layers", 1, "--fresh")[0] == 0
    assert contents(out) != before


@pytest.mark.parametrize(("typed", "deciding"), [
    (["report", "m", "-o", "a", "--layers", "0:2"], ["report", "m", "--layers", "0:2"]),
    (["report", "--out=a", "m", "-ob"], ["report", "m"]),
    (["report", "m", "--json", "--no-figures", "--workers", "3", "--seed", "1"], ["report", "m", "--seed", "1"]),
    (["report", "m", "--only", "--workers"], ["report", "m", "--only"]),
])  # fmt: skip
def test_which_words_decide(typed, deciding):
    assert saving._deciding(typed) == deciding


def test_options_that_decide_nothing_are_options_there_are():
    import typer

    from glu_probe.cli import app

    taken = {
        word: each.is_flag
        for command in typer.main.get_command(app).commands.values()
        for each in command.params
        for word in (*each.opts, *each.secondary_opts)
        if word.startswith("-")
    }
    for word, following in saving._INDIFFERENT.items():
        assert taken[word] == (following == 0), word


def test_provenance_has_what_was_typed(run, llama, tmp_path):
    run("report", llama, "-o", tmp_path / "out", "--no-figures", "--layers", "0", "--debug")
    wanted = ["glu-probe", "report", str(llama), "-o", str(tmp_path / "out"), "--no-figures", "--layers", "0"]
    assert gp.load_report(tmp_path / "out").provenance["command"] == wanted
    assert application.typed == wanted[1:]
