"""Phases, steps and module names of loops that know nothing of a recording."""

import contextlib
import gc
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from ligerprof.analyzers.explain.analysis import explain
from ligerprof.roles import Phase
from ligerprof.runs.recording.phases import LoopModels, LoopPhases
from ligerprof.runs.recording.record import Recorder, running
from ligerprof.snapshots.stamp import Stamp
from tests.runs.recording.operations import OperationHistory

Record = Callable[[Callable[[], Any]], OperationHistory]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Record a function; the folder is tmp_path."""

    def run(program: Callable[[], Any], **options: Any) -> OperationHistory:
        with OperationHistory() as history, running(Recorder(tmp_path, history=history, force=True, **options)):
            program()
        return history

    return run


def phases(history: OperationHistory, operation: str) -> list[tuple[int, str]]:
    return [(stamp.step, stamp.phase.value) for stamp in history.stamps_of(operation)]


def sine() -> nn.Module:
    """A model with weights that computes a sine and a loss outside it can be told apart from."""

    class Sine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return torch.sin(self.inner(values))

    torch.manual_seed(0)
    return Sine()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.cosh(model(torch.ones(2, 4))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_evaluation_between_steps_is_a_phase_and_not_a_step(record: Record, tmp_path: Path) -> None:
    model = sine()
    criterion = nn.Softplus()

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer)
        model.eval()
        with torch.no_grad():
            criterion(model(torch.ones(2, 4)))
            torch.zeros(3)
        model.train()
        step(model, optimizer)

    history = record(program)

    assert phases(history, "sin") == [(1, "forward"), (1, "evaluation"), (2, "forward")]
    assert phases(history, "softplus") == [(1, "evaluation")]
    assert phases(history, "zeros") == [(1, "outside")]
    assert list(explain(tmp_path).phases) == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.EVALUATION]


def test_a_trained_model_in_evaluation_mode_is_evaluated_even_with_gradients(record: Record) -> None:
    model = sine()

    def program() -> None:
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model.eval()
        model(torch.ones(2, 4))

    assert phases(record(program), "sin") == [(1, "forward"), (1, "evaluation")]


def test_a_model_that_is_only_trained_in_evaluation_mode_is_trained(record: Record) -> None:
    model = sine().eval()

    assert phases(record(lambda: step(model, torch.optim.SGD(model.parameters(), lr=0.1))), "sin") == [(1, "forward")]


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen before", "reference after"])
def test_models_without_gradients_belong_to_the_forward_pass_they_precede_and_score_after_it(
    record: Record, frozen: bool
) -> None:
    model, other = sine(), sine().eval().requires_grad_(not frozen)

    def look() -> None:
        with torch.no_grad():
            other(torch.ones(2, 4))

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            if frozen:
                look()
            loss = torch.cosh(model(torch.ones(2, 4))).sum()
            if not frozen:
                look()
            loss.backward()
            optimizer.step()

    of_step = ["forward", "forward" if frozen else "scoring"]
    assert phases(record(program), "sin") == [(step, phase) for step in (1, 2) for phase in of_step]


def test_a_loop_generates_scores_and_trains(record: Record, tmp_path: Path) -> None:
    """A policy that generates, is scored by a reward model and itself, trains beside a reference, and is evaluated."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    policy, reference = (transformers.LlamaForCausalLM(config) for _ in range(2))
    reward = sine().eval().requires_grad_(requires_grad=False)
    prompt = torch.ones(1, 3, dtype=torch.int64)

    def program() -> None:
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        for number in range(2):
            with torch.no_grad():
                if number:
                    text, cache = prompt, None
                    for _ in range(2):
                        cache = policy(
                            text[:, -1:] if cache else text, past_key_values=cache, use_cache=True
                        ).past_key_values
                else:
                    text = policy.generate(prompt, max_new_tokens=2, do_sample=False, pad_token_id=0)
                reward(torch.ones(2, 4))
                policy(text)
            logits = policy(text).logits
            with torch.no_grad():
                reference(text)
            torch.cosh(logits).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        policy.eval()
        with torch.no_grad():
            policy(prompt)

    history = record(program)
    of_step = ["generation", "generation", "scoring", "forward", "scoring"]
    found = [phase for _, phase in phases(history, "silu")]
    assert found == [*of_step, *of_step, "evaluation"]
    # a reward model has no silu; rotary embeddings have a sine, too
    assert [phase for _, phase in phases(history, "sin")].count("scoring") == 6
    assert {Phase.GENERATION, Phase.SCORING, Phase.EVALUATION} < explain(tmp_path).phases.keys()


def test_saving_is_a_phase_and_the_one_before_it_goes_on(record: Record, tmp_path: Path) -> None:
    model = sine()
    model.register_state_dict_post_hook(
        lambda _model, state, *_: state.update({key: state[key].exp() for key in state})
    )

    def program() -> None:
        loss = torch.cosh(model(torch.ones(2, 4))).sum()
        torch.save(model.state_dict(), io.BytesIO())
        torch.acos(loss)

    history = record(program)

    assert set(phases(history, "exp")) == {(1, "saving")}
    assert phases(history, "acos") == [(1, "forward")]
    assert Phase.SAVING in explain(tmp_path).phases


def test_every_outermost_model_names_its_own_modules(record: Record) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.module(values)

    first, second = sine(), nn.Sequential(sine(), sine())

    def program() -> None:
        first(torch.ones(2, 4))
        second(torch.ones(2, 4))
        # alone it ran before; as a part, it has a longer name
        Wrapper(first)(torch.ones(2, 4))
        first(torch.ones(2, 4))

    assert [stamp.module for stamp in record(program).stamps_of("sin")] == ["", "0", "1", "module", "module"]


def test_a_program_without_modules_and_optimizers_has_backward_and_steps_that_follow_from_it(record: Record) -> None:
    def program() -> None:
        weight = torch.ones(4, requires_grad=True)
        for _ in range(2):
            torch.autograd.grad(weight.tanh().sum(), weight)
        torch.zeros(2)

    # the optimizers of other tests
    gc.collect()
    history = record(program)

    assert phases(history, "tanh_backward") == [(1, "backward"), (2, "backward")]
    assert phases(history, "zeros") == [(2, "outside")]


class Gathered:
    """Computes what it contains when it is pickled."""

    def __reduce__(self) -> Any:
        return list, (torch.ones(2).acos().tolist(),)


def test_functions_that_a_program_imported_by_name_before_are_found_by_what_they_call(record: Record) -> None:
    model, backward, save = sine(), torch.autograd.backward, torch.save

    def program() -> None:
        backward([torch.cosh(model(torch.ones(2, 4))).sum()])
        save(Gathered(), io.BytesIO())
        torch.zeros(2)

    history = record(program)

    assert phases(history, "sinh") == [(1, "backward")]
    assert phases(history, "acos") == [(1, "saving")]
    assert phases(history, "zeros") == [(1, "outside")]


def test_several_optimizers_of_a_step_and_micro_batches_before_it_are_one_step(record: Record) -> None:
    model = sine()

    def program() -> None:
        optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in model.parameters()]
        for _ in range(2):
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()

    assert [step for step, _ in phases(record(program), "sin")] == [1, 1, 1, 2, 2, 2]


def test_a_gradient_that_is_part_of_a_loss_leaves_forward_as_it_was(record: Record) -> None:
    model = sine()

    def program() -> None:
        batch = torch.ones(2, 4, requires_grad=True)
        (penalty,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
        torch.cosh(penalty).sum().backward()

    history = record(program)

    assert phases(history, "cosh") == [(1, "forward")]
    assert phases(history, "sinh") == [(1, "backward")]


def test_a_program_of_torch_func_has_steps_and_gradients_inside_others_belong_to_them(record: Record) -> None:
    model = sine()
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cosh(torch.func.functional_call(model, weights, (torch.ones(2, 4),))).sum()

    def loss_after_a_step(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        gradients = torch.func.grad(loss)(weights)
        return loss({name: weight - gradients[name] for name, weight in weights.items()})

    def program() -> None:
        for _ in range(2):
            torch.func.grad(loss_after_a_step)(weights)
            torch.zeros(2)

    # the optimizers of other tests
    gc.collect()
    history = record(program)

    assert [number for number, phase in phases(history, "cosh") if phase == "forward"] == [1, 1, 2, 2]
    assert phases(history, "zeros") == [(1, "outside"), (2, "outside")]


def test_weights_that_move_after_the_first_step_are_built(record: Record) -> None:
    model = sine()

    def program() -> None:
        model(torch.ones(2, 4)).sum().backward()
        with contextlib.suppress(RuntimeError):
            model(torch.ones(2, 5))
        torch.zeros(2)
        sine().double()
        torch.zeros(2)

    history = record(program)

    assert {phase for _, phase in phases(history, "_to_copy")} == {"build"}
    assert phases(history, "zeros") == [(2, "outside"), (2, "outside")]


def test_models_in_reentrant_checkpoints_are_trained(record: Record) -> None:
    model = sine()

    def program() -> None:
        for _ in range(2):
            batch = torch.ones(2, 4, requires_grad=True)
            checkpoint(model, batch, use_reentrant=True).sum().backward()
        with torch.no_grad():
            checkpoint(model, torch.ones(2, 4), use_reentrant=True)

    gc.collect()
    expected = [(1, "forward"), (1, "backward"), (2, "forward"), (2, "backward"), (2, "evaluation")]
    assert phases(record(program), "sin") == expected


def test_an_optimizer_that_computes_the_loss_again_is_one_step(record: Record) -> None:
    model = sine()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(torch.ones(2, 4)).square().sum()
        value.backward()
        return value

    history = record(lambda: [optimizer.step(loss) for _ in range(2)])

    assert {number for number, _ in phases(history, "sin")} == {1, 2}
    assert {phase for _, phase in phases(history, "sin")} == {"forward"}
    assert {phase for _, phase in phases(history, "dot")} == {"optimizer"}


@pytest.mark.parametrize(
    ("first_step", "light", "full"), [(2, [], [2, 3, 4, 5, 6]), (3, [2], [3, 4, 5, 6]), (5, [4], [5, 6]), (9, [], [])]
)
def test_before_the_chosen_steps_the_history_is_off_but_for_the_last_of_them(
    record: Any, first_step: int, light: list[int], full: list[int]
) -> None:
    model = sine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    history = record(lambda: [step(model, optimizer) for _ in range(6)], first_step=first_step)

    # the first step allocates what stays: optimizer states
    assert [start.get("frames", True) for start in history.starts] == [True] + [False] * bool(light) + [True] * bool(
        full
    )
    assert phases(history, "addmm") == [(number, "forward") for number in [1, *light, *full]]
    modules = [stamp.module for stamp in history.stamps_of("addmm")]
    assert modules == ["" for _ in (1, *light)] + ["inner" for _ in full]


def test_torchs_profiler_names_modules_and_a_module_takes_any_argument_by_name(record: Record) -> None:
    class Named(nn.Module):
        def forward(self, module: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
            return torch.sin(module + original)

    def program() -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, with_stack=True, record_shapes=True) as profiler:
            Named()(module=torch.ones(2), original=torch.ones(2))
        found.update(event.name for event in profiler.events())

    found: set[str] = set()
    record(program)

    assert "nn.Module: Named_0" in found


def functions() -> list[Any]:
    """What a recorder may replace."""
    return [
        nn.Module.__call__,
        nn.Module.state_dict,
        torch.save,
        torch.autograd.backward,
        torch.autograd.grad,
        torch.optim.Optimizer.state_dict,
        vars(CheckpointFunction).get("apply"),
        nn.Module._apply,
    ]


def shared_forward(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """One forward pass, and one loss for each optimizer."""
    losses = [output.sum() for output in model(torch.ones(2, 4))]
    for loss, optimizer in zip(losses, optimizers, strict=True):
        loss.backward(retain_graph=True)
        optimizer.step()


def in_turns(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """As a generator and its discriminator."""
    for optimizer in optimizers:
        step(model, optimizer)


class Same(torch.autograd.Function):
    """It makes a node even without gradients."""

    @staticmethod
    def forward(_context: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def in_groups(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Micro-batches, each optimizer twice, metrics between the updates, and an evaluation."""
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    for optimizer in optimizers * 2:
        optimizer.step()
    with torch.no_grad():
        Same.apply(torch.ones(2))
    optimizers[0].step()
    with torch.no_grad():
        model.eval()(torch.ones(2, 4))
    model.train()


def with_closures(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """An optimizer that computes the loss again."""

    def loss() -> torch.Tensor:
        value = model(torch.ones(2, 4)).square().sum()
        value.backward()
        return value

    optimizers[0].step(loss)


def inside_backward(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Each optimizer steps when its gradients are there, and the last one again after backward."""
    handles = [
        optimizer.param_groups[0]["params"][0].register_post_accumulate_grad_hook(lambda _, each=optimizer: each.step())
        for optimizer in optimizers
    ]
    model(torch.ones(2, 4)).sum().backward()
    for handle in handles:
        handle.remove()
    optimizers[-1].step()


@pytest.mark.parametrize("iterate", [shared_forward, in_turns, in_groups, with_closures, inside_backward])
def test_while_the_history_is_off_steps_are_the_same(
    record: Any, iterate: Callable[[nn.Module, list[torch.optim.Optimizer]], None]
) -> None:
    def program() -> None:
        model = sine()
        optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in model.parameters()]
        for _ in range(8):
            iterate(model, optimizers)

    before = functions()
    every = phases(record(program), "sin")
    found = record(program, first_step=7)

    assert max(number for number, _ in every) in (8, 16)
    assert phases(found, "sin") == [each for each in every if each[0] not in range(2, 6)]
    assert functions() == before


def test_all_functions_are_restored(record: Record) -> None:
    before, during = functions(), []

    record(lambda: during.extend(functions()))

    assert not set(before) & set(during)
    assert functions() == before
    # what a module imported by name meanwhile only passes on
    weight = torch.ones(1, requires_grad=True)
    assert during[4](2 * weight, weight)[0].item() == 2


@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile(model)", "layer.compile()"])
def test_a_compiled_model_has_the_same_graphs_and_is_not_compiled_again(in_place: bool) -> None:
    class Chain(nn.Sequential):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            for module in self:
                values = module(values)
            return values

    def graphs(recorded: bool) -> tuple[list[int], list[str]]:
        torch._dynamo.reset()
        found: list[int] = []
        stamps: list[str] = []

        def backend(graph: Any, _inputs: Any) -> Any:
            found.append(len(graph.graph.nodes))
            return graph

        model = Chain(sine(), nn.Sequential(sine(), nn.Linear(4, 4)), Chain(nn.Linear(4, 4)))
        compiled = model if in_place else torch.compile(model, backend=backend)
        if in_place:
            # one of the model's own class, too
            model[0].compile(backend=backend)
            model[2].compile(backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = LoopPhases(stamps.append, on_step=lambda number: number == 3 and loop.stamp(enabled=False))
        if recorded:
            loop.open()
        for number in range(6):
            if recorded and number == 4:
                loop.stamp(enabled=True)
            if number == 5:
                loop.close()
            step(compiled, optimizer)
        return found, stamps

    (alone, _), (recorded, stamps) = graphs(recorded=False), graphs(recorded=True)

    assert len(alone) == 1 + in_place
    assert recorded == alone
    modules = {stamp.module for text in stamps if (stamp := Stamp.parse(text)) and stamp.phase is Phase.FORWARD}
    assert modules == ({"", "1", "1.0", "1.0.inner", "1.1"} if in_place else {""})


def test_models_that_say_nothing_of_themselves_have_no_role_and_do_not_stop_the_program() -> None:
    class Secretive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LazyLinear(4)

        def get_output_embeddings(self) -> nn.Module:
            raise NotImplementedError

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    models, secretive = LoopModels(), Secretive()
    models.note(secretive, Phase.FORWARD)
    assert models.described() == []
    secretive(torch.ones(2, 3))
    models.note(secretive, Phase.FORWARD)
    models.note(secretive, Phase.EVALUATION)
    (described,) = models.described()
    assert (described["role"], described["elements"], described["phases"]) == (None, 16, ["forward", "evaluation"])


def test_a_frozen_copy_of_the_policy_is_its_reference_and_a_model_without_a_head_the_value() -> None:
    class Language(nn.Linear):
        def get_output_embeddings(self) -> nn.Module | None:
            return self

    class Judge(nn.Linear):
        def get_output_embeddings(self) -> nn.Module | None:
            return None

    policy, reference, value, reward = Language(4, 8), Language(4, 8), Judge(4, 1), Judge(4, 1)
    for frozen in (reference, reward):
        frozen.requires_grad_(requires_grad=False)
    models = LoopModels()
    for model in (reward, reference, policy, value):
        models.note(model, Phase.SCORING)
    # what wraps a model is that model
    models.note(nn.Sequential(policy), Phase.FORWARD)
    assert [model["role"] for model in models.described()] == ["reward", "reference", "policy", "value"]
    assert models.described()[2]["phases"] == ["forward", "scoring"]
