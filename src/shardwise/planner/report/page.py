"""One self-contained HTML page: headings, text, tables, charts. Nothing is loaded from outside."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_STYLE = """
:root{--ink:#1d2430;--soft:#5d6878;--line:#d9dee6;--paper:#fff;--band:#f5f7fa;--bad:#b3261e}
@media (prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#9aa5b5;--line:#38414f;--paper:#14181f;--band:#1c222c;--bad:#ff8a80}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:960px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0 0 .3rem}h2{font-size:1.1rem;margin:2rem 0 .6rem;border-bottom:1px solid var(--line)}
p{margin:.4rem 0}.soft{color:var(--soft)}.bad{color:var(--bad)}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.86rem;width:100%}
th,td{padding:.28rem .55rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--soft);font-weight:600}td.text,th.text{text-align:left;white-space:normal}tr:nth-child(even) td{background:var(--band)}
svg{width:100%;height:auto;display:block;margin:.4rem 0}svg text{fill:var(--ink);font:13px system-ui,sans-serif}
svg .small{font-size:11.5px}svg .inbar{fill:#fff;font-size:10.5px}svg .limit{stroke:var(--bad);stroke-width:2;stroke-dasharray:5 4}
svg .frame{fill:none;stroke:var(--line)}svg .dot{fill:var(--soft);opacity:.45}svg .mark{fill:#e08a2e}
svg .front{fill:none;stroke:#e08a2e;stroke-width:1.5}code{background:var(--band);padding:.05rem .3rem}
"""


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def table(head: Sequence[str], rows: Sequence[Sequence[object]], *, text_columns: Sequence[int] = (0,)) -> str:
    """A table; columns in ``text_columns`` are left-aligned."""

    def cells(tag: str, values: Sequence[object]) -> str:
        marks = [" class=text" if i in text_columns else "" for i in range(len(values))]
        return "".join(f"<{tag}{mark}>{escape(str(value))}</{tag}>" for mark, value in zip(marks, values))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells("th", head)}</tr></thead><tbody>{body}</tbody></table></div>'


def page(title: str, subtitle: str, blocks: Sequence[str]) -> str:
    """The whole document as text."""
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f'<h1>{escape(title)}</h1><p class="soft">{escape(subtitle)}</p>' + "\n".join(blocks) + "</body></html>\n"
    )
