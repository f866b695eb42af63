"""Models that are not on this machine: those of the catalog have a configuration there, and need no weights.

In the place of the files of the hub stands a folder with the configuration, the header of the weights, and a tokenizer
that makes a token of each byte, so that texts are as long as they can be. It goes when the process ends.
"""

import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ligerprof.models.names import find_cached_config, hub_names
from ligerprof.runs.recording.progress import say
from ligerprof.units import GIB

_SHARD_BYTES = 4 * GIB
_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
_CHAT = (
    "{% for message in messages %}{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant\n{% endif %}"
)


class StandIns:
    """Folders in the place of models.

    Attributes:
        models: hub ids of the models that have one.
    """

    def __init__(self) -> None:
        self._folders: dict[str, Path | None] = {}

    @property
    def models(self) -> list[str]:
        """The models, in order."""
        return sorted(name for name, folder in self._folders.items() if folder is not None)

    def install(self, module: Any) -> None:
        """Let transformers find the folders where it would ask the hub."""
        cached_files = module.cached_files

        def found(path_or_repo_id: Any, filenames: Any, *arguments: Any, **named: Any) -> Any:
            folder = self._folder_of(str(path_or_repo_id))
            return cached_files(folder or path_or_repo_id, filenames, *arguments, **named)

        module.cached_files = found

    def _folder_of(self, name: str) -> Path | None:
        if name not in self._folders:
            known = hub_names().get(name.casefold()) if name.count("/") == 1 and not Path(name).exists() else None
            is_missing = known is not None and find_cached_config(name) is None
            # while the folder is made, transformers may ask for the model
            self._folders[name] = None
            self._folders[name] = _make(name, dict(known[1])) if known is not None and is_missing else None
        return self._folders[name]


def _make(name: str, config: dict[str, Any]) -> Path:
    import transformers

    folder = Path(tempfile.mkdtemp(prefix="ligerprof-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tokenizer = _tokenizer(config)
    config |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config["pad_token_id"] = tokenizer.pad_token_id
    config.setdefault("dtype", "bfloat16")
    made = transformers.AutoConfig.for_model(**config)
    kind: Any = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        model = kind(made)
    tied = set(model._tied_weights_keys or ()) if made.tie_word_embeddings else set()
    dtype = getattr(torch, config["dtype"])
    weights = {
        key: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for key, tensor in model.state_dict().items()
        if key not in tied
    }
    tokenizer.save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    _write_shards(folder, weights)
    say(
        f"{name} is not on this machine: its configuration is the catalog's, its weights are in {config['dtype']}, and"
        " its tokenizer makes a token of each byte, so sequences are as long as they can be"
    )
    return folder


def _write_shards(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Files that main memory has address space for: safetensors maps a whole file."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size_bytes = 0
    for key, tensor in weights.items():
        if shards[-1] and size_bytes + tensor.nbytes > _SHARD_BYTES:
            shards.append({})
            size_bytes = 0
        shards[-1][key] = tensor
        size_bytes += tensor.nbytes
    if len(shards) == 1:
        _write_header(folder / "model.safetensors", weights)
        return
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        _write_header(folder / name, shard)
    places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in weights.values())}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _write_header(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """A file of safetensors with a hole in the place of values."""
    from safetensors.torch import _TYPES

    names = {dtype: name for name, dtype in _TYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in weights.items():
        begin, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        header[key] = {"dtype": names[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _tokenizer(config: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*_SPECIAL.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast: Any = PreTrainedTokenizerFast
    made = fast(tokenizer_object=tokenizer, **_SPECIAL)
    made.model_max_length = config.get("max_position_embeddings", config.get("n_positions", 1 << 20))
    made.chat_template = _CHAT
    return made
