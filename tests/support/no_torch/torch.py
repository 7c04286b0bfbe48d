"""Stands before the real torch on a pretended GPU host: this one's CPU build would find no card behind the fake NVML."""

raise ImportError("there is no torch on a pretended GPU host")
