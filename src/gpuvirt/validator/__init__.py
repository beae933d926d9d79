"""The checks that hold back container operands until a node is ready for them, and the files that say so."""
