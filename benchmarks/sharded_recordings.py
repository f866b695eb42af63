"""Record FSDP without GPUs: a small Llama as one of four ranks, with torch's fake process group.

    python benchmarks/sharded_recordings.py build/recordings

Tensors of ordinary training on CPUs represent GPU memory; each storage is a block of the simulated allocator, with the
Python stack that allocated it. The folder gets one xz-compressed snapshot per program.
"""

import contextlib
import functools
import gc
import lzma
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig

from ligerprof.gpus import find_gpu
from ligerprof.runs.simulated.device import DeviceLimits, SimulatedDevice
from ligerprof.runs.simulated.recorder import StorageRecorder
from ligerprof.torch_memory.allocator.settings import parse_allocator_settings

RANKS = 4
LLAMA = LlamaConfig(
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=2000,
    tie_word_embeddings=False,
)


class RealTensorRecorder(StorageRecorder):
    """Records the storages of plain tensors with values, which a fake process group's collectives leave unchanged."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            listed = result if isinstance(result, (list, tuple)) else [result]
            self._track([value for value in listed if type(value) in (torch.Tensor, torch.nn.Parameter)])
        return result

    @contextlib.contextmanager
    def resizes(self) -> Any:
        """Record resized storages, which is how FSDP frees and allocates gathered weights."""
        resize = torch.UntypedStorage.resize_

        def recorded(storage: torch.UntypedStorage, size_bytes: int) -> Any:
            result = resize(storage, size_bytes)
            if storage._cdata in self._held:
                self._device.release(self._held.pop(storage._cdata)[0])
            if storage.size():
                self._watch(storage, self._device.allocate(storage.size()))
            return result

        torch.UntypedStorage.resize_ = recorded  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def train(model: Any, *, micro_batches: int = 1) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(3):
        for number in range(micro_batches):
            if micro_batches > 1:
                model.set_requires_gradient_sync(number == micro_batches - 1)
            tokens = torch.randint(0, LLAMA.vocab_size, (2, 64))
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def shard(**options: Any) -> Any:
    model = AutoModelForCausalLM.from_config(LLAMA, dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=options.pop("reduce", torch.float32))
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy, **options)
    return fully_shard(model, mp_policy=policy, **options)


def fsdp2_nosync() -> Any:
    return train(shard(), micro_batches=2)


def hsdp2() -> Any:
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("replicate", "shard"))
    return train(shard(mesh=mesh, reduce=torch.bfloat16))


def fsdp1_flat() -> Any:
    model = AutoModelForCausalLM.from_config(LLAMA, dtype=torch.float32)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(model.model.layers[0])})
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    return train(
        FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=torch.device("cpu"), mixed_precision=precision
        )
    )


def record(program: Callable[[], Any]) -> Any:
    gpu = find_gpu("h200")
    limits = DeviceLimits(capacity_bytes=gpu.usable_bytes, limit_bytes=None)
    device = SimulatedDevice(gpu, limits, parse_allocator_settings(""), record=True)
    recorder = RealTensorRecorder(device)
    gc.disable()
    with recorder, recorder.resizes():
        kept = program()
        snapshot = device.snapshot()
    del kept
    for event in snapshot["device_traces"][0]:
        event["frames"] = [
            frame for frame in event["frames"] if frame["name"] not in ("__torch_dispatch__", "recorded")
        ]
    return snapshot


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    for program in (fsdp2_nosync, hsdp2, fsdp1_flat):
        name = "simulated-" + program.__name__.replace("_", "-")
        (folder / f"{name}.pickle.xz").write_bytes(lzma.compress(pickle.dumps(record(program))))


if __name__ == "__main__":
    main()
