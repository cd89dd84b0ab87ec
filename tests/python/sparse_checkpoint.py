#!/usr/bin/env python3
"""A checkpoint in the exact shape of ERNIE-4.5-21B-A3B that takes half a gigabyte of disk, for speed and memory measurements.

    sparse_checkpoint.py --out sparse-21b

Embeddings, norms and routers hold random numbers, so that tokens are routed to experts as in a real model; every other
weight is a hole in a sparse file and reads as zero. Speed and memory of the quantised forms do not depend on the values; what
the model says means nothing. `--layers` makes it smaller. Needs numpy; the files need a file system with holes.
"""
import argparse
import json
import struct
from pathlib import Path

import numpy

SHAPE = dict(
    architectures=["Ernie4_5_MoeForCausalLM"], model_type="ernie4_5_moe", hidden_size=2560, intermediate_size=12288,
    num_attention_heads=20, num_key_value_heads=4, num_hidden_layers=28, vocab_size=103424, moe_num_experts=64, moe_k=6,
    moe_intermediate_size=1536, moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=27,
    moe_layer_interval=1, moe_use_aux_free=True, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0,
    tie_word_embeddings=True, use_bias=False, hidden_act="silu", torch_dtype="bfloat16", bos_token_id=1, eos_token_id=2,
    pad_token_id=0)
HEAD_DIM = 128


def tensors(shape):
    """Name, dimensions and content of every tensor, layer by layer."""
    hidden = shape["hidden_size"]

    def mlp(prefix, inner):
        yield f"{prefix}.gate_proj.weight", (inner, hidden), "hole"
        yield f"{prefix}.up_proj.weight", (inner, hidden), "hole"
        yield f"{prefix}.down_proj.weight", (hidden, inner), "hole"

    yield "model.embed_tokens.weight", (shape["vocab_size"], hidden), "random"
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,), "one"
        for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
            yield f"{prefix}.self_attn.{part}_proj.weight", (shape[heads] * HEAD_DIM, hidden), "hole"
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, shape["num_attention_heads"] * HEAD_DIM), "hole"
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,), "one"
        if layer < shape["moe_layer_start_index"]:
            yield from mlp(f"{prefix}.mlp", shape["intermediate_size"])
            continue
        experts, inner = shape["moe_num_experts"], shape["moe_intermediate_size"]
        yield f"{prefix}.mlp.gate.weight", (experts, hidden), "router"
        yield f"{prefix}.mlp.moe_statics.e_score_correction_bias", (1, experts), "router"
        for expert in range(experts):
            yield from mlp(f"{prefix}.mlp.experts.{expert}", inner)
        yield from mlp(f"{prefix}.mlp.shared_experts", inner * shape["moe_num_shared_experts"])
    yield "model.norm.weight", (hidden,), "one"


def content(dims, kind, rng):
    """The bytes of a tensor, `None` for a hole."""
    if kind == "hole":
        return None
    if kind == "router":
        return (rng.standard_normal(dims, dtype=numpy.float32) * 0.02).tobytes()
    values = numpy.ones(dims, numpy.float32) if kind == "one" else rng.standard_normal(dims, dtype=numpy.float32) * 0.02
    return (values.view(numpy.uint32) >> 16).astype(numpy.uint16).tobytes()


def write(shape, out):
    out.mkdir(parents=True)
    header, offset, pieces = {}, 0, []
    for name, dims, kind in tensors(shape):
        size = int(numpy.prod(dims)) * (4 if kind == "router" else 2)
        dtype = "F32" if kind == "router" else "BF16"
        header[name] = dict(dtype=dtype, shape=list(dims), data_offsets=[offset, offset + size])
        pieces.append((offset, dims, kind))
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = numpy.random.default_rng(0)
    with open(out / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        start = file.tell()
        for at, dims, kind in pieces:
            data = content(dims, kind, rng)
            if data is not None:
                file.seek(start + at)
                file.write(data)
        file.truncate(start + offset)
    (out / "config.json").write_text(json.dumps(shape, indent=2))
    print(f"{out}: {len(header)} tensors, {offset / 1e9:.1f} GB, of which {file_bytes(out) / 1e9:.2f} GB are on disk")


def file_bytes(out):
    return sum(path.stat().st_blocks * 512 for path in out.iterdir())


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", required=True, type=Path)
    arguments.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    given = arguments.parse_args()
    write(SHAPE | dict(num_hidden_layers=given.layers, moe_layer_end_index=given.layers - 1), given.out)


if __name__ == "__main__":
    main()
