"""A worker process: one device, its models, their batches. The only place where torch is imported."""
