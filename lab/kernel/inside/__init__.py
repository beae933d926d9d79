"""The programs in the guest: they use the standard library, and gpuvirt's code for real kernels."""
