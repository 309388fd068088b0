from xml.etree import ElementTree

from trueup.reports.standalone import standalone

SVG = "{http://www.w3.org/2000/svg}"


def figure(name, title="Bias"):
    return {
        "kind": "lines",
        "id": name,
        "title": title,
        "caption": "What it shows. " * 12,
        "x": {"label": "σ", "scale": "log"},
        "y": {"label": "share", "scale": "log"},
        "series": [
            {"name": series, "x": [0.1, 1.0], "y": [0.01, 0.5], "mark": mark}
            for series, mark in (("none", "line"), ("exact", "dashes"), ("seen", "points"))
        ],
        "rules": [],
    }


def drawing(*figures):
    return ElementTree.fromstring(standalone(figures, title="A < B"))


def test_every_panel_has_its_title_its_series_and_its_caption():
    root = drawing(figure("a"), figure("b", "Variance"), figure("c"))
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert [w for w in words if w in ("Bias", "Variance")] == ["Bias", "Variance", "Bias"]
    assert words.count("none") == words.count("exact") == words.count("seen") == 3
    assert sum("What it shows." in (w or "") for w in words) >= 6  # wrapped
    assert root.get("aria-label") == "A < B"


def test_panels_do_not_lie_over_one_another_and_fit():
    root = drawing(*(figure(name) for name in "abc"))
    places = [g.get("transform") for g in root.findall(f"{SVG}g")]
    assert len(set(places)) == 3
    assert places[0].split()[1] == places[1].split()[1]  # two in a row
    _, _, width, height = map(float, root.get("viewBox").split())
    for place in places:
        x, y = map(float, place.removeprefix("translate(").removesuffix(")").split())
        assert x + 480 < width
        assert y + 252 < height


def test_the_file_needs_nothing_else():
    text = standalone([figure("a")], title="t")
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "<style>" in text
    assert "<script" not in text
