"""Records as tokens in a folder: made (tokenise; workers, on threads or in processes), counted and
checked (counts), written, named and emptied (corpus). `prepare` does all of it, after a look at the
first records."""
