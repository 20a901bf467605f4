"""A file that is no UTF-8 is told with the encoding that decodes it, and with none by guess."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.data_cases import TOKENIZER, block, faults_of
from uspft.data.corpus.corpus import read_report
from uspft.data.corpus.prepare import prepare
from uspft.data.files.decoding import encoding_of

TEXTS = {
    "gbk": ("gb18030", "人工智能是计算机科学的一个分支，请问今天天气怎么样？"),
    "gb2312": ("gb18030", "你好"),
    "gb18030": ("gb18030", "我想去公园散步，你觉得可以吗？"),
    "big5": ("big5", "人工智慧是電腦科學的一個分支，請問今天天氣怎麼樣？"),
    "cp932": ("cp932", "こんにちは、世界。今日の天気はどうですか？"),
    "euc_jp": ("euc-jp", "人工知能はコンピュータ科学の一分野です。"),
    "euc_kr": ("euc-kr", "안녕하세요, 인공지능은 컴퓨터 과학의 한 분야입니다."),
    "cp1251": ("cp1251", "Привет, мир! Как у тебя дела сегодня?"),
    "koi8_r": ("koi8-r", "Искусственный интеллект - раздел информатики"),
    "cp866": ("cp866", "Привет, как дела сегодня?"),
    "cp1253": ("cp1253", "Καλημέρα, τι κάνεις σήμερα;"),
    "cp1252": ("cp1252", "L’été, où est-ce qu’il fait très chaud à Besançon ?"),
    "latin_1": ("cp1252", "Grüße aus München, schöne Straße"),
    "iso8859_15": ("cp1252", "¿Qué tal mañana, señor? Acción"),
    "cp1250": ("cp1250", "Zażółć gęślą jaźń, proszę; łąka święty"),
}
"""By the encoding in which a text is saved, the one that is to be named, which reads it too."""


NAMES = ("a.jsonl.gz", "a.json", "a.csv", "a.txt")
CASES = [
    *(("a.jsonl", saved) for saved in TEXTS),
    *((name, saved) for name in NAMES for saved in ("gbk", "cp1251", "latin_1")),
]
"""Which encoding it is does not depend on the kind of file, each of which has three alphabets."""


@pytest.mark.parametrize(("name", "saved"), CASES)
def test_the_advice_decodes_the_file(tmp_path: Path, saved: str, name: str) -> None:
    named, text = TEXTS[saved]
    rows = [{"text": text}, {"text": "plain"}]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    held = {
        "a.json": f"[{lines.strip().replace(chr(10), ',' + chr(10))}]",
        "a.csv": f'text\n"{text}"\nplain\n',
        "a.txt": f"plain\n{text}",
    }.get(name, lines)
    path = tmp_path / name
    content = held.encode(saved)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    told = [line for line in faults_of(tmp_path, block(path)) if "not UTF-8 (byte 0x" in line]
    assert len(told) == 1, told
    assert (
        f"; save it as UTF-8, as `iconv -f {named} -t utf-8` does: {named} decodes the" in told[0]
    )
    assert content.decode(named) == held
    if shutil.which("iconv"):  # whose names of encodings are not all Python's
        command = ["iconv", "-f", named, "-t", "utf-8"]
        done = subprocess.run(command, input=content, capture_output=True, check=True)
        assert done.stdout.decode() == held


def test_where_nothing_decodes_nothing_is_guessed(tmp_path: Path) -> None:
    noise = random.Random(1)
    for content in (
        bytes(noise.randrange(1, 256) for _ in range(4000)),
        b'{"text": "\xff\xfe\x81\x9d"}\n',
    ):
        assert encoding_of(content) is None
        path = tmp_path / "a.jsonl"
        path.write_bytes(content)
        lines = [line for line in faults_of(tmp_path, block(path)) if "not UTF-8" in line]
        assert lines and "iconv" not in str(lines)
        assert all(
            "; no encoding tried here decodes the file to a text: save it" in x for x in lines
        )


def test_damage_inside_utf8_is_no_other_encoding(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = json.dumps({"text": "L’été à Besançon, 你好"}, ensure_ascii=False).encode()
    path.write_bytes(b"\n".join([good, good.replace(b"\xa9", b"", 1), good, b""]))
    (line,) = faults_of(tmp_path, block(path))
    assert line.startswith(f"{path}:2: not UTF-8 (byte 0xc3); the rest of the file is UTF-8: mend")
    report = read_report(
        prepare(block(path, on_bad_sample="skip"), str(TOKENIZER), 8192, tmp_path / "c")
    )
    assert report["bad"] == 1 and report["samples"] == 2 and report["skipped"] == [line]


def test_lines_of_one_file_that_are_no_utf8_are_told_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    words = ["你好，世界。", "今天天气怎么样？", "我想去公园散步", "人工智能是一个分支"]
    lines = "".join(json.dumps({"text": word}, ensure_ascii=False) + "\n" for word in words)
    path.write_bytes(lines.encode("gbk"))
    (line,) = faults_of(tmp_path, block(path))
    assert line.startswith(f"{path}:1: not UTF-8 (byte 0xc4) (4 such: lines 1, 2, 3, …); save")
