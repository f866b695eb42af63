"""Weights of files without their values: shapes and dtypes come from headers, and no tensor of a file is read.

Weights in main memory have no values (see backend.cpp), so reading them would only take time.
"""

import atexit
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ligerprof.models.names import find_cached_config, hub_names
from ligerprof.runs.recording.imports import after_import_or_now
from ligerprof.runs.recording.settings import say
from ligerprof.units import GIB

_SHARD_BYTES = 4 * GIB
_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
_CHAT = (
    "{% for message in messages %}{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant\n{% endif %}"
)


class StandIns:
    """Folders in the place of models that are not on this machine; those of the catalog have a configuration there.

    In the place of the files of the hub stands a folder with the configuration, the header of the weights, and a
    tokenizer that makes a token of each byte, so that texts are as long as they can be. It goes when the process ends.

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


# as kWeightBytes in backend.cpp
WEIGHT_BYTES = 4 << 20


def install(stand_ins: StandIns) -> None:
    """Replace the functions that read weights."""
    load = torch.load

    def load_without_reading(f: Any, *arguments: Any, **named: Any) -> Any:
        # mapped tensors are read when the program computes with them or copies them in main memory
        if isinstance(f, (str, os.PathLike)) and zipfile.is_zipfile(f):
            named.setdefault("mmap", True)
        return load(f, *arguments, **named)

    torch.load = load_without_reading
    after_import_or_now("safetensors", _open_headers)
    after_import_or_now("transformers.utils.hub", stand_ins.install)
    after_import_or_now("transformers.modeling_utils", _leave_new_embeddings)
    after_import_or_now("datasets.load", _name_missing_data)


def _open_headers(module: Any) -> None:
    module.safe_open = _opened_by(module.safe_open)


def _opened_by(safe_open: Callable[..., Any]) -> Callable[..., Any]:
    def opened(filename: Any, framework: str = "pt", device: Any = "cpu", **named: Any) -> Any:
        file = safe_open(filename, framework=framework, device=device, **named)
        return _Weights(file, device) if framework in ("pt", "torch", "pytorch") else file

    return opened


class _Weights:
    """A safetensors file whose large tensors of floats are made from the header."""

    def __init__(self, file: Any, device: Any) -> None:
        self._file, self._device = file, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "_Weights":
        self._file.__enter__()
        return self

    def __exit__(self, *arguments: Any) -> None:
        self._file.__exit__(*arguments)

    def get_slice(self, name: str) -> Any:
        """A part of a tensor, as safetensors has it."""
        part = self._file.get_slice(name)
        return _Slice(part, _without_values(part), self._device)

    def get_tensor(self, name: str) -> Any:
        """A tensor on the file's device."""
        whole = _without_values(self._file.get_slice(name))
        return _read(self._file.get_tensor(name)) if whole is None else whole.to(self._device)


class _Slice:
    def __init__(self, part: Any, whole: torch.Tensor | None, device: Any) -> None:
        self._part, self._whole, self._device = part, whole, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __getitem__(self, index: Any) -> Any:
        if self._whole is None:
            return _read(self._part[index])
        return self._whole[index].to(self._device)


def _read(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a file, which has its values in main memory and takes them nowhere."""
    if tensor.is_floating_point() and tensor.device.type == "cpu":
        mark_weight(tensor)
    return tensor


def _without_values(part: Any) -> torch.Tensor | None:
    """A tensor of a slice's shape; None if its values are needed."""
    from safetensors.torch import _TYPES

    dtype = _TYPES.get(part.get_dtype())
    if dtype is None or not dtype.is_floating_point:
        return None
    whole: torch.Tensor = torch.ops.simulated_gpu.map_weight(part.get_shape(), dtype)
    if whole.nbytes < WEIGHT_BYTES:
        return None
    mark_weight(whole)
    return whole


def _leave_new_embeddings(module: Any) -> None:
    """A resized embedding begins with the mean and the covariance of the old one, which has no values here."""
    model: Any = module.PreTrainedModel
    begin = model._init_added_embeddings_weights_with_mean

    def begin_on_gpu(self: Any, old_embeddings: Any, *arguments: Any, **named: Any) -> Any:
        if has_no_values(old_embeddings.weight):
            return None
        return begin(self, old_embeddings, *arguments, **named)

    model._init_added_embeddings_weights_with_mean = begin_on_gpu


def is_weight(tensor: torch.Tensor) -> bool:
    """Whether a tensor in main memory comes from a file or from the GPU, or is a parameter that was drawn."""
    return tensor.device.type == "cpu" and torch.ops.simulated_gpu.is_weight(tensor)


def has_no_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a weight so large that it has no values in main memory."""
    return tensor.nbytes >= WEIGHT_BYTES and is_weight(tensor)


def mark_weight(tensor: torch.Tensor) -> None:
    """Let a tensor in main memory be a weight, if it shows all of its storage."""
    torch.ops.simulated_gpu.mark_weight(tensor)


def _name_missing_data(module: Any) -> None:
    load_dataset = module.load_dataset

    def load(path: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return load_dataset(path, *arguments, **named)
        except (OSError, ValueError, RuntimeError) as error:
            if not Path(str(path)).exists():
                say(f"the data set {path} is not on this machine, and a simulated run uses no network ({error})")
            raise

    module.load_dataset = load
