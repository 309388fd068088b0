"""XML text that is escaped by construction: what a run wrote is shown, never interpreted.

Task names, observations and messages come from models and environments. A child of `element` is
escaped unless it is `Markup`, and only this module makes `Markup`; control and formatting
characters (ANSI sequences, bidirectional overrides) are made visible first.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from html import escape

VOID = frozenset({"circle", "line", "meta", "path", "polyline", "rect"})


class Markup(str):
    """Finished XML; any other string is text and is escaped when it becomes a child."""

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: object) -> Markup:
    """One element; `class_` gives `class`, `stroke_width` gives `stroke-width`, None is left out.

    Example: `element("td", "<b>", class_="num")` is `<td class="num">&lt;b&gt;</td>`.
    """
    opening = name + "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(_plain(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID and not children:
        return Markup(f"<{opening}/>")
    return Markup(f"<{opening}>{join(children)}</{name}>")


def join(children: Iterable[str]) -> Markup:
    """Children one after another, text among them escaped."""
    return Markup("".join(c if isinstance(c, Markup) else text(c) for c in children))


def text(value: str) -> Markup:
    """Text as XML, with everything invisible made visible."""
    return Markup(escape(visible(value), quote=True))


def visible(value: str) -> str:
    r"""Replace control characters by their pictures and other invisible ones by their code point.

    Example: `visible("\x1b[31m")` is `"␛[31m"`, `visible("\u202e")` is `"⟨202E⟩"`.
    """
    return value if value.isascii() and value.isprintable() else "".join(map(_visible, value))


def _visible(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return f"⟨{code:04X}⟩"
    return character


def _plain(value: object) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
