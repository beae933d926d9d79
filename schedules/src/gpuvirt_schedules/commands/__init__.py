"""The commands `gpuvirt schedule`, with their questions and their output."""
