"""How layers are split over ranks: the stages, and the schedules in which ranks run them."""
