"""A program that compiles functions; run by test_machine.py on a simulated H200, without and with --eager."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

MIB = 1 << 20
EAGER = "--eager" in sys.argv
WEIGHT = torch.randn(1024, 1024, device="cuda", requires_grad=True)


def chain(value: torch.Tensor) -> torch.Tensor:
    return ((value.relu() * 2 + 1).sin() / 3).exp()


def layer(value: torch.Tensor) -> torch.Tensor:
    return F.gelu(value @ WEIGHT).cos()


def layers(value: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, checkpoint(layer, value, use_reentrant=False), use_reentrant=False)


def highest_bytes(function, *arguments) -> int:
    """What a call needs besides what was there and library workspaces, once it is compiled."""
    function(*arguments)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function(*arguments)
    return torch.cuda.max_memory_allocated() - before


def trained(function, value: torch.Tensor) -> None:
    function(value).sum().backward()
    WEIGHT.grad = None


value = torch.randn(4, 1024, 1024, device="cuda")
if not EAGER:
    for mode, named in (("max-autotune-no-cudagraphs", "--eager"), ("reduce-overhead", "CUDA graphs")):
        with pytest.raises(Exception, match=named):
            torch.compile(chain, mode=mode)(value)
size_bytes = 16 * MIB
# one kernel makes the result, in place of one for each operator with its own result
assert highest_bytes(torch.compile(chain), value) == (2 if EAGER else 1) * size_bytes
# gelu and cos replace the product where nothing keeps it
with torch.no_grad():
    assert highest_bytes(torch.compile(layer), value) == (2 if EAGER else 1) * size_bytes
# the product alone is kept for backward, which computes gelu again
compiled = torch.compile(layer)
trained(compiled, value)
before = torch.cuda.memory_allocated()
result = compiled(value)
kept_bytes = torch.cuda.memory_allocated() - before
assert kept_bytes == (3 if EAGER else 2) * size_bytes, kept_bytes
del result
# an H200 pads large 16-bit products with an odd side, in copies of what it multiplies
for inner, pads in ((1001, not EAGER), (983, False), (1024, False)):
    sides = [torch.randn(*shape, device="cuda").bfloat16() for shape in ((4096, inner), (inner, 2480))]
    padded_bytes = highest_bytes(torch.compile(torch.mm), *sides) - 4096 * 2480 * 2
    assert (padded_bytes > 4096 * inner * 2) is pads, (inner, padded_bytes)
# lists of layers, which the machine watches, break no graph
stack = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8)) for _ in range(4)).cuda()


def through(value: torch.Tensor) -> torch.Tensor:
    for each in stack[:3]:
        value = each(value)
    return value


torch.compile(through, fullgraph=True)(torch.ones(2, 8, device="cuda")).sum().backward()
# with states of random numbers kept for a second forward pass
trained(torch.compile(layers), value)

# what the program knows stays known when compiled code has read it
tokens = torch.tensor([3, 1, 2], device="cuda")
table = torch.randn(8, 4, device="cuda")


def read() -> torch.Tensor:
    return table[tokens].sum()


assert torch.compile(read)().shape == ()
assert tokens.tolist() == [3, 1, 2]
# lengths that change are compiled once more
for length in (64, 128, 192):
    assert torch.compile(chain)(torch.randn(length, 8, device="cuda")).shape == (length, 8)
print("all checks passed")
