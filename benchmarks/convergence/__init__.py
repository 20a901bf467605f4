"""Loss curves of split rows beside those of whole rows (USP, arXiv 2405.07719)."""
