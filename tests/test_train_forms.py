"""The training analysis: what makes its comparison fair, and that it runs from end to end."""

from __future__ import annotations

import json
import math
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from glu_probe.forms import BilinearAttentionMLP, GatedMLP, RankOneBilinearMLP, StandardMLP

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "analyses"))

import form_tables  # noqa: E402
import small_transformer  # noqa: E402
import text_splits  # noqa: E402
import train_forms  # noqa: E402
from small_transformer import SPECS, Recipe, SmallTransformer  # noqa: E402
from text_splits import Corpus  # noqa: E402

RECIPE = Recipe(d_model=24, layers=2, heads=2, context=16, batch=2, vocabulary=300)


@pytest.fixture(scope="module")
def text() -> str:
    """Some 170 kB of Python, which is a text like any other."""
    return "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "glu_probe").glob("*.py")))


@pytest.fixture(scope="module")
def corpus(text) -> Corpus:
    return Corpus.of(text[:40_000], RECIPE.vocabulary)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- the text ---------------------------------------------------------------------------------------


def test_the_split_is_disjoint_complete_and_in_whole_blocks():
    lines = [f"line {number}\n" for number in range(1030)]
    parts = text_splits.split_text("".join(lines))
    blocks = [block for part in text_splits.PARTS for block in parts[part]]
    assert sorted(line for block in blocks for line in block.splitlines(keepends=True)) == sorted(lines)
    assert {len(block.splitlines()) for block in blocks} == {text_splits.BLOCK, 1030 % text_splits.BLOCK}
    assert (len(parts["tune"]), len(parts["validation"])) == (2, 2)
    assert parts["validation"][0].startswith("line 475\n")


def test_a_short_text_has_all_three_parts_and_one_too_short_is_refused():
    assert all(text_splits.split_text("a\n" * 20).values())
    with pytest.raises(ValueError, match="19 lines"):
        text_splits.split_text("a\n" * 19)


def test_the_tokenizer_gives_back_any_text_and_is_the_same_every_time(text):
    blocks = text_splits.split_text(text)["train"]
    first, second = (text_splits.train_tokenizer(blocks, 400) for _ in range(2))
    strange = text[:500] + "\u00e6\u2014\u4e2d \n\n\t\U0001f600 <unk>"
    assert first.get_vocab_size() == 400
    assert first.decode(first.encode(strange).ids) == strange
    assert first.to_str() == second.to_str()


def test_only_the_training_part_teaches_the_tokenizer():
    plain = "".join(f"alpha beta {number}\n" for number in range(500))
    held_out = plain.replace("alpha beta 499\n", "zebra " * 500 + "\n")
    assert held_out != plain
    for text in (plain, held_out):
        assert "zebra" not in "".join(text_splits.split_text(text)["train"])
    corpora = [Corpus.of(text, 300) for text in (plain, held_out)]
    np.testing.assert_array_equal(corpora[0].tokens["train"], corpora[1].tokens["train"])
    assert corpora[0].sha256 != corpora[1].sha256


def test_bits_per_byte_counts_bytes_of_utf8():
    text = "".join(f"\u00e6 {number}\n" for number in range(20))
    corpus = Corpus.of(text, 256)  # no merges: a token is a byte
    assert corpus.bytes["validation"] == len(corpus.tokens["validation"]) == len("\u00e6 19\n".encode())
    assert corpus.bits_per_byte(math.log(2)) == pytest.approx(1)


@pytest.mark.slow
def test_the_king_james_bible_is_read_without_running_its_file():
    text = text_splits.king_james()
    assert text.startswith("In the beginning God created the heaven and the earth.")
    assert text.endswith("Amen.")
    assert not set("[]\r\\") & set(text)
    assert len(text.splitlines()) > 4000


# -- the comparison is fair ---------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [train_forms.QUICK_RECIPE, Recipe()], ids=["quick", "full"])
def test_every_form_has_the_same_number_of_parameters_within_1_percent(recipe):
    counts = {
        name: spec.build(recipe.d_model, recipe.mlp_parameters, device="meta").parameter_count
        for name, spec in SPECS.items()
    }
    assert {name: count for name, count in counts.items() if abs(count / recipe.mlp_parameters - 1) > 0.01} == {}


def test_the_forms_are_those_of_the_library():
    assert {spec.kind for spec in SPECS.values()} == {StandardMLP, RankOneBilinearMLP, GatedMLP, BilinearAttentionMLP}


def test_models_of_a_seed_differ_in_their_mlps_only():
    models = [SmallTransformer(RECIPE, spec, 300, seed=3) for spec in SPECS.values()]
    first = models[0].state_dict()
    shared = {name for name in first if ".mlp." not in name}
    assert len(shared) > 10
    for model in models[1:]:
        state = model.state_dict()
        assert {name for name in state if ".mlp." not in name} == shared
        assert all(torch.equal(state[name], first[name]) for name in shared)
    other = SmallTransformer(RECIPE, SPECS["bilinear"], 300, seed=4)
    assert not torch.equal(other.head, models[0].head)


@pytest.mark.parametrize("form", SPECS)
def test_every_mlp_starts_equally_loud(form):
    recipe = Recipe(layers=3)
    mlp = small_transformer.initial_mlp(recipe, SPECS[form], torch.Generator().manual_seed(0))
    x = torch.randn(4096, recipe.d_model, generator=torch.Generator().manual_seed(1))
    assert mlp(x).square().mean().item() == pytest.approx(1 / 6, rel=0.1)
    assert all(factor.requires_grad for factor in mlp.factors.values())


def test_the_batches_of_a_seed_are_the_same_whatever_the_form_and_cover_the_text_once_an_epoch():
    tiles = 1000 // RECIPE.context
    starts = small_transformer.window_starts(1000, RECIPE, steps=tiles // 2 - 1, seed=5)
    np.testing.assert_array_equal(starts, small_transformer.window_starts(1000, RECIPE, tiles // 2 - 1, 5))
    assert starts.shape == (tiles // 2 - 1, RECIPE.batch)
    assert len(np.unique(starts)) == starts.size
    assert starts.max() + RECIPE.context + 1 <= 1000
    assert not np.array_equal(starts, small_transformer.window_starts(1000, RECIPE, tiles // 2 - 1, 6))


def test_the_learning_rate_rises_to_its_peak_and_falls_to_0():
    factors = [small_transformer.rate_factor(step, 100, 0.05) for step in range(101)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert max(factors) == 1
    assert factors[100] == pytest.approx(0, abs=1e-12)
    assert all(a >= b for a, b in pairwise(factors[4:]))


# -- the model ------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_position_sees_itself_and_those_before_it():
    model = SmallTransformer(RECIPE, SPECS["gated silu"], 300, seed=0)
    tokens = torch.arange(12)[None]
    changed = tokens.clone()
    changed[0, 7] = 99
    same = torch.isclose(model(tokens), model(changed), atol=1e-5).all(-1)[0]
    assert same.tolist() == [True] * 7 + [False] * 5


@torch.no_grad()
def test_rotary_products_depend_on_the_distance_alone():
    model = SmallTransformer(RECIPE, SPECS["bilinear"], 300, seed=0)
    x = torch.randn(1, 1, 1, 12).expand(1, 1, RECIPE.context, 12)
    turned = small_transformer.rotated(x, model.cos, model.sin)[0, 0]
    products = turned @ turned.T
    torch.testing.assert_close(products[2, 5], products[9, 12])
    torch.testing.assert_close(products.diagonal(), x[0, 0].square().sum(-1))


def test_evaluation_is_the_mean_over_whole_windows():
    model = SmallTransformer(RECIPE, SPECS["bilinear"], 300, seed=0)
    tokens = np.arange(3 * RECIPE.context + 7) % 300
    windows = torch.tensor(np.stack([tokens[start : start + RECIPE.context + 1] for start in (0, 16, 32)]))
    assert small_transformer.evaluate(model, tokens, RECIPE) == pytest.approx(model.loss(windows).item(), rel=1e-5)


def test_a_training_repeats_to_the_last_bit_and_learns(corpus, one_thread):
    run = train_forms.Run("final", "gated silu", rate=1e-2, seed=0, steps=30)
    first, second = (train_forms.perform(run, RECIPE, corpus) for _ in range(2))
    first.pop("seconds"), second.pop("seconds")
    assert first == second
    assert first["train_loss"] < math.log(corpus.vocabulary) - 0.5
    assert not first["diverged"]


def test_a_diverged_training_is_reported_as_one(corpus, one_thread):
    run = train_forms.Run("tune", "bilinear", rate=1e30, seed=0, steps=10)
    result = train_forms.perform(run, RECIPE, corpus)
    assert result["diverged"]
    assert math.isnan(result["loss"])


def test_stability_of_a_loss_that_rises():
    training = small_transformer.Training([5.0, 3.0, 4.0, 2.0], [9.0, 1.0, 2.0, 1.0], 0.0)
    assert train_forms.stability(training, 4) == {
        "train_loss": 2.0,
        "largest_rise": 1.0,
        "largest_gradient_norm": 2.0,
    }


# -- symmetry measures --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", SPECS)
def test_symmetry_is_measured_where_it_is_defined(form):
    rows = train_forms.symmetry_rows(SmallTransformer(RECIPE, SPECS[form], 300, seed=0), seed=0)
    columns = {"standard": set(), "bilinear": set(), "rank-1": set(), "gated": set()}
    directions = {"layer", "abs_cos_qk", "abs_cos_qk_null", "qk_norm"}
    function = {"query_norm", "exchange_asymmetry", "scaling_asymmetry", "bilinear_share"}
    columns |= {"bilinear": directions, "rank-1": directions, "gated": directions | function}
    expected = columns.get(form.split()[0], set())
    assert [set(row) for row in rows] == [expected] * (2 if expected else 0)
    assert all(math.isfinite(value) for row in rows for value in row.values())


def test_the_gain_of_the_norm_is_part_of_the_query():
    model = SmallTransformer(RECIPE, SPECS["gated silu"], 300, seed=0)
    before = train_forms.symmetry_rows(model, seed=0)[0]
    with torch.no_grad():
        model.blocks[0].mlp_norm.weight *= 3
    after = train_forms.symmetry_rows(model, seed=0)[0]
    assert after["query_norm"] == pytest.approx(3 * before["query_norm"], rel=1e-5)
    assert after["abs_cos_qk"] == pytest.approx(before["abs_cos_qk"], rel=1e-5)
    assert after["exchange_asymmetry"] > before["exchange_asymmetry"]


# -- tables -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9, 60])
@pytest.mark.parametrize("probability", [0.5, 0.95, 0.99])
def test_the_quantile_is_students(degrees, probability):
    expected = stats.t.ppf((1 + probability) / 2, degrees)
    assert form_tables.t_quantile(degrees, probability) == pytest.approx(expected, rel=1e-6)


def test_the_interval_is_students():
    values = [3.1, 2.9, 3.3, 3.0]
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert form_tables.t_interval(values) == pytest.approx(((low + high) / 2, (high - low) / 2))
    assert form_tables.t_interval([2.0])[0] == 2.0
    assert math.isnan(form_tables.t_interval([2.0])[1])
    assert all(map(math.isnan, form_tables.t_interval([])))


def finals_of(losses: dict[str, list[float]]) -> pd.DataFrame:
    """Final runs with these losses at seeds 0, 1, ...; NaN is a diverged run."""
    constant = {"rate": 0.01, "largest_rise": 0.0, "largest_gradient_norm": 1.0, "seconds": 1.0, "train_loss": 1.0}
    sizes = {"d_mlp": 8, "mlp_parameters": 1, "mlp_flops_per_token": 1, "model_parameters": 1}
    return pd.DataFrame(
        {"form": form, "seed": seed, "loss": loss, "bits_per_byte": loss, "diverged": math.isnan(loss)}
        | constant
        | sizes
        for form, values in losses.items()
        for seed, loss in enumerate(values)
    )


def test_differences_are_of_runs_of_the_same_seed():
    finals = finals_of({"gated silu": [1.0, 2.0, 3.0], "bilinear": [1.1, 2.2, 3.3]})
    paired = form_tables.paired_difference(finals.sample(frac=1, random_state=0), "gated silu", "bilinear")
    assert paired["difference"] == pytest.approx(-0.2)
    assert paired["interval"] == pytest.approx(stats.t.ppf(0.975, 2) * 0.1 / 3**0.5, rel=1e-6)
    assert (paired["pairs"], paired["lower"]) == (3, 3)


def test_diverged_runs_are_counted_and_in_no_mean():
    finals = finals_of({"gated silu": [1.0, 2.0, math.nan], "bilinear": [1.5, 1.0, 1.0]})
    summary = form_tables.summary_frame(finals).set_index("form")
    assert summary.loc["gated silu", ["runs", "diverged", "loss"]].tolist() == [3, 1, 1.5]
    assert form_tables.contrast_frame(finals)["pairs"].tolist() == [2]


# -- the whole ----------------------------------------------------------------------------------------


def test_a_grid_grows_where_its_best_is_at_the_edge():
    assert train_forms.extended([1.0, 2.0, 4.0], 2.0) == [1.0, 2.0, 4.0]
    assert train_forms.extended([1.0, 2.0, 4.0], 1.0) == [0.5, 1.0, 2.0, 4.0]
    assert train_forms.extended([1.0, 2.0, 4.0], 4.0) == [1.0, 2.0, 4.0, 8.0]
    frame = pd.DataFrame({"rate": [1.0, 2.0, 4.0], "loss": [3.0, 2.0, math.nan]})
    assert train_forms.best_rate(frame) == 2.0


def test_a_journal_goes_on_after_a_torn_line_and_ignores_other_recipes(tmp_path, corpus):
    run = train_forms.Run("final", "bilinear", 0.01, 0, 5)
    result = {**train_forms.asdict(run), "loss": 1.0}
    journal = train_forms.Journal(tmp_path / "runs.jsonl", RECIPE, corpus)
    journal.add(result)
    with journal.path.open("a") as file:
        file.write('{"stamp": {"rec')
    again = train_forms.Journal(journal.path, RECIPE, corpus)
    assert again.results == {run: result}
    again.add({**result, "seed": 1})
    assert [json.loads(line)["result"]["seed"] for line in journal.path.read_text().splitlines()] == [0, 1]
    assert train_forms.Journal(journal.path, Recipe(), corpus).results == {}


def test_a_text_too_short_for_a_window_is_refused(tmp_path, capsys):
    source = tmp_path / "text.txt"
    source.write_text("a\n" * 40)
    for text, said in ((source, "tune part has"), (tmp_path / "none.txt", "no such file")):
        with pytest.raises(SystemExit):
            train_forms.main(["--quick", "--text", str(text), "--out", str(tmp_path / "out")])
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_quick_runs_from_end_to_end_and_a_second_time_from_its_journal(tmp_path, text, capsys):
    source = tmp_path / "text.txt"
    source.write_text(text, encoding="utf-8")
    out = tmp_path / "out"
    command = ["--quick", "--text", str(source), "--out", str(out)]
    train_forms.main(command)
    assert "diverged" in capsys.readouterr().out
    frames = {path.stem: pd.read_csv(path) for path in out.glob("*.csv")}
    assert {*frames} == {"summary", "contrasts", "losses", "learning_rates", "measures"}
    assert len(frames["losses"]) == 6
    assert frames["learning_rates"].groupby("form")["chosen"].sum().tolist() == [1, 1, 1]
    assert {path.name for path in out.glob("*.png")} == {"train-forms.png", "train-forms-symmetry.png"}
    journal = (out / "runs.jsonl").read_text()
    (out / "summary.csv").unlink()
    train_forms.main(command)
    assert (out / "runs.jsonl").read_text() == journal
    pd.testing.assert_frame_equal(pd.read_csv(out / "summary.csv"), frames["summary"])
