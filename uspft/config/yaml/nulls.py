"""`key=null` on the command line: null where a key may be null, else the key is taken out.

So a key of the recipe or of a fragment gives way to its default.
"""

from __future__ import annotations

from functools import cache

from uspft.config.checks import Check
from uspft.config.keys import blocks, keys
from uspft.config.problems import COMMAND_LINE, Fault, join
from uspft.config.yaml.document import Tree
from uspft.config.yaml.unknown import DEEPSPEED


def without_nulls(tree: Tree, at: str = "") -> Tree:
    """Return the tree without the keys that the command line sets to null and that may not be."""
    if not isinstance(tree.value, dict):
        return tree
    kept = {
        key: without_nulls(child, join(at, key))
        for key, child in tree.value.items()
        if not (_null_as_typed(child) and _goes_by_default(join(at, key)))
    }
    return Tree(kept, tree.where)


def _null_as_typed(tree: Tree) -> bool:
    return tree.value is None and tree.where == COMMAND_LINE


def _goes_by_default(path: str) -> bool:
    """Return whether a key exists and may not be null; a block may not."""
    check = _checks().get(path)
    if check is None:
        return path in blocks() and path != ""
    try:
        check(None)
    except Fault:
        return True
    return False


@cache
def _checks() -> dict[str, Check]:
    """Return the check of each key outside lists by its path, DeepSpeed's own included."""
    found = {key.path: key.check for at, kind in blocks().items() for key in keys(kind, at)}
    return found | {f"{at}.{key}": one for at, of in DEEPSPEED.items() for key, one in of.items()}
