"""Plans the vGPUs of a GPU: types, places, GPU instances, modes, scheduler."""
