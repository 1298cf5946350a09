"""The terminal console: screens over `runtime.interface`."""

__version__ = "0.1.0"
