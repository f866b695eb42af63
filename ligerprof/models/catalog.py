"""The built-in models; loads a ModelSpec by name, config.json or model folder."""

from functools import cache
from pathlib import Path
from typing import Any

from ligerprof.errors import UnknownModelError
from ligerprof.files import FileKind, read_json
from ligerprof.models.from_config import spec_from_config
from ligerprof.models.spec import ModelSpec

DEFAULT_MODEL = "llama3.2-1b"
_CONFIG = FileKind(error=UnknownModelError, hint="Give a transformers config.json.", max_bytes=4 * 2**20)
_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")


def _llama(sizes: tuple[int, int, int, int, int], **more: Any) -> dict[str, Any]:
    """A config of the Llama family.

    Args:
        sizes: hidden size, intermediate size, layers, heads, key-value heads.
        more: other keys, or other values of these.
    """
    hidden, intermediate, layers, heads, kv_heads = sizes
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": 128256,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        **more,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "llama3.2-1b": _llama((2048, 8192, 16, 32, 8), tie_word_embeddings=True),
    "llama3.2-3b": _llama((3072, 8192, 28, 24, 8), tie_word_embeddings=True),
    "llama3-8b": _llama((4096, 14336, 32, 32, 8), max_position_embeddings=8192),
    "llama3.1-8b": _llama((4096, 14336, 32, 32, 8)),
    "llama3.1-70b": _llama((8192, 28672, 80, 64, 8)),
    "llama3.1-405b": _llama((16384, 53248, 126, 128, 8)),
    "llama2-7b": _llama((4096, 11008, 32, 32, 32), vocab_size=32000, max_position_embeddings=4096, rope_theta=10000.0),
    "gemma2-2b": {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 256000,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "gpt2-xl": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 1600,
        "n_layer": 48,
        "n_head": 25,
        "n_positions": 1024,
        "vocab_size": 50257,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    "phi3-mini": _llama(
        (3072, 8192, 32, 32, 32),
        model_type="phi3",
        architectures=["Phi3ForCausalLM"],
        vocab_size=32064,
        max_position_embeddings=4096,
        rope_theta=10000.0,
        sliding_window=2047,
        bos_token_id=1,
        eos_token_id=32000,
        pad_token_id=32000,
    ),
    "olmo2-7b": _llama(
        (4096, 11008, 32, 32, 32),
        model_type="olmo2",
        architectures=["Olmo2ForCausalLM"],
        vocab_size=100352,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        eos_token_id=100257,
        pad_token_id=100277,
    ),
    # small enough for a CPU; none of its sizes is a multiple of a kernel's block
    "tiny": _llama((96, 272, 2, 6, 2), vocab_size=1009, max_position_embeddings=512, tie_word_embeddings=True),
}


def load_model(model: str) -> ModelSpec:
    """Describe a model by built-in name, config.json or folder; raises UnknownModelError for anything else."""
    if model in CONFIGS:
        return _named(model)
    path = Path(model)
    if path.is_dir():
        has_weights = any(any(path.glob(pattern)) for pattern in _WEIGHT_PATTERNS)
        config = read_json(path / "config.json", _CONFIG)
        return spec_from_config(config, name=path.name or model, weights_path=str(path) if has_weights else None)
    if path.is_file():
        return spec_from_config(read_json(path, _CONFIG), name=path.parent.name or path.stem)
    raise UnknownModelError(
        f"unknown model {model!r}: neither a path nor one of {', '.join(CONFIGS)}. Run `ligerprof models`."
    )


@cache
def _named(name: str) -> ModelSpec:
    return spec_from_config(CONFIGS[name], name=name)
