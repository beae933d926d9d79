"""Changes the GPUs of an isolation unit: observe, plan, take the steps of a phase, observe again."""
