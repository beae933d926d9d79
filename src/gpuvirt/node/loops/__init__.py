"""When the agent looks at what, and the threads and values by which its loops work together."""
