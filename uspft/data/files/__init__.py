"""Which files a recipe names (sources), and their contents with line or record numbers (readers):
text, JSON Lines and arrays, CSV, Parquet and Arrow, data sets of `datasets`, Megatron's index."""
