"""The report is one inert file, whatever the run wrote and however it ended."""

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from trueup.reports.html import render_report, write_report

HOSTILE = (
    "\x1b[2J\x1b]8;;http://evil\x07<script>alert(1)</script>[bold red]x[/] \" onload='y' \u202e"
)


class Page(HTMLParser):
    """Collects elements, attributes, text and scripts."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.attributes, self.texts, self.scripts = [], [], [], []
        self._inside = ""
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        (self.scripts if self._inside == "script" else self.texts).append(data)


def test_the_report_is_one_file_below_the_limit_that_loads_nothing(simulated):
    path = write_report(simulated(steps=24, slots=64))
    source = path.read_text(encoding="utf-8")
    assert path.name == "report.html"
    assert len(source.encode()) < 300_000
    page = Page(source)
    loading = {"src", "href", "srcset", "data", "action", "xlink:href", "style"}
    assert not [a for a in page.attributes if a[1] in loading or a[1].startswith("on")]
    assert not {"link", "iframe", "object", "embed", "img", "base", "form"} & set(page.tags)
    assert "@import" not in source
    assert "url(" not in source
    assert set(re.findall(r"https?://[^\"<\s]*", source)) == {"http://www.w3.org/2000/svg"}


def test_the_policy_forbids_scripts_and_requests_and_names_the_style(simulated):
    source = render_report(simulated(steps=3))
    attributes = Page(source).attributes
    (policy,) = [v for tag, name, v in attributes if name == "content" and "default-src" in v]
    style = re.search(r"<style>(.*?)</style>", source, re.DOTALL).group(1)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.split("; ")[:2] == ["default-src 'none'", f"style-src 'sha256-{digest}'"]
    assert "script-src" not in policy
    assert [v for tag, n, v in attributes if tag == "script" and n == "type"] == [
        "application/json"
    ]


def test_the_numbers_lie_in_the_page_as_json(simulated):
    (block,) = Page(render_report(simulated(steps=3))).scripts
    data = json.loads(block)
    assert data["summary"]["steps"] == 3
    assert {f["id"] for f in data["figures"]} >= {"reward", "gap", "timeline", "weights", "ess"}


def test_what_the_run_wrote_is_shown_as_text(simulated):
    vocabulary = {"model": {"vocab": {HOSTILE if i == 0 else f"w{i}": i for i in range(60)}}}
    path = simulated(steps=3, task=HOSTILE + "{}", words=json.dumps(vocabulary))
    source = render_report(path)
    page = Page(source)
    assert page.tags.count("script") == 1
    assert not [a for a in page.attributes if a[1].startswith("on")]
    assert not [c for c in source if (ord(c) < 32 and c != "\n") or c == "\u202e"]
    shown = "".join(page.texts)
    assert "␛[2J" in shown
    assert "<script>alert(1)</script>[bold red]x[/]" in shown
    assert any(HOSTILE[4:10] not in text and "⟨202E⟩" in text for text in page.texts)


def test_failure_reasons_are_escaped(writer):
    run = writer()
    run.issue(0, "a", task=HOSTILE)
    failure = ["engine", HOSTILE, HOSTILE]
    run.finish(1, "a", spans=[], reward=None, status="failed", failure=failure)
    page = Page(render_report(run.close()))
    assert page.tags.count("script") == 1
    assert "engine/␛[2J" in "".join(page.texts)


@pytest.mark.parametrize("damage", ["killed", "no tokens", "no configuration", "torn tokens"])
def test_a_damaged_run_is_reported_with_a_note(simulated, damage):
    path = simulated(steps=4, ended=damage != "killed")
    if damage == "no tokens":
        shutil.rmtree(path / "episodes")
    if damage == "no configuration":
        (path / "config.toml").write_text("seed = 'x")
    if damage == "torn tokens":
        (path / "episodes" / "step-000003.parquet").write_bytes(b"")
    source = render_report(path)
    expected = {
        "killed": "The run has not ended",
        "no tokens": "No step has an episode table",
        "no configuration": "The configuration could not be read",
        "torn tokens": "step-000003.parquet",
    }
    notes = re.search(r'<ul class="notes">(.*?)</ul>', source, re.DOTALL)
    assert notes is not None
    assert expected[damage] in notes.group(1)


def test_a_whole_run_is_reported_without_a_note(simulated):
    assert 'class="notes"' not in render_report(simulated(steps=4))


def test_a_directory_without_a_run_is_reported_as_never_started(tmp_path):
    source = write_report(tmp_path).read_text()
    assert "the run never started" in source
    assert "nothing recorded" in source


def test_the_same_run_gives_the_same_report(simulated):
    path = simulated(steps=3)
    assert render_report(path) == render_report(path)


def test_a_lag_beyond_the_bound_is_called_so(writer):
    run = writer("demo", "schedule.staleness=0")
    run.issue(0, "a")
    run.finish(1, "a", spans=[[0, "engine-0", 0, 3], [1, "engine-0", 0, 1]], reward=1.0)
    run.add(1, "claim", group=0, version=1, step=0, episodes=["a"])
    run.add(2, "train", version=1, step=0, t0=1.0, t1=2.0, phases={})
    run.add(2, "commit", version=2, step=0, episodes=["a"])
    source = render_report(run.close())
    assert "bound 0: 75.0% beyond (wait)" in source
    assert 'class="tile bad"' in source
