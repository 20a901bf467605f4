"""Training and evaluation data: files become records, tokens in a corpus, and rows of a step.

The folders in the order in which data passes: files (what is on disk) → records (checked, under
our names) → chat (conversations as text) → corpus (tokens, kept in a folder) → rows (packed, a
share for each rank). samples: the forms of a sample on the way; faults: what is wrong, as messages.
"""
