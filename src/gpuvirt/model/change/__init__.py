"""How the GPUs of an isolation unit come to be as desired: observed state in, plan out."""
