"""One command, one page."""

from uspft.commands.place import Place

__all__ = ["Place"]
