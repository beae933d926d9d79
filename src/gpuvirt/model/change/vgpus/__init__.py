"""How a GPU comes to carry the desired vGPUs: instances, modes, places, scheduler."""
