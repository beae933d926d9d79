"""The kinds of API objects that gpuvirt reads and writes, and the schemas of its own kinds."""
