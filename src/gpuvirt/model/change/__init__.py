"""Plans the changes that bring the GPUs of an isolation unit from their observed to their desired state."""
