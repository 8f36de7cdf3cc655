#!/usr/bin/env python3
"""Reference outputs of SmolLM2-135M-Instruct by an independent implementation, in float32.

The GGUF is dequantised to a float32 GGUF (package `gguf`), and llama-cpp-python runs that one with a float32 KV
cache. With float32 weights llama.cpp quantises no activation, so its result is the model's own up to rounding.
Per prompt: the ids, the eight best next ids with their log-probabilities, and 32 greedy ids (end tokens do not end
the sequence) with their log-probabilities and the gap to the second choice.

    python3 -m venv venv && venv/bin/pip install llama-cpp-python==0.3.36 gguf==0.19.0
    venv/bin/python tools/make_smollm2_references.py SmolLM2-135M-Instruct.Q4_1.gguf tests/data/smollm2/references.json
"""

import hashlib
import importlib.metadata
import json
import os
import sys
import tempfile

import gguf
import llama_cpp
import numpy

GREEDY_TOKENS = 32
BEST = 8
THREADS = 2

CHAT = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n" \
       "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"

PROMPTS = [
    "The capital of France is",
    "Hello, we can use",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5,",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "The three states of matter are solid, liquid and gas. In a solid, the particles are packed closely together and "
    "can only vibrate. In a liquid, the particles can slide past one another. In a gas, the particles",
    CHAT.format("What is the largest planet of the solar system?"),
    CHAT.format("Write one sentence about the moon."),
    CHAT.format("Translate to Spanish: Good morning, my friend. Ça va? 你好"),
]


def dequantise(source: str, target: str) -> None:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        item = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, item)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)
        writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def log_softmax(logits: numpy.ndarray) -> numpy.ndarray:
    shifted = logits.astype(numpy.float64) - logits.max()
    return shifted - numpy.log(numpy.exp(shifted).sum())


def next_log_probabilities(model: llama_cpp.Llama) -> numpy.ndarray:
    pointer = llama_cpp.llama_get_logits_ith(model.ctx, -1)
    return log_softmax(numpy.ctypeslib.as_array(pointer, shape=(model.n_vocab(),)).copy())


def case_of(model: llama_cpp.Llama, prompt: str) -> dict:
    prompt_ids = model.tokenize(prompt.encode(), add_bos=False, special=True)
    model.reset()
    model.eval(prompt_ids)
    case = {"prompt": prompt, "prompt_ids": prompt_ids, "greedy_ids": [], "greedy_logprobs": [], "greedy_gap": []}
    for step in range(GREEDY_TOKENS):
        values = next_log_probabilities(model)
        best = numpy.argsort(-values, kind="stable")[:BEST]
        if step == 0:
            case["top_ids"] = [int(i) for i in best]
            case["top_logprobs"] = [round(float(values[i]), 6) for i in best]
        case["greedy_ids"].append(int(best[0]))
        case["greedy_logprobs"].append(round(float(values[best[0]]), 5))
        case["greedy_gap"].append(round(float(values[best[0]] - values[best[1]]), 5))
        model.eval([int(best[0])])
    return case


def main() -> None:
    source, output = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        plain = os.path.join(folder, "f32.gguf")
        dequantise(source, plain)
        model = llama_cpp.Llama(plain, n_ctx=512, n_batch=512, n_threads=THREADS, n_threads_batch=THREADS,
                                type_k=0, type_v=0, flash_attn=False, verbose=False)  # type 0 is float32
        cases = [case_of(model, prompt) for prompt in PROMPTS]
    version = importlib.metadata.version
    with open(source, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    result = {
        "source": f"llama-cpp-python {version('llama-cpp-python')}, float32 weights dequantised by gguf "
                  f"{version('gguf')}, float32 KV cache",
        "command": "venv/bin/pip install llama-cpp-python==0.3.36 gguf==0.19.0 && venv/bin/python "
                   "tools/make_smollm2_references.py SmolLM2-135M-Instruct.Q4_1.gguf "
                   "tests/data/smollm2/references.json",
        "model_sha256": digest,
        "cases": cases,
    }
    with open(output, "w", encoding="utf-8") as file:
        json.dump(result, file, ensure_ascii=False, indent=None, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    main()
