"""Records as tokens in a folder: made (tokenise; workers, on threads or in processes), counted and
checked (counts), written (corpus), named and emptied (cache). `prepare` does all of it;
`first_look` reads only the first records."""
