"""SDAR: the layers of Qwen3, trained to find the tokens of a block together (`engine/denoising.py`)."""

from tandem.engine.models.qwen3 import build

__all__ = ["build"]
