"""Find out whose configuration a file is, and read it with the files that it names."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any

from ligerprof.errors import RecipeError
from ligerprof.files import is_file, is_folder
from ligerprof.recipe.configs.accelerate import ACCELERATE, values_of_environment
from ligerprof.recipe.configs.axolotl import AXOLOTL
from ligerprof.recipe.configs.deepspeed import DEEPSPEED
from ligerprof.recipe.configs.documents import read_document
from ligerprof.recipe.configs.framework import Framework
from ligerprof.recipe.configs.llama_factory import LLAMA_FACTORY, LLAMA_FACTORY_1
from ligerprof.recipe.configs.methods import settle_method
from ligerprof.recipe.configs.open_instruct import OPEN_INSTRUCT
from ligerprof.recipe.configs.own import read_recipe, recipe_values
from ligerprof.recipe.configs.settings import Names, Reading, Setting
from ligerprof.recipe.configs.shared import FSDP
from ligerprof.recipe.configs.torchtitan import TORCHTITAN, values_of_function
from ligerprof.recipe.configs.trainer import TRANSFORMERS
from ligerprof.recipe.configs.trl import TRL_BY_NAME, TRL_DPO, TRL_REWARD, TRL_RL, TRL_SFT
from ligerprof.recipe.configs.wandb import arguments_of, is_trainers, read_run, unwrapped
from ligerprof.text import printable, short_repr

_AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
_BY_MODEL = {
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
}
_ON_CPU = {"device": "cpu", "pin_memory": True}


def _deepspeed(stage: int, **zero: Any) -> Mapping[str, Any]:
    enabled = {"enabled": "auto"}
    return {**_AUTO, "bf16": enabled, "fp16": enabled, "zero_optimization": {"stage": stage, **zero}}


# axolotl's deepspeed_configs/, as of 0.13
_AXOLOTL_2 = {"offload_optimizer": {"device": "cpu"}, "contiguous_gradients": True, "overlap_comm": True}
_AXOLOTL_3 = {
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 0,
    "max_live_parameters": 0,
    "max_reuse_distance": 0,
    "gather_16bit_weights_on_model_save": True,
    **_BY_MODEL,
}


def _axolotl_bf16(**zero: Any) -> Mapping[str, Any]:
    return {**_AUTO, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **_AXOLOTL_3, **zero}}


_AXOLOTL = {
    "zero1.json": _deepspeed(1, overlap_comm=True),
    "zero2.json": _deepspeed(2, **_AXOLOTL_2),
    "zero3.json": _deepspeed(3, **_AXOLOTL_3),
    "zero3_bf16.json": _axolotl_bf16(),
    "zero3_bf16_cpuoffload_all.json": _axolotl_bf16(offload_optimizer=_ON_CPU, offload_param=_ON_CPU),
    "zero3_bf16_cpuoffload_params.json": _axolotl_bf16(offload_param=_ON_CPU),
}
# LLaMA-Factory's examples/deepspeed/, as of 0.9.4
_FACTORY_2 = {
    "allgather_bucket_size": 5e8,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
    "overlap_comm": False,
}
_FACTORY_3 = {
    "overlap_comm": False,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
    **_BY_MODEL,
}
_LLAMA_FACTORY = {
    "ds_z0_config.json": _deepspeed(0, **_FACTORY_2),
    "ds_z2_config.json": _deepspeed(2, **_FACTORY_2),
    "ds_z2_offload_config.json": _deepspeed(2, offload_optimizer=_ON_CPU, **_FACTORY_2),
    "ds_z3_config.json": _deepspeed(3, **_FACTORY_3),
    "ds_z3_offload_config.json": _deepspeed(3, offload_optimizer=_ON_CPU, offload_param=_ON_CPU, **_FACTORY_3),
}


def _accelerate(kind: str, **more: Any) -> Mapping[str, Any]:
    return {"distributed_type": kind, "mixed_precision": "bf16", "num_processes": 8, **more}


# trl/accelerate_configs/, which `accelerate_config` names without a folder
TRL_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "single_gpu": _accelerate("NO"),
    "multi_gpu": _accelerate("MULTI_GPU"),
    "fsdp1": _accelerate("FSDP", fsdp_config={"fsdp_version": 1}),
    "fsdp2": _accelerate("FSDP", fsdp_config={"fsdp_version": 2, "fsdp_reshard_after_forward": True}),
    "zero1": _accelerate("DEEPSPEED", deepspeed_config={"zero_stage": 1, "gradient_accumulation_steps": 1}),
    "zero2": _accelerate("DEEPSPEED", deepspeed_config={"zero_stage": 2}),
    "zero3": _accelerate("DEEPSPEED", deepspeed_config={"zero_stage": 3, "zero3_save_16bit_model": True}),
}
_SHIPPED: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "axolotl": _AXOLOTL,
    "llama-factory": _LLAMA_FACTORY,
    **dict.fromkeys(("trl-sft", "trl-dpo", "trl-reward", "trl-rl"), TRL_PRESETS),
}


def shipped_file(framework: str, name: str) -> Mapping[str, Any] | None:
    """What the file of this name holds that the framework ships; None if it ships none."""
    return _SHIPPED.get(framework, {}).get(PurePath(name).name)


# a file with all keys of one of the sets at its top level is the framework's
_KEYS: Mapping[str, tuple[frozenset[str], ...]] = {
    "verl": (frozenset({"actor_rollout_ref"}), frozenset({"data", "optim", "engine", "trainer"})),
    "NeMo RL": (frozenset({"policy", "cluster"}),),
    "NeMo": (frozenset({"exp_manager"}), frozenset({"megatron_cfg"})),
    "Megatron-LM": (frozenset({"tensor_model_parallel_size", "num_layers"}), frozenset({"tensor-model-parallel-size"})),
    "ms-swift": (
        *(frozenset({key, "torch_dtype"}) for key in ("train_type", "sft_type")),
        *(frozenset({key}) for key in ("tuner_type", "rlhf_type", "tuner_backend", "template_type")),
        frozenset({"sft_type", "model_type"}),
    ),
    "nanotron": (frozenset({"parallelism", "tokens", "checkpoints"}),),
    "LitGPT": (frozenset({"checkpoint_dir", "out_dir", "train"}),),
    "PyTorch Lightning": (frozenset({"trainer", "fit"}), frozenset({"trainer", "model", "seed_everything"})),
    "OpenRLHF": (frozenset({"pretrain", "micro_train_batch_size"}),),
    "LLaVA": (frozenset({"vision_tower"}), frozenset({"mm_projector_type"})),
    "InternVL": (frozenset({"freeze_llm", "freeze_backbone"}),),
    "Qwen-VL": (frozenset({"tune_mm_vision"}), frozenset({"tune_mm_llm"})),
    # its keys may have hyphens or underscores
    "GPT-NeoX": (
        *(frozenset({f"pipe{mark}parallel{mark}size"}) for mark in "-_"),
        *(frozenset({f"num{mark}layers", f"pos{mark}emb"}) for mark in "-_"),
        *(frozenset({f"train{mark}data{mark}paths"}) for mark in "-_"),
        *(frozenset({f"data{mark}path", f"vocab{mark}file"}) for mark in "-_"),
    ),
    "LLM Foundry": (
        frozenset({"max_duration", "train_loader"}),
        frozenset({"max_duration", "device_train_microbatch_size"}),
        frozenset({"icl_tasks", "device_eval_batch_size"}),
    ),
    "EasyR1": (frozenset({"worker", "algorithm"}), frozenset({"worker", "trainer", "data"})),
}


def foreign_framework(values: Mapping[str, Any]) -> str | None:
    """The name of the framework that is not read and whose keys a file has; None for any other file."""
    # each object of torchtune's files names its class so
    if any(isinstance(value, Mapping) and "_component_" in value for value in values.values()):
        return "torchtune"
    # verl's trainer of supervised fine-tuning, whose sections have common names
    model = values.get("model")
    if isinstance(model, Mapping) and "partial_pretrain" in model:
        return "verl"
    return next((name for name, kinds in _KEYS.items() if any(keys <= values.keys() for keys in kinds)), None)


# in the order of preference where files fit several equally well
FRAMEWORKS: tuple[Framework, ...] = (
    TRANSFORMERS,
    TRL_SFT,
    TRL_DPO,
    TRL_REWARD,
    TRL_RL,
    AXOLOTL,
    LLAMA_FACTORY,
    LLAMA_FACTORY_1,
    OPEN_INSTRUCT,
    TORCHTITAN,
    ACCELERATE,
    DEEPSPEED,
    FSDP,
)
ENVIRONMENT = "env"
BY_NAME = {framework.name: framework for framework in (*FRAMEWORKS, *TRL_BY_NAME)}
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_MOST_FOLDERS = 8
# keys of a file that are compared with those of frameworks
_MOST_GUESSED, _LONGEST_KEY, _LEAST_LIKENESS = 20, 60, 0.85
# the content of files, in place of what is on the disk
Documents = Mapping[str, Mapping[str, Any]]


def read_sources(
    sources: Sequence[str], documents: Documents | None = None, others: Sequence[Reading] = ()
) -> list[Reading]:
    """Read configuration files in order, each followed by the files that it names.

    Args:
        sources: each a file, `NAME=FILE` with the name of a framework, `module:function` of torchtitan, or `env`
            for the environment of a process that accelerate launched.
        documents: the content of some of the files, by their names.
        others: what was read elsewhere, and comes last.

    Raises:
        RecipeError: not readable, of no known framework, or with a value that its key does not take.
    """
    documents = documents or {}
    readings = [_read_source(source, documents) for source in sources]
    given = {reading.framework for reading in readings}
    readings += others
    return list(_with_named_files(readings, given, documents))


def _with_named_files(readings: Iterable[Reading], given: set[str], documents: Documents) -> Iterator[Reading]:
    read: set[tuple[str, str]] = set()
    for reading in readings:
        yield reading
        for key, named in reading.files.items():
            # a file of that kind on the command line takes its place
            if named.framework in given:
                continue
            found = _read_named(reading, key, named, documents)
            # the files of a trainer and of its launcher may name the same one
            if (found.file, found.framework) not in read:
                read.add((found.file, found.framework))
                yield found


def _read_named(reading: Reading, key: str, named: Names, documents: Documents) -> Reading:
    values, path = read_named(reading.file, reading.framework, key, named.file)
    file = path or named.file
    found = BY_NAME[named.framework].read(documents.get(file, values), file)
    if path is None:
        found.assumed.append(f"{printable(named.file)} is not here: {reading.framework}'s file of that name")
    elif not Path(path).match(named.file):
        found.assumed.append(f"{printable(named.file)} is not here: {printable(path)} in its place")
    if Setting.GPUS in reading.settings:
        # an argument of the launcher, which wins over its file
        found.settings.pop(Setting.GPUS, None)
    return found


def read_named(file: str, framework: str, key: str, name: str) -> tuple[Mapping[str, Any], str | None]:
    """The content and the path of the file that a key of another one names.

    It is looked for in this folder, in the file's own, and in those above it; a path of another machine also by its
    last parts, and by its name alone next to the file. The path is None if it is in none of these, and the framework
    ships a file of this name.

    Args:
        file: the path of the file that names the other one.
        framework: whose file that is.

    Raises:
        RecipeError: the file does not exist or cannot be read.
    """
    folders = (Path(), *Path(file).resolve().parents[:_MOST_FOLDERS])
    parts = PureWindowsPath(name).parts if "\\" in name else Path(name).parts
    ends = (Path(*parts[start:]) for start in range(1, len(parts) - 1))
    # a name alone says too little for other folders than the file's
    alone = Path(file).resolve().parent / (parts or ("",))[-1]
    for path in (*(folder / name for folder in folders), *(folder / end for end in ends for folder in folders), alone):
        if is_file(path):
            return read_document(path), str(path)
    if (shipped := shipped_file(framework, name)) is not None:
        return shipped, None
    raise RecipeError(
        f"{file}: {key} names {printable(name)}, which is not in this folder or in one above the file."
        " Give it with another --config."
    )


def is_function(source: str) -> bool:
    """Whether a source is a `module:function` of torchtitan rather than a file."""
    return _FUNCTION.fullmatch(source) is not None and not Path(source).exists()


def _read_source(source: str, documents: Documents) -> Reading:
    name, _, rest = source.partition("=")
    if name in BY_NAME and rest:
        return _read_as(BY_NAME[name], documents.get(rest) or read_document(Path(rest)), rest)
    path = Path(source)
    if source == ENVIRONMENT and not path.exists():
        return _read_environment()
    if is_function(source):
        return TORCHTITAN.read(documents.get(source) or values_of_function(source), source)
    values = documents.get(source) or read_document(path / "recipe.json" if is_folder(path) else path)
    if (recipe := recipe_values(values)) is not None:
        return read_recipe(recipe, source)
    if (run := unwrapped(values)) is not None:
        if is_trainers(run):
            arguments = arguments_of(run)
            framework = recognize(arguments, source)
            # the model's config has keys of its own, such as id2label
            return settled(framework, read_run(run, framework, source), arguments)
        values = run
    framework = recognize(values, source)
    return settled(framework, framework.read(values, source), values)


def _read_as(framework: Framework, values: Mapping[str, Any], file: str) -> Reading:
    """Read a file whose framework is named; wandb's of a run, too."""
    run = unwrapped(values)
    if run is not None and is_trainers(run):
        return read_run(run, framework, file)
    return framework.read(values, file)


def settled(framework: Framework, reading: Reading, values: Mapping[str, Any]) -> Reading:
    """The reading with its method, where the framework alone does not say it."""
    if framework.family or (framework is LLAMA_FACTORY and "stage" not in values):
        settle_method(reading, values)
    return reading


def _read_environment() -> Reading:
    values = values_of_environment(os.environ)
    if not values:
        raise RecipeError(
            "--config env: no variable of accelerate is set. Run it in a process that accelerate launched."
        )
    return ACCELERATE.read(values, ENVIRONMENT)


def _misspelled(values: Mapping[str, Any], source: str) -> str:
    """A question about the framework whose keys are most like a file's, and those keys; empty if none are."""
    keys = [key for key in list(values)[:_MOST_GUESSED] if len(key) <= _LONGEST_KEY]
    guesses = []
    for framework in FRAMEWORKS:
        found = [(key, get_close_matches(key, framework.rows, 1, _LEAST_LIKENESS)) for key in keys]
        guesses.append(([(key, near[0]) for key, near in found if near], framework))
    pairs, framework = max(guesses, key=lambda guess: len(guess[0]))
    wrong = ", ".join(f"{near} for {short_repr(key)}" for key, near in pairs if key != near)
    if len(pairs) < max(2, len(keys) / 2):
        return ""
    return f" Did you mean {framework.name}={short_repr(source)[1:-1]}{f', with {wrong}' if wrong else ''}?"


def recognize(values: Mapping[str, Any], source: str) -> Framework:
    """The framework whose table knows most of a file's keys, and more of them as its own than any other.

    Raises:
        RecipeError: the file is of no known framework, of one that is not read, or of either of two.
    """

    def misfit(framework: Framework) -> tuple[int, int]:
        return len(framework.unknown_keys(values)), -len(framework.signature & values.keys())

    if (foreign := foreign_framework(values)) is not None:
        raise RecipeError(
            f"{source}: a configuration of {foreign}, whose files ligerprof does not read. Give its values as options,"
            " such as --model, --batch, --seq and --precision."
        )
    is_toml = Path(source).suffix.lower() == ".toml"
    known = [each for each in FRAMEWORKS if each.signature & values.keys() and (is_toml or each is not TORCHTITAN)]
    best = sorted(known, key=misfit)
    shown = ", ".join(printable(key)[:40] for key in list(values)[:5])
    names = ", ".join(BY_NAME)
    if not best or not best[0].knows_most(values):
        raise RecipeError(
            f"{source}: not the configuration of a training run that ligerprof knows (its first keys: {shown})."
            f"{_misspelled(values, source)} Name the framework, as in NAME={short_repr(source)[1:-1]}; names: {names}."
        )
    if len(best) > 1 and misfit(best[0]) == misfit(best[1]) and not (best[0].family == best[1].family != ""):
        raise RecipeError(
            f"{source}: could be {best[0].title} or {best[1].title} (its first keys: {shown})."
            f" Choose one: --config {best[0].name}=FILE or --config {best[1].name}=FILE."
        )
    return best[0]
