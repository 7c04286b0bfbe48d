"""The program `gpupool`: one file for each kind of command. Nothing heavy is imported before the command that needs it."""

from .app import main

__all__ = ["main"]
