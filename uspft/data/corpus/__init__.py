"""Records as tokens in a folder: tokenised (tokenise, and workers for threads and processes),
counted and checked (counts), stored and cached (corpus). `prepare` does all of it, after checking
the first records."""
