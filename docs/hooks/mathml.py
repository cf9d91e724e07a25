"""Formulas as MathML, made while the pages are built: browsers show it without a script or a font from elsewhere."""

from __future__ import annotations

import html
import re

from math_core import LatexToMathML

FORMULA = re.compile(r'<(?:span|div) class="arithmatex">(?:\\\((.*?)\\\)|\\\[(.*?)\\\])</(?:span|div)>', re.DOTALL)
CONVERTER = LatexToMathML()


def on_page_content(page_html: str, **_: object) -> str:
    """Replace what the arithmatex extension marked as LaTeX."""
    return FORMULA.sub(_mathml, page_html)


def _mathml(formula: re.Match[str]) -> str:
    inline, block = formula.groups()
    latex = html.unescape(block if inline is None else inline).strip()
    return CONVERTER.convert_with_local_state(latex, displaystyle=inline is None)
