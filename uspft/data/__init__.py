"""Training and evaluation data: files become records, tokens in a corpus, and rows of a step.

The folders, in the order of processing: files (what is on disk) → records (checked, under our
names) → chat (conversations as text) → corpus (tokens, stored in a folder) → rows (packed, each
rank's share). samples: the forms of a sample between them; faults: error messages.
"""
