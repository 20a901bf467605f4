"""What a record looks like and what is made of it: every field that is known by its name
(known_fields), which shape its fields make and what it holds beside them (shapes), its turns and
values under our names (values). `reader` does all of it, file by file."""
