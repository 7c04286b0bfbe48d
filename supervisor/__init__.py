"""The supervisor process: starts router and workers, watches them, steers them. No torch, no NVML, no client bytes."""
