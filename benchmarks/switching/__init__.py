"""Hot switching beside one layout for all rows."""
