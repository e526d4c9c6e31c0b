"""Tandem: an LLM inference server with prefill and decode on separate workers."""

__version__ = "0.1.0"
