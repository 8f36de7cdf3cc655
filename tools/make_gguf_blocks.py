#!/usr/bin/env python3
"""Writes tests/data/gguf_blocks.bin: random blocks of each GGUF format with their values as the `gguf` package gives
them (pip install gguf numpy). Per format: 8 bytes of name, uint32 weights, the blocks, the weights as float32."""

import struct
import sys

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

# Where each format keeps its f16 fields, so that they become ordinary numbers and not NaN.
HALVES = {Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q8_0: [0], Type.Q4_K: [0, 2], Type.Q6_K: [208]}

rng = np.random.default_rng(7)
with open(sys.argv[1] if len(sys.argv) > 1 else "tests/data/gguf_blocks.bin", "wb") as out:
    for kind, halves in HALVES.items():
        weights, size = GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (512 // weights, size), dtype=np.uint8)
        for at in halves:
            blocks[:, at:at + 2] = rng.normal(0, 0.1, (len(blocks), 1)).astype(np.float16).view(np.uint8)
        values = dequantize(blocks, kind).astype(np.float32).ravel()
        out.write(kind.name.lower().encode().ljust(8, b"\0") + struct.pack("<I", values.size))
        out.write(blocks.tobytes() + values.tobytes())
