"""The kinds of API objects that gpuvirt reads and writes."""
