"""A tiny language model with its tokenizer as a folder, and text that it can read."""

import random
from pathlib import Path

WORDS = [f"w{number}" for number in range(60)]


def model_folder(folder: Path, layers: int = 6, seed: int = 0) -> Path:
    """Write a Llama of 64 words to ``folder`` and return it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from support.tiny import llama

    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", "<s>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", bos_token="<s>"
    )
    tokenizer.save_pretrained(folder)
    model = llama(seed=seed, layers=layers, vocab=len(vocabulary), eos_token_id=1, bos_token_id=3)
    model.save_pretrained(folder)
    return folder


def text_file(file: Path, documents: int = 40, words: int = 30, seed: int = 3) -> Path:
    """Write documents of a skewed vocabulary, with blank lines between, and return the file."""
    numbers = random.Random(seed)
    weights = [1 / (1 + number) for number in range(len(WORDS))]
    lines = [" ".join(numbers.choices(WORDS, weights, k=words)) for _ in range(documents)]
    file.write_text("\n\n".join(lines), "utf-8")
    return file


def gguf_file(file: Path, layers: int = 2, seed: int = 0):
    """Write a Llama with byte-level tokens as an unquantized GGUF file; return the model."""
    import gguf
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    from support.tiny import llama

    model = llama(seed=seed, layers=layers)
    config = model.config
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    characters = list(bytes_to_unicode().values())[: config.vocab_size - 3]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<pad>", "<eos>", *characters, "AB"])
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        name = _gguf_name(name)
        values = tensor.numpy()
        for part, number in heads.items():
            if part in name:
                values = _interleaved(values, number)
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _gguf_name(name: str) -> str:
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for ours, theirs in names.items():
        name = name.replace(ours, theirs)
    return name


def _interleaved(weight, heads: int):
    """GGUF keeps the two halves of each rotary pair side by side."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(weight.shape).copy()
