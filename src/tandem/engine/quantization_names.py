"""What `--quantization` may say. The command line reads this table, and it is not to load torch."""

MADE_HERE = {"int8": 8, "w8a16": 8, "int8wo": 8, "int4": 4, "w4a16": 4, "int4wo": 4}  # bits, by the names of the field
STORED_METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "gguf")
QUANTIZATIONS = (*MADE_HERE, *STORED_METHODS)
