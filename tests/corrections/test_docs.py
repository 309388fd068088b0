from pathlib import Path

from trueup.corrections.docs import PAGES, main, page, pages, read_lab
from trueup.corrections.table import PRESETS

ROOT = Path(__file__).parents[2]


def test_the_committed_pages_are_those_of_the_table():
    expected = pages(read_lab(ROOT))
    found = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / PAGES).iterdir()}
    assert found == expected, "run `python -m trueup.corrections.docs`"


def test_a_page_states_everything_that_the_table_knows():
    for name, preset in PRESETS.items():
        text = page(preset, {})
        for fact in (preset.formula, preset.meaning, preset.use, preset.scope):
            assert fact.replace("|", "\\|") in text or fact in text
        for key, constant in preset.constants.items():
            assert f"| `{key}` | {constant.default:g} | {constant.allowed} |" in text
        assert ("moving π_θ" in text) == preset.moving
        assert f"correction.preset={name}" in text


def test_a_page_shows_the_row_of_the_lab():
    row = {"0.1": {"bias2": 0.0123, "variance": 0.1664}, "2.0": {"bias2": 0.737, "variance": 0.043}}
    text = page(PRESETS["none"], {"none": row})
    assert "| σ 0.1 | σ 2.0 |" in text
    assert "| 0.012 / 0.166 | 0.737 / 0.043 |" in text
    assert "reproduce" not in page(PRESETS["none"], {})


def test_writing_removes_the_page_of_a_preset_that_is_gone(tmp_path):
    old = tmp_path / PAGES / "gone.md"
    old.parent.mkdir(parents=True)
    old.write_text("")
    main(tmp_path)
    assert not old.exists()
    assert {p.name for p in old.parent.iterdir()} == {"index.md", *(f"{n}.md" for n in PRESETS)}
