"""What runs in the guest: the standard library, and gpuvirt's own code for real kernels."""
