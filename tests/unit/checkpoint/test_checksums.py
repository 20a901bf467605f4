"""What is summed is what is written, and the file is the one that safetensors writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from uspft.checkpoint.checksums import (
    CHUNK_BYTES,
    checksum_of,
    checksums_of,
    is_sealed,
    sealed,
    write_part,
)


def test_a_part_is_the_file_that_safetensors_writes(tmp_path: Path) -> None:
    """Of several chunks, of no dimension, of no elements, and with names that JSON escapes."""
    tensors = {
        "weight/b": torch.randn(CHUNK_BYTES // 4 + 3, 2),
        "exp_avg/a": torch.randn(()),
        "weight/none": torch.empty(0, 5),
        'weight/"ö"#1': torch.arange(6.0).view(2, 3),
    }
    written = write_part(tensors, tmp_path / "ours")
    save_file(tensors, tmp_path / "theirs")
    data = (tmp_path / "ours").read_bytes()
    assert data == (tmp_path / "theirs").read_bytes() and written.size == len(data)
    assert written.checksum == xxhash.xxh3_64_hexdigest(data) == checksum_of(tmp_path / "ours")


def test_what_cannot_be_read_is_told_beside_the_others(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    one, other = checksums_of([tmp_path / "a", tmp_path / "b"])
    assert one == xxhash.xxh3_64_hexdigest(b"a") and isinstance(other, FileNotFoundError)


@pytest.mark.parametrize("text", [b"{}", b"", b"[1, 2]", b'{"checksum": "0"}'])
def test_another_text_is_not_sealed(text: bytes) -> None:
    assert not is_sealed(text)
    assert is_sealed(sealed({"ä": [1.5, None]}).encode())
