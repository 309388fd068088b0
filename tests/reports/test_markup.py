from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from trueup.reports.markup import Markup, element, text, visible


def test_text_is_escaped_and_markup_is_not():
    assert element("p", "<b>&", element("i", "x")) == "<p>&lt;b&gt;&amp;<i>x</i></p>"


def test_attributes_are_escaped_and_none_is_left_out():
    made = element("a", class_='"><script>', stroke_width=1.50, id=None)
    assert made == '<a class="&quot;&gt;&lt;script&gt;" stroke-width="1.5"></a>'


def test_escape_sequences_become_visible():
    assert visible("\x1b[31mred\x07\n") == "␛[31mred␇␊"


def test_bidirectional_overrides_and_lone_surrogates_become_visible():
    assert visible("a\u202eb\ud800") == "a⟨202E⟩b⟨D800⟩"


def test_ordinary_text_of_any_script_stays():
    assert visible("größe 测试 ρ→π 🙂") == "größe 测试 ρ→π 🙂"


@given(st.text())
def test_any_text_comes_back_from_a_parser_as_its_visible_form(value):
    parsed = ElementTree.fromstring(element("p", value, title=value))
    assert (parsed.text or "") == visible(value)
    assert parsed.get("title") == visible(value)


@given(st.text(st.characters(codec=None)))
def test_any_text_can_be_written_to_a_file(value):
    text(value).encode("utf-8")


def test_only_markup_passes_unescaped():
    assert element("p", Markup("<br/>"), "<br/>") == "<p><br/>&lt;br/&gt;</p>"
