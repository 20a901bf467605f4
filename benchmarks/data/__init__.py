"""Conversations made into tokens: `preprocess` beside `datasets.map`."""
