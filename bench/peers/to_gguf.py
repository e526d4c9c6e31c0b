"""The same checkpoint for llama.cpp: run in its environment, as `to_gguf.py FOLDER FILE [KIND]`.

KIND: of `LlamaFileType`, such as Q8_0 or Q4_K_M, made by llama.cpp's own quantiser; BF16 unless told.
"""

import json
import sys
from pathlib import Path

import gguf  # pyright: ignore[reportMissingImports] it is in that environment
import numpy as np

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def main() -> None:
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    kind = sys.argv[3] if len(sys.argv) > 3 else None
    plain = target.with_suffix(".plain") if kind else target
    write(folder, plain)
    if kind:
        quantise(plain, target, kind)
        plain.unlink()


def quantise(plain: Path, target: Path, kind: str) -> None:
    import llama_cpp  # pyright: ignore[reportMissingImports] it is in that environment

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = gguf.LlamaFileType[f"MOSTLY_{kind}"]
    if llama_cpp.llama_model_quantize(str(plain).encode(), str(target).encode(), params):
        raise SystemExit(f"llama.cpp cannot make {kind} of it")


def write(folder: Path, target: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(str(target), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()))
    for name, values in tensors(folder / "model.safetensors"):
        place = gguf_name(name)
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(
            place.split(".")[-2]
        )
        if heads:  # pairs of a rotation lie side by side there, and half a head apart here
            values = values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        if values.ndim == 1:
            writer.add_tensor(place, (values.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(place, values.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, found: dict) -> None:
    vocabulary = sorted(found["model"]["vocab"].items(), key=lambda item: item[1])
    kinds = [gguf.TokenType.CONTROL if text.startswith("<|") else gguf.TokenType.NORMAL for text, _ in vocabulary]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([text for text, _ in vocabulary])
    writer.add_token_types(kinds)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in found["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def gguf_name(name: str) -> str:
    place = name.removesuffix(".weight")
    if place in ENDS:
        return f"{ENDS[place]}.weight"
    _, _, layer, rest = place.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def tensors(path: Path):
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    size = int(raw[:8].view(np.uint64)[0])
    for name, entry in json.loads(raw[8 : 8 + size].tobytes()).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            values = np.array(raw[8 + size + begin : 8 + size + end])
            yield name, values.view(np.uint16).reshape(entry["shape"])


main()
