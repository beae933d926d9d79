"""A simulated host as a mounted file system (FUSE), for programs that know nothing of simulators."""
