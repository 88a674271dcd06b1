"""Converts a Llama checkpoint to GGUF in float32, and quantises that by llama.cpp's own function to further types.

Run it with the Python of an environment that has gguf and llama-cpp-python:

    python llamacpp_convert.py FOLDER INTO BF16 Q4_0 Q4_K_M Q8_0

INTO gets F32.gguf and a file for each type. The files have no vocabulary: requests are token ids. The head and the
embedding get the types that llama.cpp chooses for them. Reads model.safetensors by itself, without torch.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def main(folder: str, into: str, *types: str) -> None:
    target = Path(into)
    target.mkdir(parents=True, exist_ok=True)
    exact = target / "F32.gguf"
    if not exact.exists():
        _finish(exact, partial(write_exact, Path(folder)))
    for name in types:
        if not (file := target / f"{name}.gguf").exists():
            _finish(file, partial(quantise, exact, name))


def _finish(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file under another name first, so that a run that was ended leaves no part of one behind."""
    part = path.with_suffix(".part")
    write(part)
    os.replace(part, path)


def write_exact(folder: Path, path: Path) -> None:
    """Write the checkpoint's numbers as GGUF in float32."""
    import gguf

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for name, tensor in tensors_of(folder / "model.safetensors"):
        if name.endswith("q_proj.weight"):
            tensor = interleaved(tensor, heads)
        elif name.endswith("k_proj.weight"):
            tensor = interleaved(tensor, kv_heads)
        writer.add_tensor(gguf_name(name), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """Return GGUF's name of a tensor, such as blk.3.attn_q.weight. Raises KeyError for a tensor unknown in Llama."""
    module, _, kind = name.rpartition(".")
    if module in NAMES:
        return f"{NAMES[module]}.{kind}"
    layer, _, part = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def interleaved(weight: Any, heads: int) -> Any:
    """Reorder the rows of a query or key weight [heads * D, H] for llama.cpp, which rotates neighbours.

    In Hugging Face's order, row i of a head is rotated with row i + D / 2.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def tensors_of(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a safetensors file in float32. Raises KeyError for a type other than BF16 and F32."""
    import numpy

    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    data = numpy.memmap(path, dtype=numpy.uint8, mode="r", offset=8 + length)
    for name, about in header.items():
        first, end = about["data_offsets"]
        numbers = data[first:end].view({"BF16": numpy.uint16, "F32": numpy.float32}[about["dtype"]])
        if about["dtype"] == "BF16":
            numbers = (numbers.astype(numpy.uint32) << 16).view(numpy.float32)
        yield name, numbers.reshape(about["shape"])


def quantise(exact: Path, name: str, path: Path) -> None:
    """Write a file of a type such as Q4_K_M. Raises RuntimeError if llama.cpp does not."""
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
    if failed := llama_cpp.llama_model_quantize(str(exact).encode(), str(path).encode(), settings):
        raise RuntimeError(f"llama.cpp did not quantise to {name}: {failed}")


if __name__ == "__main__":
    main(*sys.argv[1:])
