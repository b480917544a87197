"""What README and docs/ print as Python runs as it is printed, with nothing but the page: on a tiny model in the place of the sample."""

from __future__ import annotations

import json
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch

import glu_probe as gp
from glu_probe.checkpoint import known_families
from glu_probe.testing import write_tiny_checkpoint

from .support import llama_config, llama_tensors, write_checkpoint
from .text.tiny_models import save

ROOT = Path(__file__).parents[1]
LAYERS, D_MLP = 30, 880  # as many as the examples ask for


def examples(page: Path) -> list[str]:
    """The blocks of Python on a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)


PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if examples(page)]


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    """A language model with the layers of SmolLM2-135M."""
    place = tmp_path_factory.mktemp("sample") / "model"
    return save(place, "llama", num_hidden_layers=LAYERS, intermediate_size=D_MLP, max_position_embeddings=512)


@pytest.fixture
def somewhere(tmp_path, sample, monkeypatch) -> Path:
    """A directory to be in, with the models that stand for a reader's own where the pages have them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gp.sample_models, "fetch", lambda model: sample)
    base = llama_tensors()
    write_checkpoint(tmp_path / "org" / "base", base, llama_config())
    tuned = {name: tensor * (1 + 0.01 * torch.randn(tensor.shape)) for name, tensor in base.items()}
    write_checkpoint(tmp_path / "org" / "tuned", tuned, llama_config())
    own = tmp_path / "path" / "to" / "my_model"
    write_tiny_checkpoint("lfm2", own)
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"model_type": "my_model", "hidden_act": "silu"}))
    monkeypatch.setattr(known_families, "_REGISTERED", {})
    monkeypatch.setattr(known_families, "_BY_NAME", dict(known_families._BY_NAME))
    yield tmp_path
    plt.close("all")


def test_these_pages_have_examples():
    assert [page.stem for page in PAGES] == ["README", "comparing", "layers", "models", "neurons", "text", "theory"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run_as_they_are_printed(page, somewhere, capsys):
    """Every block after the ones above it, and with their names alone: a reader has nothing else."""
    names: dict[str, object] = {"__name__": "example"}
    for number, block in enumerate(examples(page)):
        exec(compile(block, f"{page.name}, example {number + 1}", "exec"), names)
    made = CHECKS.get(page.stem)
    assert made is None or made(names, somewhere)


# of a page, whether its examples gave what they speak of
CHECKS = {
    "README": lambda names, place: (place / "smollm2" / "report.html").exists() and len(names["report"].findings) > 4,
    "comparing": lambda names, place: (place / "compared" / "compare.html").exists(),
    "layers": lambda names, place: names["layer"].layer == 12 and names["directions"].shape[0] == 5,
    "neurons": lambda names, place: len(names["card"].contexts) > 0 and len(names["card"].tokens) > 0,
    "text": lambda names, place: set(names["costs"]["intervention"]) >= {"exchange", "bilinear_fit", "zero_ablation"},
    "theory": lambda names, place: round(names["full"].parameter_count / 1e9) == 481,
}
