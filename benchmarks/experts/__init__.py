"""Experts that ranks divide beside local ones: bytes and live memory counted, steps measured."""
