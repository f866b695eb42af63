import json
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ligerprof import kernels
from ligerprof.errors import KernelInputError
from ligerprof.kernels import apply
from ligerprof.kernels.options import LossOptions, LossRequest
from ligerprof.recipe.categories import Offload
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.measured.ranks import engine_of, run_ranks
from ligerprof.runs.outcome import Progress, StepOutcome
from ligerprof.runs.parallel import join_process_group, make_mesh, shard
from ligerprof.runs.training import built_model, make_trainer, train_step
from tests.kernels.models import tiny_model
from tests.runs.measured.ranks.test_group import outcome
from tests.runs.parallel.ranks import forked

RANKS, STEPS = 2, 2
CPU = torch.device("cpu")
# docs/several-gpus.md says "within rounding"
ROUNDING = 2e-6


class Unwatched:
    def phase(self, _phase: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def loss_made(self, _loss: Any) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose first dimensions do not divide by two, and whose head is its own."""
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama", vocab_size=77, intermediate_size=41, tie_word_embeddings=False).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tied")
    tiny_model("llama", vocab_size=77, num_hidden_layers=1).save_pretrained(path)
    return path


def recipe(folder: Path, **options: Any) -> TrainingRecipe:
    # a large step, so that a wrong gradient shows in the next loss
    given = {"precision": "fp32", "optimizer": "sgd", "seq": 9, "batch": 4, **options}
    return TrainingRecipe(model=str(folder), **given)


def batch_of(given: TrainingRecipe) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 77, (given.batch, given.seq), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "labels": ids}


def train(trainer: Any, batch: dict[str, torch.Tensor]) -> list[float]:
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.5
    return [float(train_step(trainer, batch, Unwatched())) for _ in range(STEPS)]


def losses_alone(given: TrainingRecipe, device: torch.device = CPU) -> list[float]:
    batch = {name: tensor.to(device) for name, tensor in batch_of(given).items()}
    with built_model(given, device) as model:
        return train(make_trainer(given, model, device.type), batch)


def train_as_rank(recipes: list[TrainingRecipe], rank: int, device: torch.device = CPU) -> list[list[float]]:
    """Losses of this rank's half of the batch under each recipe, one after the other in one group."""
    found = []
    for given in recipes:
        build, _ = engine_of(given.engine)
        with build(given, device, lambda _model: None) as trainer:
            half = {name: tensor.chunk(RANKS)[rank].to(device) for name, tensor in batch_of(given).items()}
            found.append(train(trainer, half))
    return found


def losses_together(recipes: list[TrainingRecipe]) -> list[list[float]]:
    return of_the_whole(forked(partial(train_as_rank, recipes), RANKS))


def of_the_whole(ranks: list[list[list[float]]]) -> list[list[float]]:
    """The losses of the whole batch: the means over equal halves."""
    return [[statistics.fmean(pair) for pair in zip(*both, strict=True)] for both in zip(*ranks, strict=True)]


def test_two_ranks_train_to_the_losses_of_one(folder: Path, tied: Path) -> None:
    engines: list[tuple[Path, dict[str, Any]]] = [
        (folder, {"engine": "ddp", "grad_accum": 2, "clip": 0.1}),
        (folder, {"engine": "ddp", "grad_accum": 2, "grad_sync": "every", "clip": 0.1}),
        (folder, {"engine": "fsdp2", "wrap": "accelerate", "clip": 0.1}),
        (folder, {"engine": "fsdp2", "grad_accum": 2, "clip": 0.1, "reshard": False}),
        (folder, {"engine": "fsdp2", "grad_accum": 2, "grad_sync": "every", "clip": 0.1}),
        (folder, {"engine": "fsdp2", "offload": "all", "clip": 0.1}),
        (folder, {"engine": "fsdp2", "replicate": 2}),
        (tied, {"engine": "fsdp2"}),
        (tied, {"engine": "fsdp2", "wrap": "accelerate", "checkpointing": False}),
    ]
    together = losses_together([recipe(path, gpus=RANKS, **options) for path, options in engines])
    for (path, options), losses in zip(engines, together, strict=True):
        alone = {name: value for name, value in options.items() if name in ("clip", "grad_accum")}
        assert losses == pytest.approx(losses_alone(recipe(path, **alone)), rel=ROUNDING), options


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of models on the CPU run in Triton's interpreter."""
    put_in: Callable[..., Any] = kernels.apply
    monkeypatch.setattr(kernels, "apply", lambda *given, **options: put_in(*given, **{**options, "device_kind": "cpu"}))


def test_kernels_train_sharded_weights_to_the_losses_of_one_process(
    folder: Path, tied: Path, interpreted: None
) -> None:
    cases = [(folder, "layers"), (tied, "accelerate")]
    sharded = [recipe(path, engine="fsdp2", gpus=RANKS, wrap=wrap, liger="all", batch=2) for path, wrap in cases]
    for (path, wrap), losses in zip(cases, losses_together(sharded), strict=True):
        assert losses == pytest.approx(losses_alone(recipe(path, batch=2)), rel=1e-5), (path, wrap)


class Ranges(Unwatched):
    """Counts the ranges of FSDP2 in each phase."""

    def __init__(self) -> None:
        self.found: dict[str, Counter[str]] = {}

    @contextmanager
    def phase(self, phase: Any) -> Iterator[None]:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            yield
        self.found[phase.value] = Counter(event.name for event in profiler.events())


def ranges_of_a_step(given: TrainingRecipe, _rank: int) -> dict[str, Counter[str]]:
    ranges = Ranges()
    build, _ = engine_of(given.engine)
    with build(given, CPU, lambda _model: None) as trainer:
        train_step(trainer, batch_of(given), ranges)
    return ranges.found


@pytest.mark.parametrize(
    ("wrap", "group", "gathered_in_backward"), [("accelerate", " (model.norm, lm_head)", 0), ("layers", "", 1)]
)
def test_the_fused_loss_gathers_the_head_once_a_pass(
    wrap: str, group: str, gathered_in_backward: int, folder: Path, interpreted: None
) -> None:
    given = recipe(folder, engine="fsdp2", gpus=RANKS, wrap=wrap, liger="flce", batch=1, checkpointing=False)
    phases = forked(partial(ranges_of_a_step, given), RANKS)[0]
    assert phases["forward"][f"FSDP::all_gather{group}"] == 1
    assert phases["backward"][f"FSDP::all_gather{group}"] == gathered_in_backward
    assert phases["backward"][f"FSDP::post_backward_reduce{group}"] == 1


def meets_a_shard(given: TrainingRecipe, _rank: int) -> str:
    """What the fused loss says of a head that nothing gathers."""
    build, _ = engine_of(given.engine)
    with build(given, CPU, lambda _model: None) as trainer:
        model: Any = trainer.model
        model.lm_head.reshard()
        request = LossRequest(labels=torch.zeros(1, 2, dtype=torch.long), num_items=None, options=LossOptions())
        hidden = torch.zeros(1, 2, model.config.hidden_size)
        try:
            # past the hook that gathers the weight
            model.lm_head.forward(hidden, loss=request)
        except KernelInputError as error:
            return str(error)
    return ""


def test_a_kernel_refuses_a_sharded_weight_in_a_line(folder: Path, interpreted: None) -> None:
    given = recipe(folder, engine="fsdp2", gpus=RANKS, wrap="accelerate", liger="flce")
    said = forked(partial(meets_a_shard, given), RANKS)[0]
    assert said.startswith("flce: the head's weight is split over ranks")


def test_undoing_kernels_leaves_the_model_sharded(folder: Path) -> None:
    def names(rank: int) -> list[list[str]]:
        given = recipe(folder, engine="fsdp2", gpus=RANKS)
        build, _ = engine_of(given.engine)
        with build(given, CPU, lambda _model: None) as trainer:
            model: Any = trainer.model
            before = [type(module).__qualname__ for module in model.modules()]
            # as `ligerprof.kernels.apply` on a model that is sharded afterwards
            return [before, undone(given)]

    def undone(given: TrainingRecipe) -> list[str]:
        with built_model(given, CPU, on_meta=True) as model:
            patch = apply(model, "all", device_kind="simulated")
            shard(model, given, make_mesh(given, "cpu"))
            patch.undo()
            return [type(module).__qualname__ for module in model.modules()]

    before, after = forked(names, RANKS)[0]
    assert after == before


def trains_on_its_gpu(recipes: list[TrainingRecipe], answers: Path, _progress: Progress) -> StepOutcome:
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    # the group serves all recipes, so that it has to communicate in main memory, too
    join_process_group(next(given for given in recipes if given.offload is not Offload.NONE), device)
    found = train_as_rank(recipes, rank, device)
    (answers / f"{rank}.json").write_text(json.dumps(found))
    return outcome(0)


@pytest.mark.gpu
def test_two_gpus_train_to_the_losses_of_one(folder: Path, tied: Path, tmp_path: Path) -> None:
    if torch.cuda.device_count() < RANKS:
        pytest.skip("one CUDA device")
    cases: list[tuple[Path, dict[str, Any]]] = [
        (folder, {"engine": "ddp", "liger": "all"}),
        (folder, {"engine": "fsdp2", "liger": "all"}),
        (folder, {"engine": "fsdp2", "liger": "all", "wrap": "accelerate", "grad_accum": 2, "clip": 0.1}),
        (tied, {"engine": "fsdp2", "liger": "all", "wrap": "accelerate", "checkpointing": False}),
        (tied, {"engine": "fsdp2", "offload": "all", "clip": 0.1}),
    ]
    recipes = [recipe(path, gpus=RANKS, **options) for path, options in cases]
    run_ranks(partial(trains_on_its_gpu, recipes, tmp_path), RANKS, tmp_path, print)
    together = of_the_whole([json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)])
    for (path, options), losses in zip(cases, together, strict=True):
        alone = {name: value for name, value in options.items() if name in ("clip", "grad_accum", "liger")}
        expected = losses_alone(recipe(path, **alone), torch.device("cuda", 0))
        # kernels may add in another order for half of the batch
        assert losses == pytest.approx(expected, rel=1e-4), options
