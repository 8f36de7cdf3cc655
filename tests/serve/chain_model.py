"""A model whose text is known beforehand: each token is followed by one fixed token.

Its layers add nothing, its embeddings are unit vectors and its output matrix is a permutation, so that token t is followed by
`follows[t]` with all the probability there is. A chain is a list of tokens as bytes: the first is written in a prompt, the
others are generated, then comes the end token. A byte of the prompt that begins no chain is repeated for ever.
"""

import json
import pathlib
import struct

BEGIN, END = "<|begin|>", "<|end|>"
WIDTH = 320  # of the vocabulary and of a unit vector: 256 bytes, the end token, chains' own tokens
END_ID, BEGIN_ID = 256, WIDTH - 1
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def spelled(token):
    """Token bytes as a tokenizer.json spells them."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return "".join(chr(byte if byte in visible else 256 + hidden.index(byte)) for byte in token)


def write_chain_model(folder, *chains, context=4096, begins=False):
    """Writes config, tokenizer and weights to `folder`; returns a function that gives a token's id. `begins`: the tokenizer puts a
    token before a text, and what the first chain generates is what follows that token, too."""
    folder = pathlib.Path(folder)
    ids = {bytes([byte]): byte for byte in range(256)}
    follows = list(range(WIDTH))
    for chain in chains:
        for token in chain:
            ids.setdefault(token, len(ids) + 1)
        for token, after in zip(chain, [*chain[1:], None]):
            follows[ids[token]] = END_ID if after is None else ids[after]
    if begins:
        follows[BEGIN_ID] = ids[chains[0][1]]
    assert max(ids.values()) < BEGIN_ID and sum(len(set(chain)) for chain in chains) == len({t for c in chains for t in c})

    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "hidden_size": WIDTH,
              "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 5, "num_key_value_heads": 5,
              "head_dim": 64, "vocab_size": WIDTH, "max_position_embeddings": context, "rms_norm_eps": 1e-6,
              "rope_theta": 10000.0, "tie_word_embeddings": False, "eos_token_id": END_ID}
    tokenizer = {"version": "1.0", "normalizer": None, "post_processor": None,
                 "added_tokens": [{"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
                                   "normalized": False, "special": True} for number, text in ((END_ID, END), (BEGIN_ID, BEGIN))],
                 "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
                 "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
                 "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                           "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                           "vocab": {spelled(token): number for token, number in ids.items()}, "merges": []}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": END, "bos_token": BEGIN,
                                                              "add_bos_token": begins}))

    def matrix(rows, columns, ones=()):
        values = bytearray(4 * rows * columns)
        for row, column in ones:
            struct.pack_into("<f", values, 4 * (row * columns + column), 1.0)
        return [rows, columns], values

    def vector(value):
        return [WIDTH], struct.pack("<f", value) * WIDTH

    layer = "model.layers.0."
    tensors = {"model.embed_tokens.weight": matrix(WIDTH, WIDTH, [(t, t) for t in range(WIDTH)]),
               "lm_head.weight": matrix(WIDTH, WIDTH, [(follows[t], t) for t in range(WIDTH)]),
               "model.norm.weight": vector(4.0),  # logits of 0 and 4 sqrt(WIDTH) = 71
               layer + "input_layernorm.weight": vector(1.0), layer + "post_attention_layernorm.weight": vector(1.0),
               **{f"{layer}self_attn.{m}_proj.weight": matrix(WIDTH, WIDTH) for m in "qkvo"},
               **{f"{layer}mlp.{m}_proj.weight": matrix(64, WIDTH) for m in ("gate", "up")},
               layer + "mlp.down_proj.weight": matrix(WIDTH, 64)}
    header, offset = {}, 0
    for name, (shape, values) in tensors.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + len(values)]}
        offset += len(values)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, values in tensors.values():
            out.write(values)
    return lambda token: ids[token]
