"""Chat templates as models have them, by name.

The wheel of trl holds most; OLMo 2's is built of the marks of its roles; llama.cpp has others among
its tests, and comes with the source package of llama-cpp-python, which pip downloads.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llama-cpp-python==0.3.36"
_FOLDER = "models/templates"
_TEST = "tests/test-chat-template.cpp"
FILES = {
    "mistral_nemo": "mistralai-Mistral-Nemo-Instruct-2407",
    "granite3_3": "ibm-granite-granite-3.3-2B-Instruct",
    "granite4": "ibm-granite-granite-4.0",
    "granite4_1": "ibm-granite-granite-4.1",
}
CASES = {
    "mistral_first": "mistralai/Mistral-7B-Instruct-v0.2 (NOTE",
    "mistral": "mistralai/Mistral-7B-Instruct-v0.2 (mistralai",
    "granite3": "ibm-granite/granite-3.0-8b-instruct",
}
"""Names of llama.cpp: of files, and of cases in its test."""
DOWNLOADED = (*FILES, *CASES, "mistral_v3")
_SPACED = {
    "[AVAILABLE_TOOLS][": "[AVAILABLE_TOOLS] [",
    '"[INST]"': '"[INST] "',
    "[TOOL_CALLS][": "[TOOL_CALLS] [",
    "[TOOL_RESULTS]{": "[TOOL_RESULTS] {",
    'message["content"] + eos_token': '" " + message["content"]|trim + eos_token',
    "elif (message.tool_calls is defined and message.tool_calls is not none)": (
        "elif message.tool_calls is defined and message.tool_calls is not none"
    ),
}
"""What the template of Mistral 7B v0.3 has where that of Nemo, which came after it, has less."""


def original(name: str) -> str:
    """Return the template of a model."""
    if name == "olmo2":
        return _olmo2()
    if name in DOWNLOADED:
        return _downloaded()[name]
    found = find_spec("trl")
    assert found and found.submodule_search_locations
    folder = Path(found.submodule_search_locations[0]) / "chat_templates"
    return (folder / f"{name}.jinja").read_text()


def _olmo2() -> str:
    def says(role: str, end: str, gap: str = "") -> str:
        return f"{{{{ '<|{role}|>\\n'{gap} + message['content']{end} }}}}"

    newline, eos = " + '\\n'", " + eos_token"
    asks = "if message['role'] == "
    return (
        "{{ bos_token }}{% for message in messages %}"
        f"{{% {asks}'system' %}}{says('system', newline)}"
        f"{{% el{asks}'user' %}}{says('user', newline)}"
        f"{{% el{asks}'assistant' %}}"
        f"{{% if not loop.last %}}{says('assistant', eos + newline, ' ')}"
        f"{{% else %}}{says('assistant', eos, ' ')}{{% endif %}}{{% endif %}}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
        "{% endfor %}"
    )


@cache
def _downloaded() -> dict[str, str]:
    """The templates of llama.cpp."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-qqq", "--no-deps", PACKAGE]
        subprocess.run([*command, "--no-binary", ":all:", "--dest", folder], check=True)
        (package,) = Path(folder).iterdir()
        wanted = {f"{_FOLDER}/{file}.jinja" for file in FILES.values()} | {_TEST}
        held = {}
        with tarfile.open(package) as packed:
            for member in packed:
                path = member.name.partition("/vendor/llama.cpp/")[2]
                if path in wanted and (file := packed.extractfile(member)):
                    held[path] = file.read().decode()
    found = {name: held[f"{_FOLDER}/{file}.jinja"] for name, file in FILES.items()}
    found |= {name: _of_case(held[_TEST], case) for name, case in CASES.items()}
    spaced = found["mistral_nemo"]
    for tight, wide in _SPACED.items():
        assert tight in spaced
        spaced = spaced.replace(tight, wide)
    return {**found, "mistral_v3": spaced}


def _of_case(test: str, case: str) -> str:
    """The template of a case in a test that is written in C++."""
    behind = test[test.index(f'/* .name= */ "{case}') :]
    literal = re.search(r'/\* \.template_str= \*/ ("(?:[^"\\]|\\.)*")', behind)
    assert literal
    source: str = json.loads(literal[1].replace("\\'", "'"))
    return source
