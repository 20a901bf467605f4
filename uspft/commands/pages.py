"""What all HTML pages of commands have in common: colours for light and dark screens, no script,
and nothing that is fetched from elsewhere."""

from __future__ import annotations

from html import escape

BEGIN = (
    '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width">\n'
)
STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #fff; --soft: #6a737d; --line: #d0d7de; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --soft: #8b949e;
  --line: #30363d; } }
body { color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif;
  margin: 2em auto; padding: 0 1em; }
h1, h2 { font-size: 1.2em; margin: 1.6em 0 .4em; }
h3 { font-size: 1em; margin: 1.2em 0 .3em; }
table { border-collapse: collapse; } th, td { padding: .1em .8em .1em 0; }
th { color: var(--soft); font-weight: normal; text-align: right; } .note { color: var(--soft); }
pre { font: 13px/1.5 ui-monospace, monospace; }
""".strip()


def html_page(title: str, style: str, body: str, head: str = "") -> str:
    """Return a page. style: CSS that this page needs beside STYLE. body: HTML. head: tags that come
    before the title."""
    named = escape(title)
    return (
        f"{BEGIN}{head}<title>{named}</title>\n<style>\n{STYLE}\n{style}\n</style>\n"
        f"<h1>{named}</h1>\n{body}</html>\n"
    )
