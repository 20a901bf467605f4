"""Hot switching: a step whose rows run under several layouts, beside steps of one layout."""
