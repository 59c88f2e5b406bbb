"""One HTML file that needs nothing else: facts, tables, interactive figures, and the library that draws them.

Every text is escaped: tables and headings by the template, what a figure shows by `safe`, the figures' JSON so that
no text in it can end its script element. The library (plotly, 4.8 MB) lies in the file compressed and is unpacked by
the browser (2 MB; any browser since 2023). Nothing is fetched.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from data_contracts.records import Table

UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}

TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1080px; padding: 0 1rem; color: #1d2329; }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem }
table { border-collapse: collapse; font-size: 13px } td, th { border-bottom: 1px solid #dfe3e8; padding: .25rem .6rem;
text-align: left; vertical-align: top; overflow-wrap: anywhere }
th { white-space: nowrap } .note { color: #5a6570; margin: .2rem 0 }
.figure { height: 420px } .figure.tall { height: 640px }
</style></head><body>
<h1>{{ title }}</h1>
<table>{% for name, value in facts.items() %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>{% endfor %}</table>
{% for part in parts %}<h2>{{ part.title }}</h2>
{% if part.note %}<p class="note">{{ part.note }}</p>{% endif %}
{% if part.figure is not none %}
<div class="figure{{ ' tall' if part.tall }}" id="figure{{ loop.index0 }}"></div>
{% endif %}
{% if part.table is not none %}<table><tr>{% for name in part.table.columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in part.table.rows %}<tr>{% for value in row %}<td>{{ '' if value is none else value }}</td>{% endfor %}</tr>
{% endfor %}</table>{% endif %}
{% endfor %}
<script type="application/json" id="figures">{{ figures | safe }}</script>
<script type="application/octet-stream" id="library">{{ library | safe }}</script>
<script>
(async () => {
  const packed = Uint8Array.from(atob(document.getElementById("library").textContent), c => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.appendChild(script);
  const figures = JSON.parse(document.getElementById("figures").textContent);
  for (const [place, figure] of Object.entries(figures))
    Plotly.newPlot(place, figure.data, figure.layout, {responsive: true, displaylogo: false});
})();
</script></body></html>
"""


@dataclass(frozen=True)
class Part:
    """A stretch of a page: a heading, a sentence, a figure (plotly's JSON object: data and layout), a table."""

    title: str
    note: str = ""
    figure: dict[str, Any] | None = None
    table: Table | None = None
    tall: bool = False


def write_page(path: Path, title: str, facts: dict[str, Any], parts: Sequence[Part]) -> None:
    """Write the page to `path`."""
    from jinja2 import Environment

    template = Environment(autoescape=True).from_string(TEMPLATE)
    figures = {f"figure{place}": part.figure for place, part in enumerate(parts) if part.figure is not None}
    shown = {name: value for name, value in facts.items() if value is not None}
    page = template.render(title=title, facts=shown, parts=parts, figures=_script(figures), library=_library())
    path.write_text(page, encoding="utf-8")


def safe(text: str) -> str:
    """Return a text as a figure may show it: plotly reads a few HTML elements in labels and hover texts."""
    return html.escape(text)


def _script(value: Any) -> str:
    """Return JSON that may stand inside a script element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign, escaped in UNSAFE.items():
        text = text.replace(sign, escaped)
    return text


@lru_cache(maxsize=1)
def _library() -> str:
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
