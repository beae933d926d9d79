"""The checks of `gpuvirt doctor`: pure functions from evidence to findings."""
