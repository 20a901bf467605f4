"""Which files a recipe means (sources), and what each holds, with its line or number (readers):
text, JSON Lines and arrays, CSV, Parquet and Arrow, the sets of `datasets`, Megatron's index."""
