"""The loops of the agent: the intervals of observations, and the threads and values that the loops share."""
