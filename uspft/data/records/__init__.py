"""Records: the fields that are known by name (known_fields), the shape that a record's fields have
and its other fields (shapes), its turns and values under our names (values). `reader` applies all
of it to a file."""
