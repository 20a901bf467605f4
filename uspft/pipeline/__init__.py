"""How layers are split over ranks: stages, and the order in which each rank works on them."""
