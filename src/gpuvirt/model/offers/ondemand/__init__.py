"""vGPUs that are created when a pod requests them: what each GPU can still carry, and what is offered of it."""
