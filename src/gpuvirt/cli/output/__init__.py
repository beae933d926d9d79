"""How results are shown to people: tables, colours, and the rendered states of GPUs and vGPUs."""
