"""The options that commands share, and how they are parsed: hosts, API servers, vGPU configs, addresses."""
