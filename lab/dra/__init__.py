"""Kubernetes' own allocator of claims as a program, which tests ask about ResourceSlices."""
