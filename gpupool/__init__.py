"""gpupool: a dependable inference pool on one GPU host. Importing it loads neither torch nor zmq."""

__version__ = "0.1.0"
