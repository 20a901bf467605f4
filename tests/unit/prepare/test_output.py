"""What a run writes: of a multimodal checkpoint also what does not train."""

from __future__ import annotations

from pathlib import Path

from tests.support.models import make_model
from tests.support.multimodal import UNREAD, make_checkpoint, stored
from uspft.families.multimodal import own_name
from uspft.prepare.output import passed_through


def test_what_goes_through_is_counted(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "whole", "qwen3_5")
    through = {name: x for name, x in stored(folder).items() if own_name(name) is None}
    assert through.keys() > UNREAD.keys() and any("visual" in name for name in through)
    size = sum(x.numel() * x.element_size() for x in through.values())
    assert passed_through(str(folder)) == size > 0
    alone = make_model(tmp_path / "alone", "qwen3_5_text")
    assert passed_through(str(alone)) == passed_through("org/name") == passed_through(None) == 0
    (folder / "extra.safetensors").write_bytes(b"no header")
    assert passed_through(str(folder)) == 0, "reading the weights says what is wrong"
