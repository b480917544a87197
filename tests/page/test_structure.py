"""A page as markup and files: whole, self-contained, small, whatever the size of the model."""

from __future__ import annotations

import base64
import html
import io
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import glu_probe as gp
from glu_probe.measures.io_classes import IO_CONDITIONS
from glu_probe.page.html import Table, cell
from glu_probe.page.pictures import Picture, draw, render, save
from glu_probe.page.provenance import without_places
from glu_probe.page.report_pictures import report_pictures
from glu_probe.page.words import WORDS
from glu_probe.testing import write_tiny_checkpoint

from ..support import write_llama
from .reports import deep, mixture, with_contexts

VOID = {"meta", "img", "wbr", "br", "hr", "link", "input"}


class Outline(HTMLParser):
    """What a page holds; complains about tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.images, self.heads, self.ids, self.rows = [], [], [], [], {}
        self.bodies = 0

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if "id" in given:
            self.ids.append(given["id"])
        if tag == "img":
            self.images.append(given)
        if tag == "th":
            self.heads.append({"th": given, "button": None})
        if tag == "button" and self.open[-1] == "th":
            self.heads[-1]["button"] = given
        if tag in ("th", "td"):
            self.rows.setdefault(self.ids[-1], []).append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"


def outline(page: str) -> Outline:
    found = Outline()
    found.feed(page)
    found.close()
    assert found.open == []
    return found


@pytest.fixture(scope="module", params=["few", "deep", "mixture"])
def saved(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    make = {"few": lambda path: with_contexts(gp.probe(write_llama(path))), "deep": deep, "mixture": mixture}
    report = make[request.param](directory / "model")
    assert report.draw(directory / "out") == []
    return report, directory / "out"


def test_tags_are_balanced_and_ids_unique(saved):
    found = outline((saved[1] / "report.html").read_text(encoding="utf-8"))
    assert len(set(found.ids)) == len(found.ids)


def test_every_image_has_words_and_data(saved):
    found = outline((saved[1] / "report.html").read_text(encoding="utf-8"))
    assert len(found.images) == len(list((saved[1] / "figures").glob("*.png"))) >= 13
    for image in found.images:
        assert len(image["alt"]) > 10
        kind, data = image["src"].split(",")
        assert kind == "data:image/png;base64"
        with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
            assert picture.size[0] / picture.size[1] == pytest.approx(
                int(image["width"]) / int(image["height"]), rel=0.01
            )
            assert len(picture.convert("L").getcolors(256)) > 5  # something is drawn


def test_every_head_of_a_table_is_a_button_that_says_how_it_is_sorted(saved):
    found = outline((saved[1] / "report.html").read_text(encoding="utf-8"))
    assert len(found.heads) > 20
    for head in found.heads:
        assert head["th"]["scope"] == "col"
        assert head["th"]["aria-sort"] == "none"
        assert head["button"]["type"] == "button"


def test_tables_have_a_row_for_every_layer(saved):
    report, directory = saved
    page = (directory / "report.html").read_text(encoding="utf-8")
    body = page.split('<table id="layers"')[1].split("<tbody>")[1].split("</tbody>")[0]
    assert body.count("<tr>") == len(report.layers)
    assert ("–</td>" in body) == report.layers["no_mlp"].any()


def test_sizes_stay_in_bounds(saved):
    _, directory = saved
    assert (directory / "report.html").stat().st_size < 3e6
    drawings = {path.stem for path in (directory / "figures").glob("*.svg")}
    assert drawings == {path.stem for path in (directory / "figures").glob("*.png")}
    for name in drawings:
        path = directory / "figures" / f"{name}.svg"
        assert path.stat().st_size < 1e6, name
        root = ET.parse(path).getroot()
        assert root.tag.endswith("svg")
        assert sum(1 for _ in root.iter()) < 10_000, name


def test_what_was_assumed_stands_before_the_pictures(saved):
    report, directory = saved
    page = (directory / "report.html").read_text(encoding="utf-8")
    head = html.unescape(page[: page.index("<h2>Pictures</h2>")]).replace("\N{NO-BREAK SPACE}", " ")
    text = report.provenance["towers"]["text"]
    for words in (
        text["norm"],
        text["activation"],
        text["activation_source"],
        *report.provenance["methods"]["spectra"],
    ):
        assert words in head
    for sentence in report.findings[:3]:
        assert sentence in head


def test_the_input_is_named_beside_the_place_of_the_model(saved):
    report, directory = saved
    page = html.unescape((directory / "report.html").read_text(encoding="utf-8")).replace("\N{NO-BREAK SPACE}", " ")
    first, second = report.findings[:2]
    assert "glu-probe activations MODEL --text FILE" in second
    assert 0 < page.index(second) - page.index(first) - len(first) < 60  # nothing between them but markup


def test_a_page_names_the_model_and_no_directory_of_the_machine(saved, tmp_path):
    report, directory = saved
    page = (directory / "report.html").read_text(encoding="utf-8")
    place = str(directory.parent)
    assert report.provenance["ref"] == f"{place}/model"  # what opens it again
    assert "path" not in report.provenance
    assert place not in page
    assert "&#34;ref&#34;: &#34;model&#34;" in page or '"ref": "model"' in page
    told = gp.Report(report.layers, report.neurons, report.classes, report.provenance | {
        "notes": [f"the config in {place}/config.json was not read"], "command": ["glu-probe", "report", place, "-o", "~/my own/out"],
    })  # fmt: skip
    for text in (told.to_html(), told.to_markdown()):
        assert place not in text
        assert "my own" not in text
        assert "config.json was not read" in text.replace("\\_", "_")


@pytest.mark.parametrize(("value", "shown"), [
    ("/home/me/models/a.gguf", "a.gguf"), ("/home/me/my models/a b.gguf", "a b.gguf"), ("~/a/b", "b"), ("/a/b/", "b"),
    (r"C:\\Users\\me\\a.gguf", "a.gguf"), ("D:/models/a", "a"), ("org/name", "org/name"), ("org/name@rev", "org/name@rev"),
    ("hf://org/name/a.gguf", "hf://org/name/a.gguf"), ("https://host/a/b.gguf", "https://host/a/b.gguf"), ("a/b", "a/b"),
    ("./a/b", "./a/b"), ("silu / relu", "silu / relu"), ("/", ""), (3, 3), (None, None), (True, True),
    ("/home/me/a: tensor x is not read", "a: tensor x is not read"), ("read from '/home/me/a', once", "read from 'a', once"),
    ("32 nats/token", "32 nats/token"), ({"a": ["/b/c", {"d": "/e/f"}]}, {"a": ["c", {"d": "f"}]}), ("--out=/a/b", "--out=b"),
])  # fmt: skip
def test_paths_from_the_root_are_shown_by_their_last_part(value, shown):
    assert without_places(value) == shown


def test_words_and_classes_are_explained_on_the_page(saved):
    page = html.unescape((saved[1] / "report.html").read_text(encoding="utf-8"))
    body = page.split('<table id="classes"')[1].split("</table>")[0]
    for name, cells in IO_CONDITIONS.items():
        assert "".join(f"<td>{cell}</td>" for cell in (name, *cells)) in body
    for term, meaning in WORDS.items():
        assert f"<dt>{term}</dt><dd>{meaning}</dd>" in page
    caption = page.split('<figure id="class_bars"')[1].split("</figure>")[0]
    assert all(colour in caption for colour in ("blue", "red", "green", "grey"))


def shades(ax) -> bool:
    """Whether values are drawn as light and dark: on a scale of colours, or as points of many."""
    mappables = [one for each in ax.figure.axes for one in each.collections if one.get_array() is not None]
    scales = {one.get_cmap().name for one in mappables} - {"Greys", "RdBu_r"}  # contours have numbers, RdBu_r two ends
    points = [len(np.unique(one.get_facecolor(), axis=0)) for one in ax.collections]
    return bool(scales) or max(points, default=0) > 4


def test_pictures_whose_light_and_dark_are_values_are_not_turned_round(saved):
    report, directory = saved
    page = (directory / "report.html").read_text(encoding="utf-8")
    found = {}
    for picture in report_pictures(report):
        ax = gp.figures.figure_axes(picture.size)
        picture.draw(ax)
        assert shades(ax) == picture.shaded, picture.name
        found[picture.name] = picture.shaded
        head = page.split(f'<figure id="{picture.name}"')[1].split(">")[0]
        assert ("shaded" in head) == picture.shaded, picture.name
    assert {"phase_diagram", "phase_diagram_neurons", "heatmap", "neuron_scatter"} <= {n for n, s in found.items() if s}
    assert not found["profile_cos_kv"]


def test_nothing_is_fetched(saved):
    page = (saved[1] / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page
    for reference in ("http://", "https://", 'src="/', "<link", "@import", "url("):
        assert reference not in page


def test_the_same_report_gives_the_same_files(saved, tmp_path):
    report, directory = saved
    report.draw(tmp_path)
    for path in directory.rglob("*.*"):
        assert path.read_bytes() == (tmp_path / path.relative_to(directory)).read_bytes(), path.name


def test_million_points_are_an_image_inside_a_drawing(tmp_path):
    rng = np.random.default_rng(0)
    neurons = pd.DataFrame({
        "layer": np.repeat(np.arange(80), 15_000), "abs_cos_qk": rng.random(1_200_000), "cos_kv": rng.random(1_200_000),
    })  # fmt: skip
    for some in (neurons, neurons.sample(19_000, random_state=0)):
        png, svg = render(lambda ax, some=some: gp.figures.neuron_scatter(some, ax=ax), (6, 4))
        assert png.startswith(b"\x89PNG")
        assert len(svg) < 1e6
        assert b"<image" in svg


def test_a_picture_that_is_not_drawn_leaves_no_old_file(tmp_path):
    def nothing(ax):
        raise gp.errors.BadOption("there is nothing to draw")

    first, _ = draw([Picture("one", "One", "", (3, 2), lambda ax: ax.plot([0, 1]))])
    save(first, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"one.png", "one.svg"}
    second, troubles = draw([Picture("one", "One", "", (3, 2), nothing)])
    save(second, tmp_path)
    assert (troubles, second[0].reason) == ([], "there is nothing to draw")
    assert not list(tmp_path.iterdir())


def test_a_frame_without_rows_is_a_table_without_rows():
    table = Table.of("t", "", pd.DataFrame({"a": [], "b": []}))
    assert (table.columns, list(table.rows), table.numeric) == (["a", "b"], [], [True, True])


@pytest.mark.parametrize(("value", "text"), [
    (np.float32(0.1), "0.1"), (1234567.0, "1.235e+06"), (7, "7"), (np.int64(7), "7"), (float("nan"), "–"), (pd.NA, "–"),
    (None, "–"), ("", ""), (float("inf"), "inf"), (True, "True"),
])  # fmt: skip
def test_cells(value, text):
    assert cell(value) == text


def test_a_model_whose_function_is_not_known(tmp_path):
    write_tiny_checkpoint("olmo2", tmp_path / "model", layers=3)
    page = gp.probe(tmp_path / "model", samples=4).to_html()
    found = outline(page)
    assert {"heatmap", "stable_ranks", "profile_cos_kv"} <= {*found.ids}
    assert not {"phase_diagram", "phase_diagram_neurons", "relu_ratio"} & {*found.ids}
    assert "<b>Between bilinear and ReLU</b>: not drawn, every value of exchange_asymmetry is missing" in page
    head = page[: page.index("<h2>Pictures</h2>")]
    assert "cannot be told from these weights: no norm stands in front of the MLP" in head
    assert "isotropic Gaussian input" not in head
