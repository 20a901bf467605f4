"""Records as tokens in a folder: made (tokenise, on threads or in processes by workers), counted
and mixed (counts), required of (checks), written (corpus), named and emptied (cache). `prepare`
does all of it; `first_look` reads only the first records, `holdout` parts a corpus in two."""
