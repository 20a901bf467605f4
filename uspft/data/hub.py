"""A data set of the hub or of `save_to_disk`: loaded whole, and named and hashed like a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uspft.config.problems import said
from uspft.data.faults import wrong_key
from uspft.data.sources import saved_splits

if TYPE_CHECKING:
    from uspft.config.recipe import Source

_HASH_RECORDS = 1000
_HUB_SECONDS = 10


@dataclass(frozen=True)
class HubSplit:
    """One split of a data set; its record n, from 1, stands for line n of a file."""

    dataset: Any  # datasets.Dataset
    shown: str

    @property
    def columns(self) -> list[str]:
        return list(self.dataset.column_names)

    def records(self, columns: list[str]) -> Iterator[dict[str, Any]]:
        """Yield the records with these columns only, since a user cannot edit a hub data set."""
        yield from self.dataset.select_columns(columns)

    def digest(self) -> str:
        """Return the blake2b hash of all records, taken from Arrow's stream format."""
        import pyarrow as pa  # type: ignore[import-untyped]

        sink = _HashSink()
        writer = None
        for table in self.dataset.with_format("arrow").iter(batch_size=_HASH_RECORDS):
            writer = writer or pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), table.schema)
            writer.write_table(table)
        return sink.hash.hexdigest()


class _HashSink:
    """A file, as far as pyarrow can tell, which only hashes what is written to it."""

    closed = False

    def __init__(self) -> None:
        self.hash = blake2b(digest_size=16)

    def write(self, content: Any) -> int:
        self.hash.update(content)
        return len(content)

    def flush(self) -> None:
        """Do nothing, since nothing is held back."""


def load_saved(source: Source) -> HubSplit:
    """Load a folder that `save_to_disk` wrote, or its split (default train). Raises DataError."""
    from datasets import load_from_disk

    split = source.split or "train"
    try:
        found = load_from_disk(Path(source.path).expanduser())
        several = saved_splits(source.path)
        dataset = found[split] if several else found
    except Exception as error:  # datasets and pyarrow each raise their own kinds
        what = f"the saved data set {source.path} cannot be read: {said(error)}"
        raise wrong_key("data.train", what, "save it again with save_to_disk") from error
    return HubSplit(dataset, f"{source.path}/{split}" if several else source.path)


def load_split(source: Source) -> HubSplit:
    """Load the split of `source.path` (default train) from the hub or from the cache of `datasets`.

    Raises DataError with what `datasets` said where it cannot be had.
    """
    from datasets import load_dataset

    split = source.split or "train"
    try:
        _ask_hub(source.path)
        dataset = load_dataset(source.path, source.name, split=split)
    except Exception as error:  # datasets, hub and network each raise their own kinds
        remedy = "check the id, name and split, and the network, or use a local path"
        what = f"hub data set {source.path} ({split}): {said(error)}"
        raise wrong_key("data.train", what, remedy) from error
    return HubSplit(dataset, f"{source.path}/{split}")


def _ask_hub(name: str) -> None:
    """Ask the hub for a data set, so that a hub that does not answer is told within `_HUB_SECONDS`.

    `datasets` alone tries for half a minute. Raises what the hub's client raises, unless the data
    set is cached here.
    """
    from huggingface_hub import HfApi, is_offline_mode

    if is_offline_mode():
        return
    try:
        HfApi().dataset_info(name, timeout=_HUB_SECONDS)
    except Exception:
        if not _is_cached(name):
            raise


def _is_cached(name: str) -> bool:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return any(repo.repo_id == name for repo in scan_cache_dir().repos)
    except CacheNotFound:
        return False
