"""The cost model: predictions of traffic, memory, FLOPs and time without a device, and the ranking
of layouts by them."""
