"""torchtitan's two forms: TOML of older versions, and a function that returns dataclasses."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ligerprof.errors import LigerprofError, MissingDependencyError, RecipeError, UnsupportedError
from ligerprof.recipe.configs.resolve import load_recipe
from ligerprof.recipe.configs.sources import read_sources

TOML = """
[job]
dump_folder = "./outputs"

[model]
name = "llama3"
flavor = "8B"

[optimizer]
name = "AdamW"
lr = 3e-4
implementation = "foreach"

[training]
local_batch_size = 2
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1

[activation_checkpoint]
mode = "full"

[compile]
enable = false
"""

MODULE = '''
"""Dataclasses nested as torchtitan nests them: a Config in the class that it configures."""
from dataclasses import dataclass, field


class FullAC:
    @dataclass
    class Config:
        preserve_rng_state: bool = True


class SelectiveAC:
    @dataclass
    class Config:
        force_recompute_mm_shapes_by_fqns: list = field(default_factory=lambda: ["moe.router.gate"])


class CrossEntropyLoss:
    @dataclass
    class Config:
        global_vocab_size: int = 128256


class ChunkedLossWrapper:
    @dataclass
    class Config:
        num_chunks: int = 8
        loss_fn: object = field(default_factory=CrossEntropyLoss.Config)


class FlexAttention:
    @dataclass
    class Config:
        block_size: int = 128


@dataclass
class Model:
    layers: list = field(default_factory=list)


@dataclass
class ModelSpec:
    flavor: str
    model: Model
    name: str = "llama3"
    parallelize_fn: object = print


@dataclass
class TrainingConfig:
    num_tokens_per_microbatch_per_dp_rank: int = 16384
    num_tokens_per_train_step: int = -1
    max_context_length: int = 8192
    max_norm: float = 1.0
    dtype: str = "float32"
    mixed_precision_param: str = "bfloat16"
    disable_cuda_graphs: bool = True


@dataclass
class ParallelismConfig:
    data_parallel_shard_degree: int = -1
    tensor_parallel_degree: int = 1


class Trainer:
    @dataclass
    class Config:
        model_spec: ModelSpec
        activation_checkpoint: object
        loss: object = field(default_factory=CrossEntropyLoss.Config)
        training: TrainingConfig = field(default_factory=TrainingConfig)
        parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)


def full():
    return Trainer.Config(ModelSpec("8B", Model()), FullAC.Config())


def chunked():
    return Trainer.Config(ModelSpec("8B", Model()), FullAC.Config(), loss=ChunkedLossWrapper.Config())


def many_chunks():
    return Trainer.Config(ModelSpec("8B", Model()), FullAC.Config(), loss=ChunkedLossWrapper.Config(32))


def chunks_of_another_loss():
    loss = ChunkedLossWrapper.Config(loss_fn=FlexAttention.Config())
    return Trainer.Config(ModelSpec("8B", Model()), FullAC.Config(), loss=loss)


def no_checkpointing():
    return Trainer.Config(ModelSpec("8B", Model()), None)


def selective():
    return Trainer.Config(ModelSpec("8B", Model()), SelectiveAC.Config())


def flex():
    training = TrainingConfig(num_tokens_per_train_step=2**19)
    return Trainer.Config(ModelSpec("8B", Model([FlexAttention.Config()])), FullAC.Config(), training=training)


def tensor_parallel():
    return Trainer.Config(ModelSpec("8B", Model()), FullAC.Config(), parallelism=ParallelismConfig(1, 4))


def debug():
    return Trainer.Config(ModelSpec("debugmodel", Model()), FullAC.Config())


def odd_tokens():
    return Trainer.Config(ModelSpec("8B", Model()), FullAC.Config(), training=TrainingConfig(10_000))


def endless():
    model = Model()
    model.layers.append(model)
    return Trainer.Config(ModelSpec("8B", model), FullAC.Config())


def raises():
    raise ValueError("no \\x1b[31m GPU")


def returns_text():
    return "8B"


def wants():
    import a_module_that_nobody_has
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "titan_example.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield "titan_example"
    sys.modules.pop("titan_example", None)
    if str(tmp_path) in sys.path:
        sys.path.remove(str(tmp_path))


def test_toml(tmp_path: Path) -> None:
    path = tmp_path / "llama3_8b.toml"
    path.write_text(TOML, encoding="utf-8")
    recipe, report = load_recipe([str(path)], {})
    assert (recipe.spec.layers, recipe.spec.hidden_size, recipe.spec.vocab_size) == (32, 4096, 128256)
    assert (recipe.batch, recipe.seq, recipe.precision, recipe.optimizer) == (2, 8192, "amp", "adamw-foreach")
    assert (recipe.checkpointing, recipe.clip, recipe.engine) == (True, 1.0, "torch")
    assert report.unknown == ()
    several, _ = load_recipe([str(path)], {"gpus": 8})
    assert (several.engine, several.gpus, several.precision, several.wrap) == ("fsdp2", 8, "mixed", "accelerate")


@pytest.mark.parametrize(
    ("lines", "every"),
    [('mode = "full"', 1), ('mode = "selective"', 2), ("", 2), ('mode = "selective"\nselective_ac_option = "0"', 1)],
    ids=["full", "selective", "default", "each"],
)
def test_toml_checkpoints_every_nth_layer(tmp_path: Path, lines: str, every: int) -> None:
    path = tmp_path / "llama3_8b.toml"
    path.write_text(TOML.replace('mode = "full"', lines), encoding="utf-8")
    recipe, report = load_recipe([str(path)], {})
    assert (recipe.checkpointing, recipe.checkpoint_every) == (True, every)
    assert any("torchtitan's is the last" in sentence for sentence in report.assumed) == (every > 1)


def test_every_micro_batch_reduces_its_gradients(tmp_path: Path) -> None:
    text = "[training]\nlocal_batch_size = 1\nglobal_batch_size = 8\n[parallelism]\ndata_parallel_shard_degree = 2\n"
    (tmp_path / "a.toml").write_text(text, encoding="utf-8")
    recipe, _ = load_recipe([str(tmp_path / "a.toml")], {"model": "tiny"})
    assert (recipe.engine, recipe.grad_accum, recipe.grad_sync) == ("fsdp2", 4, "every")


def test_toml_of_a_memory_budget_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "llama3_8b.toml"
    path.write_text(TOML.replace('"full"', '"memory_budget"'), encoding="utf-8")
    with pytest.raises(UnsupportedError, match="checkpointing within a memory budget is not supported yet"):
        load_recipe([str(path)], {})


def test_the_chunked_loss(module: str) -> None:
    recipe, _ = load_recipe([f"{module}:chunked"], {})
    assert recipe.loss == "titan-chunked"
    with pytest.raises(UnsupportedError, match=r"loss: torchtitan's chunked loss under fsdp2 .*--loss hf, or"):
        load_recipe([f"{module}:chunked"], {"gpus": 8})
    several, _ = load_recipe([f"{module}:chunked"], {"gpus": 8, "loss": "chunked-nll"})
    assert (several.engine, several.loss) == ("fsdp2", "chunked-nll")


def test_flex_attention_and_a_step_of_several_micro_batches(module: str) -> None:
    recipe, report = load_recipe([f"{module}:flex"], {"gpus": 8})
    # 2 sequences of 8192 tokens on each of 8 GPUs are a quarter of 2**19 tokens
    assert (recipe.attention, recipe.grad_accum, recipe.engine) == ("sdpa", 4, "fsdp2")
    assert any(sentence.startswith("flex attention keeps") for sentence in report.assumed)


def test_a_model_of_the_hub_in_toml(tmp_path: Path) -> None:
    path = tmp_path / "full.toml"
    text = TOML.replace('flavor = "8B"', 'flavor = "full"').replace('"llama3"', '"transformers_modeling_backend"')
    path.write_text(f'{text}\n[hf_transformers]\nmodel = "Qwen/Qwen3-4B"\n', encoding="utf-8")
    assert load_recipe([str(path)], {})[0].spec.name == "Qwen/Qwen3-4B"


def selective_toml(lines: str) -> str:
    return TOML.replace('mode = "full"', f'mode = "selective"\n{lines}')


def test_kept_outputs(module: str, tmp_path: Path) -> None:
    assert load_recipe([f"{module}:selective"], {"gpus": 8})[0].selective == "torchtitan"
    path = tmp_path / "llama3_8b.toml"
    path.write_text(selective_toml('selective_ac_option = "op"'), encoding="utf-8")
    recipe, report = load_recipe([str(path)], {"gpus": 8})
    assert (recipe.checkpointing, recipe.checkpoint_every, recipe.selective) == (True, 1, "torchtitan")
    assert (recipe.engine, report.unknown) == ("fsdp2", ())
    # the routers of a mixture of experts are computed again unless the file says otherwise
    mixture, _ = load_recipe([str(path)], {"model": "qwen3-30b-a3b"})
    assert mixture.selective == "torchtitan-2048x128"
    path.write_text(selective_toml('selective_ac_option = "mm"'), encoding="utf-8")
    with pytest.raises(UnsupportedError, match="the option 'mm' is not supported"):
        load_recipe([str(path)], {})


@pytest.mark.parametrize(
    ("names", "shapes"),
    [
        ("[]", ""),
        ('["attention.wq", "w2"]', "-4096x4096-14336x4096"),
        ('["feed_forward"]', "-4096x14336-14336x4096"),
        ('["no.such.layer"]', ""),
    ],
)
def test_products_that_are_computed_again(tmp_path: Path, names: str, shapes: str) -> None:
    path = tmp_path / "llama3_8b.toml"
    lines = f'selective_ac_option = "op"\nper_op_sac_force_recompute_mm_shapes_by_fqns = {names}'
    path.write_text(selective_toml(lines), encoding="utf-8")
    recipe, report = load_recipe([str(path)], {})
    assert recipe.selective == f"torchtitan{shapes}"
    assert any("'no.such.layer'" in sentence for sentence in report.assumed) == ("no.such" in names)


@pytest.mark.parametrize(("function", "checkpointing"), [("full", True), ("no_checkpointing", False)])
def test_a_function(module: str, function: str, checkpointing: bool) -> None:
    recipe, report = load_recipe([f"{module}:{function}"], {})
    assert (recipe.batch, recipe.seq, recipe.precision, recipe.checkpointing) == (2, 8192, "amp", checkpointing)
    assert (recipe.loss, recipe.optimizer, recipe.spec.layers) == ("hf", "adamw-fused", 32)
    assert report.files == ((f"{module}:{function}", "torchtitan"),)
    assert report.unknown == ()


@pytest.mark.parametrize(
    ("function", "error", "says"),
    [
        ("many_chunks", UnsupportedError, "a loss in 32 chunks"),
        ("chunks_of_another_loss", UnsupportedError, "the loss ChunkedLossWrapper of FlexAttention"),
        ("tensor_parallel", UnsupportedError, "parallelism.tensor_parallel_degree: 4: tensor parallelism"),
        ("odd_tokens", UnsupportedError, "10000 tokens in sequences of 8192"),
        ("debug", RecipeError, "unknown model"),
        ("endless", RecipeError, "too large to read"),
        ("raises", RecipeError, "cannot be called (ValueError: no"),
        ("returns_text", RecipeError, "returns str, not a configuration"),
        ("wants", MissingDependencyError, "a_module_that_nobody_has"),
        ("nothing", RecipeError, "has no attribute"),
    ],
)
def test_errors_of_functions_are_one_line(module: str, function: str, error: type[LigerprofError], says: str) -> None:
    with pytest.raises(error) as caught:
        load_recipe([f"{module}:{function}"], {})
    message = str(caught.value)
    assert says in message
    assert message.isprintable()
    assert len(message) < 350


def test_a_file_with_a_colon_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sft:a").write_text("per_device_train_batch_size: 3\noutput_dir: x\n", encoding="utf-8")
    assert read_sources(["sft:a"])[0].framework == "transformers"
    with pytest.raises(MissingDependencyError, match="No module named 'no_such_module'"):
        read_sources(["no_such_module:f"])
