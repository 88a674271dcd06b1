"""Documents and reports beside their commands: metrics that exist, readable pictures, and no more than can be read."""

import re
from xml.etree import ElementTree

import pytest

from .rig import ROOT

SVG = "{http://www.w3.org/2000/svg}"


def test_every_metric_that_tuning_names_is_one_that_operating_explains() -> None:
    tables = re.findall(r"^\| `-.*\| ([^|]+) \|$", (ROOT / "docs/tuning.md").read_text(), flags=re.MULTILINE)
    named = {name for cell in tables for name in re.findall(r"`([a-z_]+)`", cell)}
    explained = set(
        re.findall(r"^- `([a-z_]+)` \(", (ROOT / "docs/operating.md").read_text(), flags=re.MULTILINE)
    )
    assert len(named) > 10
    assert named <= explained


@pytest.mark.parametrize("name", ["architecture", "worker", "control-plane"])
def test_a_picture_of_the_architecture_has_a_title_a_description_and_both_themes(name: str) -> None:
    text = (ROOT / f"docs/{name}.svg").read_text(encoding="utf-8")
    assert f"]({name}.svg)" in (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    picture = ElementTree.fromstring(text)
    assert picture.findtext(f"{SVG}title")
    assert picture.findtext(f"{SVG}desc")
    assert "prefers-color-scheme: dark" in text
    width, height = map(float, picture.attrib["viewBox"].split()[2:])
    places = [(float(word.attrib["x"]), float(word.attrib["y"])) for word in picture.iter(f"{SVG}text")]
    assert all(0 < x < width and 0 < y < height for x, y in places)


def test_the_documents_stay_short_enough_to_be_read() -> None:
    words = {path.name: len(path.read_text(encoding="utf-8").split()) for path in ROOT.glob("docs/*.md")}
    assert sum(words.values()) <= 45_000
    assert words["architecture.md"] <= 5_000


def test_of_each_kind_of_report_the_newest_alone_is_kept() -> None:
    dated = sorted(path.stem for path in ROOT.glob("bench/reports/2???-??-??-*.md"))
    kinds = {name[len("2026-11-23-") :]: name for name in dated}
    assert sorted(kinds.values()) == dated
