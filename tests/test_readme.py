"""README says what the code does: its table of families is the table, its examples work. See test_docs.py for docs/."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

import glu_probe as gp
from glu_probe.checkpoint.families import FAMILIES
from glu_probe.checkpoint.known_families import PLAIN
from glu_probe.cli import application
from glu_probe.cli.listings import Listing
from glu_probe.family_table import COMMAND, markdown, renewed

README = Path(__file__).parents[1] / "README.md"


def rows(text: str) -> list[list[str]]:
    """Cells of the table's rows."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_families_in_readme_are_those_of_the_table():
    text = README.read_text(encoding="utf-8")
    assert renewed(text) == text, f"README.md is not current: run `{COMMAND}`"


def test_the_list_of_commands_has_every_command_and_what_ls_lists():
    text = README.read_text(encoding="utf-8")
    listed = re.findall(r"^glu-probe (\w+)", text.split("## On the command line")[1].split("\n## ")[0], re.M)
    assert sorted(listed) == sorted(application.ORDER)
    for page in (README, README.parent / "docs" / "errors.md"):
        found = re.search(r"glu-probe ls ((?:\w+\|)+\w+)", page.read_text(encoding="utf-8"))
        assert {*found[1].split("|")} == {each.value for each in Listing}, page.name


def test_every_family_has_a_row_and_every_row_all_cells():
    found = rows(markdown())
    assert len(found) == len(FAMILIES)
    assert {len(cells) for cells in found} == {6}
    for family, cells in zip(FAMILIES, found, strict=True):
        assert cells[0].split(", ") == list(family.names)
        assert all(name in cells[1] for name in family.gguf)
        assert all(name in cells[2] or cells[2].startswith(("separate", "fused")) for name in family.layouts[0].names)
        assert all(f"`{key}`" in cells[3] for key in family.activation.keys)
        assert (family.norm is None) == cells[4].startswith("none")
        assert (cells[5] == "-") == (
            family.norm is not None and family.missing is None and family.activation.adjust is None
        )
    assert all(name in markdown() for name in PLAIN)


@pytest.mark.parametrize(("name", "cells"), [
    ("phi3", ["fused", "`hidden_act`", "`post_attention_layernorm` (RMS)"]),
    ("gemma2", ["separate", "gelu_pytorch_tanh", "1 + w", "behind: `post_feedforward_layernorm`"]),
    ("gte", ["up first", "LN, bias"]),
    ("gpt_oss", ["gate and up take turns", "stored [in, out]", "up branch is limited"]),
    ("dbrx", ["experts below each other"]),
    ("stablelm", ["with `use_parallel_residual`, `input_layernorm`"]),
    ("olmo2", ["none: it reads the residual stream", "no norm stands in front"]),
    ("bitnet", ["coupled"]),
    ("llama4", ["routed: the router's score"]),
])  # fmt: skip
def test_what_a_row_says(name, cells):
    row = next(" | ".join(row) for row in rows(markdown()) if name in row[0].split(", "))
    for cell in cells:
        assert cell in row


def test_the_command_renews_a_stale_file(tmp_path):
    current = README.read_text(encoding="utf-8")
    stale = tmp_path / "README.md"
    stale.write_text(current.replace("| phi3", "| phi2"), encoding="utf-8")
    assert stale.read_text(encoding="utf-8") != current
    done = subprocess.run(
        [sys.executable, *COMMAND.split()[1:-1], str(stale)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert stale.read_text(encoding="utf-8") == renewed(current)


def test_a_file_without_the_marks_is_not_touched():
    with pytest.raises(ValueError, match="has no <!-- families"):
        renewed("# something else\n")


def test_the_registered_family_of_the_docs_works(tmp_path, monkeypatch):
    """The example as it stands there, on a checkpoint of that family."""
    import json

    from glu_probe.checkpoint import known_families

    monkeypatch.setattr(known_families, "_REGISTERED", {})
    monkeypatch.setattr(known_families, "_BY_NAME", dict(known_families._BY_NAME))
    truth = gp.testing.write_tiny_checkpoint("lfm2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "my_model", "hidden_act": "silu"}))
    page = README.parent / "docs" / "models.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    example = next(block for block in blocks if "register_family" in block).replace("path/to/my_model", str(tmp_path))
    scope = {"gp": gp}
    exec(example, scope)
    assert scope["report"].layers["exchange_asymmetry_mean"].notna().all()
    layer = gp.open_checkpoint(tmp_path, fold_norm=False).layer(0)
    torch.testing.assert_close(layer.query, truth[0].query.float())


def test_the_contrasts_of_the_docs_are_those_of_the_analysis():
    """Every difference that is quoted stands in the table that the analysis wrote."""
    root = README.parent
    table = pd.read_csv(root / "analyses" / "results" / "train_forms" / "contrasts.csv")
    written = {f"{row.difference:+.3f} ± {row.interval:.3f}".replace("-", "−") for row in table.itertuples()}
    page = (root / "docs" / "theory.md").read_text(encoding="utf-8")
    section = page.split("## Does breaking the symmetry help?")[1].split("\n## ")[0]
    quoted = re.findall(r"[+−]\d\.\d{3} ± \d\.\d{3}", section)
    assert len(quoted) == 5
    assert {*quoted} <= written
