import pytest

from ligerprof.errors import RecipeError, UnknownModelError
from ligerprof.runs.bench.operations import OPERATIONS
from ligerprof.runs.bench.records import BENCH_KERNELS, Direction, find_kernels, find_shapes

MB = 10**6


@pytest.mark.parametrize("kernel", BENCH_KERNELS)
@pytest.mark.parametrize("name", ["study", "paper", "llama", "A,B,C", "tiny@64", "H=2048,V=512,T=100"])
def test_every_kernel_has_every_shape_under_one_name(kernel: str, name: str) -> None:
    shapes = find_shapes(kernel, name)
    assert len({shape.name for shape in shapes}) == len(shapes) >= 1
    assert all(OPERATIONS[kernel].sizes(shape) for shape in shapes)
    assert all(shape.heads % shape.kv_heads == 0 for shape in shapes)
    # a set's shapes can be asked for one by one
    assert shapes == tuple(one for shape in shapes for one in find_shapes(kernel, shape.name))


def test_the_studied_shapes() -> None:
    assert [OPERATIONS["flce"].sizes(shape) for shape in find_shapes("flce", "study")] == [
        "4096x2048x128256",
        "16384x2048x128256",
        "8192x4096x128256",
    ]
    (shape,) = find_shapes("rms", "study")
    assert (shape.tokens, shape.hidden, shape.intermediate) == (8192, 4096, 14336)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (32, 8, 128)


def test_the_papers_shapes() -> None:
    assert [shape.vocab for shape in find_shapes("ce", "paper")] == [40960, 81920, 122880, 163840]
    assert [shape.seq_len for shape in find_shapes("geglu", "paper")] == [4096, 8192, 12288, 16384]
    for kernel in ("rms", "layernorm", "rope"):
        shapes = find_shapes(kernel, "paper")
        assert [shape.hidden for shape in shapes] == [4096, 8192, 12288, 16384]
        assert all(shape.heads * shape.head_dim == shape.hidden for shape in shapes)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", RecipeError),
        ("paper,llama9", UnknownModelError),
        ("llama3.1-8b@many", RecipeError),
        ("H=1000", RecipeError),
    ],
)
def test_wrong_shapes_say_so(text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        find_shapes("rms", text)


def test_kernels_by_name() -> None:
    assert find_kernels(["all"]) == BENCH_KERNELS
    assert find_kernels(["rms", "ce", "rms"]) == ("rms", "ce")
    with pytest.raises(RecipeError, match="rmss"):
        find_kernels(["rmss"])


@pytest.mark.parametrize(
    ("kernel", "forward_mb", "backward_mb"),
    [
        ("rms", 134, 201),
        ("layernorm", 134, 201),
        ("add_rms", 268, 268),
        ("rope", 168, 168),
        ("swiglu", 705, 1174),
        ("geglu", 705, 1174),
    ],
)
def test_fewest_bytes_of_the_studied_shape(kernel: str, forward_mb: int, backward_mb: int) -> None:
    (shape,) = find_shapes(kernel, "study")
    moved = {direction: OPERATIONS[kernel].fewest_bytes(shape, 2, direction) for direction in Direction}
    assert moved[Direction.FORWARD] == pytest.approx(forward_mb * MB, rel=0.005)
    assert moved[Direction.BACKWARD] == pytest.approx(backward_mb * MB, rel=0.005)
    assert moved[Direction.FULL] == (moved[Direction.FORWARD] or 0) + (moved[Direction.BACKWARD] or 0)
    assert OPERATIONS[kernel].fewest_bytes(shape, 4, Direction.FULL) == 2 * (moved[Direction.FULL] or 0)


def test_losses_have_a_floor_only_as_a_whole() -> None:
    (shape,) = find_shapes("ce", "C")
    assert OPERATIONS["ce"].fewest_bytes(shape, 2, Direction.FULL) == 2 * 8192 * 128256 * 2
    for kernel, direction in (("ce", Direction.FORWARD), ("ce", Direction.BACKWARD), ("flce", Direction.FULL)):
        assert OPERATIONS[kernel].fewest_bytes(shape, 2, direction) is None
