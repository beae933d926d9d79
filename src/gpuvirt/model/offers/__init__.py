"""Which devices are offered, under which names, how healthy they are, and the view of a node."""
