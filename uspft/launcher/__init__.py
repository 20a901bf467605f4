"""The ranks of one host: they are started, watched, and ended together with other hosts' ranks."""
