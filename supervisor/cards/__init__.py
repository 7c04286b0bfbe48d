"""The cards of a pool: an inventory, a probe process that reads them, the judgement of what it reads. NVML is called here only."""
