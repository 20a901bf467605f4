"""What other tools call things: a table of keys for each, which is read here and by `convert`."""

from __future__ import annotations

from uspft.config.others.table import TOOLS, KeyRow, KeyTable, Tool, hint_of, table_of, tool_of

__all__ = ["TOOLS", "KeyRow", "KeyTable", "Tool", "hint_of", "table_of", "tool_of"]
