"""Tokens of a GGUF file that is read where it lies: a neuron's card has them, and no more than the header moves for them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import glu_probe as gp
from glu_probe.checkpoint.remote import FIRST

from .writers import command_line, gguf_tensors, write_gguf

VOCABULARY = 32  # rows of the embedding of these files
SHAPE = {"d_mlp": 256, "d_model": 128, "layers": 3}  # so large that a file taken whole is seen


def write(path: Path, **options) -> Path:
    """A whole GGUF model: with the norm at its end, and an unembedding tied to the embedding."""
    path.parent.mkdir(exist_ok=True)
    tensors = gguf_tensors(**SHAPE)
    tensors["output_norm.weight"] = tensors["blk.0.ffn_norm.weight"] + 0.5
    return write_gguf(path, tensors, **{"vocabulary": VOCABULARY, **SHAPE, **options})


def address(server: str, request: pytest.FixtureRequest, directory: Path) -> str:
    """Where a server gives the files of a directory, up to their names."""
    served = request.getfixturevalue(server)
    if server == "web":
        served.roots["m"] = directory
        return f"{served.url}/m"
    served.add("org/name", directory)
    return "hf://org/name"


@pytest.mark.parametrize("server", ["hub", "web"])
@pytest.mark.parametrize("split", [1, 3])
def test_a_card_has_the_tokens_that_the_local_file_gives(server, split, request, tmp_path):
    first = write(tmp_path / "local/m.gguf", split=split)
    card = gp.neuron_card(f"{address(server, request, first.parent)}/{first.name}", 1, 5, top=3)
    local = gp.neuron_card(first, 1, 5, top=3)
    assert not {name for name in card.missing if name.startswith("tokens")}
    assert len(card.tokens) == 3 * 2 * 3
    assert card.tokens["token"].tolist() == [f"'token-{number}'" for number in card.tokens["token_id"]]
    pd.testing.assert_frame_equal(card.tokens, local.tokens, check_exact=True)


@pytest.mark.parametrize("server", ["hub", "web"])
def test_from_the_second_file_of_a_split_one_too(server, request, tmp_path):
    first = write(tmp_path / "local/m.gguf", split=3)
    opened = gp.open_checkpoint(f"{address(server, request, first.parent)}/m-00002-of-00003.gguf")
    assert opened.token_pieces() == [f"token-{number}" for number in range(VOCABULARY)]


def test_a_vocabulary_longer_than_the_first_look(hub, tmp_path):
    count = 20_000
    path = write(tmp_path / "local/m.gguf", vocabulary=count)
    hub.add("org/name", path.parent)
    header = sum(8 + len(f"token-{number}") + 4 for number in range(count))  # a length, a text, a score
    assert header > 4 * FIRST
    opened = gp.open_checkpoint("hf://org/name/m.gguf")
    hub.forget()
    assert opened.token_pieces() == [f"token-{number}" for number in range(count)]
    assert header < hub.sent_of("m.gguf") < 2 * header  # how long it is, only walking it tells


def test_the_command_prints_them(hub, tmp_path, capsys):
    path = write(tmp_path / "local/m.gguf")
    hub.add("org/name", path.parent)
    code, out, _ = command_line(capsys, "neuron", "hf://org/name/m.gguf", 1, 5)
    assert code == 0
    token = gp.neuron_card(path, 1, 5).tokens["token"].iloc[0]
    assert token in out


@pytest.mark.parametrize("server", ["hub", "web"])
def test_a_file_without_tokens_is_not_fetched_for_them(server, request, tmp_path):
    path = write(tmp_path / "local/m.gguf", vocabulary=0)
    ref = f"{address(server, request, path.parent)}/m.gguf"
    card = gp.neuron_card(ref, 1, 5, neighbours=0)
    assert {card.missing[f"tokens of {factor}"] for factor in ("query", "key", "value")} == {
        "the GGUF file holds no tokens"
    }
    needed = int(gp.open_checkpoint(path).describe()["bytes"].iloc[1])
    assert request.getfixturevalue(server).sent_of("m.gguf") <= needed + FIRST
