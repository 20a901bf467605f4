"""Names of chat templates of other tools, as files here or the tokenizer's own."""

from __future__ import annotations

from pathlib import Path

from uspft.convert.conversion import Conversion, short

SHIPPED = ("chatml", "llama3", "gemma")
"""The templates of data/templates, by the names that axolotl and LLaMA-Factory have for them."""


def shipped(name: str) -> str:
    """Return the path of a shipped template: from here, or whole where it is not below here."""
    below = Path("data", "templates", f"{name}.jinja")
    whole = Path(__file__).parents[2] / below
    return str(below) if below.exists() or not whole.exists() else str(whole)


def chat_template(run: Conversion, name_key: str | None, file_key: str | None) -> None:
    """Write the template that a name or a Jinja file says; the tokenizer's own is null."""
    ours = "data.chat_template"
    if file_key:
        text = str(run.value(file_key))
        if "{" in text or "\n" in text:
            what = "is a template itself, and a recipe names a file"
            run.refuse(file_key, what, "save it, and add data.chat_template=FILE")
        else:
            run.put(ours, text, file_key)
        if name_key:
            run.ignored(name_key, "the file says it")
        return
    if name_key is None:
        return
    name = str(run.value(name_key))
    if ours in run.given:
        run.changed(name_key, f"`{ours}` of the command line stands in its place")
    elif name.startswith("tokenizer_default"):
        run.put(ours, None, name_key, say="the tokenizer's own")
    elif name in SHIPPED:
        run.put(ours, shipped(name), name_key)
    else:
        what = f"the text of {short(name)} is not here; null is the tokenizer's own"
        run.changed(name_key, f"left out: {what}")
