"""Names of chat templates of other tools, as files here or the tokenizer's own."""

from __future__ import annotations

from uspft.convert.conversion import Conversion, short

FILES = {
    "chatml": "data/templates/chatml.jinja",
    "llama3": "data/templates/llama3.jinja",
    "gemma": "data/templates/gemma.jinja",
}
"""The shipped templates, by the names that axolotl and LLaMA-Factory have for them."""


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
    elif name in FILES:
        run.put(ours, FILES[name], name_key)
    else:
        what = f"is {short(name)}, whose text is not here: null is the tokenizer's own"
        run.changed(name_key, f"left out: {what}")
