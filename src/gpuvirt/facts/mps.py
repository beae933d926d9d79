"""Where the MPS daemon of a node has its sockets, and the variable by which its clients find them."""

FOLDER = "mps"
"""The daemon's folder, below gpuvirt's folder in `/run`."""
PIPES = "pipe"
"""The folder of the sockets in it."""
PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
