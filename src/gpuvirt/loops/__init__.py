"""What loops of every process are made of: values that are followed, and threads that can be abandoned."""
