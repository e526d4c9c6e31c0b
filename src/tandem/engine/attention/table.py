"""Attention backends by the name that `--attention-backend` gives them: one line each, the default first.

Names are SGLang's where it has them. A value says which class of which module is loaded when it is asked for: the
command line reads this table, and it is not to load torch, nor a backend the libraries of another one.
"""

ATTENTION_BACKENDS: dict[str, str] = {
    "auto": "tandem.engine.attention.native:automatic",
    "native": "tandem.engine.attention.native:NativeAttention",
    "torch_native": "tandem.engine.attention.torch_sdpa:TorchSdpa",
    "triton": "tandem.engine.attention.triton:TritonAttention",
}
BOTH_WAYS = "tandem.engine.attention.both_ways:BothWays"  # of encoders, whatever is asked for
BLOCKS = "tandem.engine.attention.blocks:BlockAttention"  # of models of block diffusion
DEFAULT_ATTENTION_BACKEND = next(iter(ATTENTION_BACKENDS))
