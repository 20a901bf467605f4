"""Heads against states between two hosts whose link is slow."""
