"""uspft beside other engines, in folders by what is measured: attention, step, convergence."""
