"""The parts of the loops of every process: values that are followed, and threads that can be abandoned."""
