"""A program that asks torch what a GPU would answer; run by test_machine.py with a simulated RTX 4090."""

import copy
import ctypes
import gc
import importlib
import os
import pickle
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ligerprof.errors import UnsupportedError
from ligerprof.simulated_gpu.patches import _refusal_behind

HALVES = (torch.float16, torch.float32)


class MemoryInfo(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def allocated() -> int:
    return int(torch.cuda.memory_allocated())


@torch.jit.script
def _scripted(values: torch.Tensor) -> torch.Tensor:
    return torch.tanh(values * 2.0) + 1.0


def checks() -> None:
    # the answers of torch.cuda
    assert torch.cuda.is_available()
    assert torch.cuda.get_device_name() == "NVIDIA GeForce RTX 4090"
    assert torch.cuda.get_device_capability() == (8, 9)
    for use in (torch.cuda.set_device, lambda index: torch.ones(1).to(f"cuda:{index}"), torch.nn.Linear(2, 2).cuda):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            use(1)
    assert torch.cuda.mem_get_info()[1] == torch.cuda.get_device_properties(0).total_memory

    # parameters keep their identity, and memory goes with the last reference
    layer = torch.nn.Linear(1024, 1024)
    weight = layer.weight
    assert layer.to("cuda").weight is weight
    assert weight.is_cuda
    before = allocated()
    kept = copy.deepcopy(layer)
    assert allocated() == before + 4 * 1024 * 1024 + 4 * 1024
    del kept
    assert allocated() == before

    # cuBLAS keeps its workspaces until they are cleared
    square = torch.empty(64, 64, device="cuda")
    before = allocated()
    square.mm(square)
    assert allocated() > before
    torch._C._cuda_clearCublasWorkspaces()
    assert allocated() == before
    del square

    # weights in main memory get no values, and take as many random numbers as if they did
    drawn = []
    for is_weight in (True, False):
        torch.manual_seed(0)
        n = (1 << 19) + 4
        # the last one takes so many numbers that they are jumped over
        for made in (torch.empty((1 << 20) + 8), torch.empty_strided((n, 2), (1, n)), torch.empty(12_000_008)):
            kept = torch.nn.Parameter(made) if is_weight else None
            torch.nn.init.normal_(made)
            torch.nn.init.uniform_(made)
            assert torch.ops.simulated_gpu.is_weight(made) == is_weight, kept
        drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[1]

    # other large floats keep their values, also on the way to the GPU
    pictures = torch.rand(4, 3, 364, 364).double().float().clone() + 0.1
    pictures[1].zero_()
    assert 0.1 < pictures[0].mean() < 0.9
    assert torch.full((2048, 1024), -1.0).zero_().add_(2).mean() == 2
    assert (pictures.cuda().to(torch.bfloat16) == 0).flatten(1).all(1).tolist() == [False, True, False, False]
    assert torch.equal(pictures.cuda().half().cpu(), pictures.half())

    # what is computed is finite, as loss scalers ask
    for size in (16, 1 << 23):
        computed = torch.randn(size, device="cuda").half()
        assert not torch.isinf(computed).any()
        assert not computed.isnan().any()
        assert computed.isfinite().all()
        assert not bool(torch.zeros(1, dtype=torch.bool, device="cuda").logical_or_(torch.isinf(computed).any()))
    del computed

    # what follows from the host is known: labels, masks, positions
    labels = torch.tensor([3, -100, 5, -100, 7]).cuda()
    assert labels[labels != -100].tolist() == [3, 5, 7]
    assert (labels != -100).nonzero().flatten().tolist() == [0, 2, 4]
    assert torch.arange(4, device="cuda").cumsum(0).tolist() == [0, 1, 3, 6]
    positions = torch.zeros(4, dtype=torch.long, device="cuda")
    positions[1:3] += 2
    assert positions.tolist() == [0, 2, 2, 0]

    # a number written where a mask holds takes no positions; rows do
    scores = torch.randn(64, 1024, device="cuda")
    ones, everywhere = torch.ones((), device="cuda"), torch.ones(64, 1024, dtype=torch.bool, device="cuda")
    for write, takes_positions in (
        (lambda: scores.__setitem__(scores < 0, -1.0), False),
        (lambda: scores.__setitem__((slice(None), scores[0] < 0), -1.0), False),
        (lambda: scores.__setitem__(everywhere, ones), True),
    ):
        torch.cuda.reset_peak_memory_stats()
        before = allocated()
        write()
        assert (torch.cuda.max_memory_allocated() - before > scores.nbytes) == takes_positions
    labels[labels == -100] = 0
    assert labels.tolist() == [3, 0, 5, 0, 7]

    # indices in main memory
    labels[torch.tensor([0, 1])] = torch.tensor([8, 9]).cuda()
    assert labels[torch.tensor([1, 0])].tolist() == [9, 8]

    # NVIDIA's library answers for this GPU, where pynvml asks it; a package that an option replaces is named
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "pynvml.py").write_text("def _LoadNvmlLibrary(): raise OSError\n")
        sys.path.insert(0, folder)
        sys.modules.pop("pynvml", None)
        pynvml = importlib.import_module("pynvml")
        sys.path.remove(folder)
    pynvml._LoadNvmlLibrary()
    memory, count = MemoryInfo(), ctypes.c_uint()
    assert pynvml.nvmlLib.nvmlDeviceGetMemoryInfo(None, ctypes.byref(memory)) == 0
    assert memory.free + memory.used == memory.total == torch.cuda.mem_get_info()[1]
    assert pynvml.nvmlLib.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    assert count.value == 1
    assert pynvml.nvmlLib.nvmlDeviceGetFanSpeed(None, None) != 0
    assert "--flash-attn" in str(_refusal_behind(ModuleNotFoundError("No module named 'flash_attn'")))

    # operands of different dtypes
    for operation, shapes in ((F.linear, ((2, 8), (8, 8))), (F.conv1d, ((1, 8, 4), (8, 8, 3)))):
        with pytest.raises(RuntimeError, match=r"same dtype|should be the same"):
            operation(
                *(torch.zeros(*shape, dtype=dtype, device="cuda") for shape, dtype in zip(shapes, HALVES, strict=True))
            )
    heads = [torch.zeros(1, 2, 4, 8, dtype=dtype, device="cuda") for dtype in (*HALVES, torch.float16)]
    with pytest.raises(RuntimeError, match="same dtype"):
        F.scaled_dot_product_attention(*heads)

    # optimizers whose learning rate is a tensor, and nn.DataParallel on one GPU
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        tiny = torch.nn.Linear(8, 8).cuda()
        stepped = kind(tiny.parameters(), lr=torch.tensor(0.1), fused=True)
        torch.nn.DataParallel(tiny)(torch.randn(4, 8)).sum().backward()
        stepped.step()

    # what a model computes is made up: finite, and never listed as known
    loss = layer(torch.randn(4, 1024, device="cuda")).square().mean()
    assert torch.isfinite(loss)
    assert not torch.isnan(loss)
    loss.backward()
    assert layer.weight.grad is not None

    # autograd adds to a gradient in place where nobody else holds it: one buffer of the tied weight, not two
    embedding = torch.nn.Embedding(4096, 256, device="cuda")
    hidden = embedding(torch.randint(4096, (8,), device="cuda"))
    torch.cuda.reset_peak_memory_stats()
    before = allocated()
    F.linear(hidden, embedding.weight).sum().backward()
    size = 4 * 4096 * 256
    assert torch.cuda.max_memory_allocated() - before < 2.2 * size + (64 << 20)
    assert embedding.weight.grad is not None

    # checkpointing stops its recomputation with an exception inside an operator
    block = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5), torch.nn.GELU()).cuda()
    inputs = torch.randn(8, 64, device="cuda", requires_grad=True)
    checkpoint(block, inputs, use_reentrant=False).sum().backward()
    assert inputs.grad is not None

    # autocast's and attention's lists are CUDA's
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert layer(torch.randn(2, 1024, device="cuda")).dtype == torch.bfloat16
        assert torch.nn.LayerNorm(1024).cuda()(torch.randn(2, 1024, device="cuda")).dtype == torch.float32

    # streams: a block that another stream uses is free once that stream has ended its work
    stream = torch.cuda.Stream()
    block = torch.empty(1 << 20, device="cuda")
    block.record_stream(stream)
    before = allocated()
    del block
    assert allocated() == before
    torch.cuda.synchronize()
    assert allocated() == before - (4 << 20)

    # convolutions and batch norms choose cuDNN's layout
    images = torch.randn(2, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    convolution = torch.nn.Conv2d(3, 8, 3).cuda().to(memory_format=torch.channels_last)
    assert convolution(images).is_contiguous(memory_format=torch.channels_last)

    # kernels that call others: the fast path of an encoder, with a mask and without, and bags of embeddings
    encoder = torch.nn.TransformerEncoderLayer(64, 2, 128, batch_first=True).cuda().eval()
    words = torch.randn(2, 8, 64, device="cuda")
    padding = torch.zeros(2, 8, dtype=torch.bool, device="cuda")
    with torch.no_grad():
        assert encoder(words).shape == encoder(words, src_key_padding_mask=padding).shape == words.shape
        torch.cuda.reset_peak_memory_stats()
        before = allocated()
        assert encoder.self_attn(words, words, words)[1].shape == (2, 8, 8)
        # query, key and value in one block, and in another after their bias
        assert torch.cuda.max_memory_allocated() - before >= 2 * 3 * words.nbytes
    for mode in ("sum", "mean", "max"):
        bags = torch.nn.EmbeddingBag(100, 8, mode=mode, device="cuda")
        bags(torch.randint(100, (4, 3)).cuda()).sum().backward()
        assert bags.weight.grad.shape == (100, 8)
    sparse = torch.nn.Embedding(100, 8, sparse=True, device="cuda")(torch.arange(4).cuda()).sum()
    with pytest.raises(UnsupportedError, match="embeddings with sparse=True"):
        sparse.backward()

    # parameters of lazy modules move before they have a shape; scripts run, also once their profile is known
    lazy = torch.nn.LazyLinear(8).to("cuda").to(torch.bfloat16)
    assert lazy(torch.randn(3, 5, dtype=torch.bfloat16, device="cuda")).shape == (3, 8)
    assert not torch._C._jit_can_fuse_on_gpu()
    assert not torch._C._jit_texpr_fuser_enabled()
    for _ in range(3):
        assert _scripted(words).shape == words.shape

    # pinned memory and copies
    pinned = torch.empty(1000, pin_memory=True)
    assert pinned.is_pinned()
    assert pinned.to("cuda", non_blocking=True).is_cuda

    # a checkpoint gives its shapes back, also under another name, and known values
    with tempfile.TemporaryDirectory() as folder:
        path, copied = Path(folder, "weights.pt"), Path(folder, "copied.pt")
        torch.save({"model": layer.state_dict(), "positions": positions, "step": 3}, path)
        assert path.stat().st_size > 4 << 20
        shutil.copy(path, copied)
        path.unlink()
        before = allocated()
        found = torch.load(copied, map_location="cpu")
        assert allocated() == before
        assert found["model"]["weight"].shape == (1024, 1024)
        assert (found["positions"].tolist(), found["step"]) == ([0, 2, 2, 0], 3)
        assert torch.load(copied)["model"]["weight"].is_cuda
        assert pickle.loads(pickle.dumps(layer.weight)).is_cuda

        # neither saving nor loading keeps tensors until the next garbage collection
        gc.collect()
        gc.disable()
        before = allocated()
        for _ in range(2):
            torch.save([torch.ones(1024, 1024, device="cuda")], path)
            torch.load(path)
        assert allocated() == before
        gc.enable()


def run_out() -> None:
    # a limit, and a program that survives it
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        torch.empty(7 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        # the program is not a test: pytest is not there
        assert "CUDA out of memory. Tried to allocate 7.00 GiB" in str(error)  # noqa: PT017
    else:
        raise AssertionError("no limit")
    assert torch.cuda.memory_stats()["num_ooms"] == 1


checks()
if "--out-of-memory" in sys.argv:
    run_out()
print("all checks passed")
if "--exit" in sys.argv:
    os._exit(5)
