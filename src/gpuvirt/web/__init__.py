"""The HTTP server of the processes, with TLS, and their probes; each program has its pages itself."""
