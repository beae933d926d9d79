"""Readers of the host as a whole: kernel command line, platform, container runtimes, driverctl."""
