"""Find out whose configuration a file is, and read it with the files that it names."""

import csv
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any

from ligerprof.errors import RecipeError
from ligerprof.files import is_file, is_folder, opened
from ligerprof.recipe.categories import Engine, Precision
from ligerprof.recipe.configs.accelerate import ACCELERATE, values_of_environment
from ligerprof.recipe.configs.axolotl import AXOLOTL
from ligerprof.recipe.configs.deepspeed import DEEPSPEED
from ligerprof.recipe.configs.documents import read_document
from ligerprof.recipe.configs.llama_factory import LLAMA_FACTORY, LLAMA_FACTORY_1
from ligerprof.recipe.configs.open_instruct import OPEN_INSTRUCT
from ligerprof.recipe.configs.rows import Framework, known_keys
from ligerprof.recipe.configs.settings import OTHER_METHOD, Names, Reading, Setting
from ligerprof.recipe.configs.shared import FSDP
from ligerprof.recipe.configs.torchtitan import TORCHTITAN, values_of_function
from ligerprof.recipe.configs.trainer import TRANSFORMERS
from ligerprof.recipe.configs.trl import TRL_BY_NAME, TRL_DPO, TRL_REWARD, TRL_RL, TRL_SFT
from ligerprof.recipe.configs.wandb import arguments_of, is_trainers, read_run, unwrapped
from ligerprof.recipe.training import RECIPE_OPTIONS, TrainingRecipe
from ligerprof.text import printable, short_repr

_MOST_BYTES = 2**20
_MOST_FILES, _METHOD_MOST_FOLDERS = 1000, 100
_SUFFIXES = (".parquet", ".arrow", ".jsonl", ".json", ".csv")
_NAMES_DATA = re.compile(
    r"(train(ing)?_)?(data|dataset)s?(_(name|name_or_path|id_or_path|path|dir|files?|file_path|mixer|mixer_list|mixture))?"
    r"|train_(files?|path)"
)
# keys that name the data in an entry of a list of data sets
_NAMES_ENTRY = frozenset({"path", "id", "name_or_path", "data_dir", "data_files", "dataset", "dataset_name", "train"})
_NAMES_COLUMNS = frozenset({"columns", "dataset_columns"})


def columns_named_in(values: Mapping[str, Any], file: str) -> Iterator[tuple[str, frozenset[str]]]:
    """The columns of each data set that a configuration names, with the key that names it.

    A configuration may list columns itself. Data sets of other machines and of the hub, and files in a format that
    cannot be read here, are left out.
    """
    for key, value in values.items():
        for listed in _listed_columns(key, value):
            yield key, listed
        if _NAMES_DATA.fullmatch(key):
            for name in _names(value):
                if (columns := _columns_of(name, file)) is not None:
                    yield key, columns


def _listed_columns(key: str, value: Any) -> Iterator[frozenset[str]]:
    if key in _NAMES_COLUMNS and isinstance(value, list):
        yield frozenset(map(str, value))
    elif isinstance(value, Mapping):
        for inner, item in value.items():
            yield from _listed_columns(str(inner), item)
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, Mapping):
                yield from _listed_columns("", item)


def _names(value: Any) -> Iterator[str]:
    """Names of data sets in the value of a key: a name, a list, a mapping from names to shares, or objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _names(item)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if isinstance(item, (int, float)):
                yield str(name)
            elif name in _NAMES_ENTRY or _NAMES_DATA.fullmatch(str(name)):
                yield from _names(item)


def _columns_of(name: str, file: str) -> frozenset[str] | None:
    """The columns of a data set in this folder or in that of the file that names it."""
    for folder in (Path(), Path(file).parent):
        path = folder / Path(name).expanduser() if name and name.isprintable() else None
        if path is not None and is_file(path):
            return _of_file(path)
        if path is not None and is_folder(path):
            return _of_folder(path)
    return None


def _of_folder(folder: Path) -> frozenset[str] | None:
    """The columns of a folder's files, of the split `train` if there is one; None if they differ."""
    for described in (folder / "dataset_info.json", folder / "train" / "dataset_info.json"):
        # `save_to_disk` of datasets writes it
        if is_file(described) and isinstance(features := (_first_object(described) or {}).get("features"), Mapping):
            return frozenset(features)
    found = [path for path in islice(_files(folder), _MOST_FILES) if path.suffix.lower() in _SUFFIXES]
    chosen = [path for path in found if "train" in str(path.relative_to(folder)).lower()] or found
    columns = {_of_file(path) for path in (*chosen[:1], *chosen[-1:])}
    return columns.pop() if len(columns) == 1 else None


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in islice(os.walk(folder), _METHOD_MOST_FOLDERS):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent) / name for name in sorted(names) if not name.startswith((".", "dataset_", "state")))


def _of_file(path: Path) -> frozenset[str] | None:
    suffix = path.suffix.lower()
    if suffix in (".parquet", ".arrow"):
        return _of_table(path)
    if suffix == ".csv":
        return frozenset(next(csv.reader(_head(path).splitlines()[:1]), ())) or None
    row = _first_object(path) if suffix in (".json", ".jsonl") else None
    return None if row is None else frozenset(row)


def _head(path: Path) -> str:
    try:
        with opened(path) as file:
            return file.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _first_object(path: Path) -> Mapping[str, Any] | None:
    """The first object of a JSON file: of an array, of lines, or the only one."""
    try:
        first, _ = json.JSONDecoder().raw_decode(_head(path).lstrip("\ufeff \t\r\n["))
    except (ValueError, RecursionError):
        return None
    return first if isinstance(first, Mapping) else None


def _of_table(path: Path) -> frozenset[str] | None:
    """The columns of a parquet or arrow file; None without pyarrow."""
    try:
        import pyarrow as pa
        from pyarrow import ipc, parquet
    except ImportError:
        return None
    try:
        if path.suffix.lower() == ".parquet":
            return frozenset(parquet.read_schema(path).names)
        with pa.memory_map(str(path)) as source:
            return frozenset(ipc.open_stream(source).schema.names)
    except (OSError, ValueError):
        return None


_PREFERENCE = "DPO or another preference method, with pairs of sequences"
_UNPAIRED = "KTO or another preference method, with a label per sequence"
_PAIRS = "DPO, a reward model or another method on pairs of sequences"
_REWARD = "reward modeling, with a classification head"
_STEPS = "a reward model of steps, with a classification head"
_RL = "reinforcement learning (GRPO, RLOO, PPO and the like)"
_EMBEDDING = "training of embeddings, which has another loss and no logits of the vocabulary"
_CLASSIFIER = "classification, which has another head and loss"
_MASKED = "training on masked tokens"
_DISTILLATION = "distillation from a teacher model"


def _words(words: str) -> frozenset[str]:
    return frozenset(words.split())


def _named(method: str, words: str) -> dict[str, str]:
    return dict.fromkeys(words.split(), method)


_LOSSES: Mapping[str, str] = {
    **_named(
        _PREFERENCE,
        "sigmoid sigmoid_norm hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_pair aot_unpaired discopop"
        " apo_zero apo_down simpo alphapo cpo orpo dpo",
    ),
    **_named(_UNPAIRED, "kto bco apo_zero_unpaired"),
    **_named(_RL, "grpo dr_grpo dapo bnpo cispo sapo luspo vespo gspo ppo reinforce"),
}
# beginnings of words, as in `trl.DPOTrainer`, `online_dpo` and `grpo_full`
_NAMES = tuple(
    (re.compile(f"(?<![a-z])(?:{words})"), method)
    for words, method in (
        ("kto|bco", _UNPAIRED),
        ("grpo|rloo|ppo|gspo|dapo|reinforce|online_?dpo|rlhf|rlvr|nashmd|xpo", _RL),
        ("dpo|orpo|cpo|simpo|preference", _PREFERENCE),
        ("prm", _STEPS),
        ("reward|rm$", _REWARD),
        ("gkd|distill", _DISTILLATION),
        ("embed|contrastive|simcse|sentence_?transformer|biencoder|feature_extraction", _EMBEDDING),
        ("mntp|mlm|masked", _MASKED),
        (r"\w*(?:seq_?cls|token_?cls|sequence_?classification|token_?classification|question_?ans)", _CLASSIFIER),
    )
)
_SUPERVISED_WORD = re.compile(r"(?<![a-z])(sft|supervised_fine|pre_?train|cpt$|pt$|clm$)")
# keys whose value says what is trained
_SAYS = _words(
    "method algorithm algo trainer trainer_type trainer_class trainer_name training_type training_method train_type"
    " train_method stage training_stage task task_type lora_task_type objective model_class auto_model_class rl"
    " rlhf_type"
)
_METHOD_KEYS: Mapping[str, str] = {
    **_named(
        _EMBEDDING,
        "pooling_mode pooling_method pooling_type pooling_strategy sentence_pooling_method bidirectional simcse_dropout"
        " train_group_size query_max_len passage_max_len query_max_length passage_max_length negatives_cross_device"
        " normalize_embeddings query_instruction_for_retrieval use_inbatch_neg use_inbatch_negative"
        " multi_dataset_batch_sampler hard_negatives num_hard_negatives",
    ),
    **_named(_MASKED, "mlm_probability mask_token_type whole_word_mask"),
    **_named(
        _CLASSIFIER,
        "num_labels id2label label2id problem_type classifier_dropout do_regression label_column_name label_all_tokens"
        " return_entity_level_metrics retroactive_labels text_column_names version_2_with_negative doc_stride",
    ),
    **_named(_STEPS, "step_separator train_on_last_step_only"),
    **_named(_UNPAIRED, "desirable_weight undesirable_weight"),
}
# keys that only scripts for causal language models have
_SUPERVISED_KEYS = _words(
    "packing packing_strategy eval_packing dataset_text_field completion_only_loss assistant_only_loss formatting_func"
    " num_of_sequences chars_per_token block_size keep_linebreaks train_on_inputs"
)
_SUPERVISED_LOSSES = frozenset({"nll", "chunked_nll", "dft"})
# of the types of data sets in TRL's documentation, the columns of those for other methods, and of embeddings
_COLUMNS: Mapping[str, str] = {
    "chosen rejected": _PAIRS,
    "prompt completion label": _UNPAIRED,
    "prompt completions labels": _STEPS,
    "anchor positive": _EMBEDDING,
    "query pos neg": _EMBEDDING,
}
_SUPERVISED_COLUMNS = ("messages", "text", "prompt completion")
# next to a text: of classification, and of data sets that only their text is taken from
_LABELS = frozenset({"label", "labels", "score"})


def settle_method(reading: Reading, values: Mapping[str, Any]) -> None:
    """Refuse a file of another method than supervised fine-tuning by its name, or note that nothing names the method.

    A key whose value says it decides, then keys that only files of one method have, then the columns of the data set.
    The name of the file does not count.
    """
    found = _said(values) or _of_keys(values)
    if found is None and not reading.lacking:
        found = _of_data(values, reading.file)
    if found is None:
        # what the reading lacks is refused in any case
        reading.method = None if not reading.lacking else reading.method
    elif found[1] is not None:
        reading.lack(found[0], found[1], remedy=OTHER_METHOD)
        # the first is what a user reads
        reading.lacking.insert(0, reading.lacking.pop())


def _said(values: Mapping[str, Any]) -> tuple[str, str | None] | None:
    """The key whose value says what is trained, and the method, None for supervised fine-tuning."""
    for key, value in values.items():
        word = value.strip().lower().replace("-", "_").replace(" ", "_") if isinstance(value, str) else ""
        place = f"{key}: {short_repr(value)}"
        if key == "loss_type" and word in _LOSSES:
            return place, _LOSSES[word]
        if key in _SAYS and word:
            for pattern, method in _NAMES:
                if pattern.search(word):
                    return place, method
            if _SUPERVISED_WORD.search(word):
                return place, None
    return None


def _of_keys(values: Mapping[str, Any]) -> tuple[str, str | None] | None:
    inner = {name: item for value in values.values() if isinstance(value, Mapping) for name, item in value.items()}
    for key, value in (*values.items(), *inner.items()):
        if key in _METHOD_KEYS and value is not None and value is not False:
            return key, _METHOD_KEYS[key]
    if _SUPERVISED_KEYS & values.keys() or str(values.get("loss_type")).lower() in _SUPERVISED_LOSSES:
        return "", None
    return None


def _of_data(values: Mapping[str, Any], file: str) -> tuple[str, str | None] | None:
    """What the data sets on this machine are for; None for those that several methods train on."""
    found = None
    for key, columns in columns_named_in(values, file):
        others = [(_words(names), method) for names, method in _COLUMNS.items() if columns >= _words(names)]
        is_text = any(columns >= _words(names) for names in _SUPERVISED_COLUMNS)
        if others and not columns & {"messages", "text"}:
            names, method = others[0]
            return f"{printable(key)[:60]} has the columns {', '.join(sorted(names))}", method
        if columns == {"prompt"}:
            return f"{printable(key)[:60]} has the column prompt alone", _RL
        if is_text and not others and not columns & _LABELS:
            found = key, None
    return found


# frameworks whose data file has the files that they ship, and other files name without a folder
_SHIPPING = {name: name for name in ("axolotl", "llama-factory")} | dict.fromkeys(
    ("trl-sft", "trl-dpo", "trl-reward", "trl-rl"), "trl"
)


def shipped_file(framework: str, name: str) -> Mapping[str, Any] | None:
    """What the file of this name holds that the framework ships; None if it ships none."""
    files = known_keys(_SHIPPING[framework])["files"] if framework in _SHIPPING else {}
    found: Mapping[str, Any] | None = files.get(PurePath(name).name)
    return found


# a file with all keys of one of the texts at its top level is the framework's
_KEYS: Mapping[str, Sequence[str]] = {
    "verl": ("actor_rollout_ref", "data optim engine trainer"),
    "NeMo RL": ("policy cluster",),
    "NeMo": ("exp_manager", "megatron_cfg"),
    "Megatron-LM": ("tensor_model_parallel_size num_layers", "tensor-model-parallel-size"),
    "ms-swift": (
        *("train_type torch_dtype", "sft_type torch_dtype", "sft_type model_type"),
        *("tuner_type", "rlhf_type", "tuner_backend", "template_type"),
    ),
    "nanotron": ("parallelism tokens checkpoints",),
    "LitGPT": ("checkpoint_dir out_dir train",),
    "PyTorch Lightning": ("trainer fit", "trainer model seed_everything"),
    "OpenRLHF": ("pretrain micro_train_batch_size",),
    "LLaVA": ("vision_tower", "mm_projector_type"),
    "InternVL": ("freeze_llm freeze_backbone",),
    "Qwen-VL": ("tune_mm_vision", "tune_mm_llm"),
    # its keys may have hyphens or underscores
    "GPT-NeoX": tuple(
        keys.replace("-", mark)
        for keys in ("pipe-parallel-size", "num-layers pos-emb", "train-data-paths", "data-path vocab-file")
        for mark in "-_"
    ),
    "LLM Foundry": (
        *("max_duration train_loader", "max_duration device_train_microbatch_size"),
        "icl_tasks device_eval_batch_size",
    ),
    "EasyR1": ("worker algorithm", "worker trainer data"),
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
    return next((name for name, kinds in _KEYS.items() if any(values.keys() >= _words(keys) for keys in kinds)), None)


# ligerprof's own files: the recipe.json and result.json of a run, and any JSON that a command printed
OWN = "ligerprof"
# what each precision is made of: the dtype of the loaded weights, and autocast's
_AUTOCASTS = {None: "no", "bfloat16": "bf16", "float16": "fp16"}
PRECISIONS: Mapping[tuple[str, str], str] = {
    (each.weight_dtype, _AUTOCASTS[each.autocast]): each.value for each in Precision if not each.is_mixed
}
# under DeepSpeed, which keeps fp32 master copies of its own
MIXED_PRECISIONS: Mapping[str, str] = {"bf16": "mixed", "fp16": "mixed-fp16"}
# options that are made of settings, or that a recipe has for reasons of this machine
_DERIVED = ("precision", "lora", "qlora", "quantization", "deepspeed_config", "model")


def recipe_values(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The recipe in a document of ours; None for any other document."""
    if "schema" in values and "kind" in values and isinstance(values.get("recipe"), Mapping):
        return values["recipe"]  # type: ignore[no-any-return]
    if "model_config" in values and "precision" in values:
        return values
    return None


def read_recipe(values: Mapping[str, Any], file: str) -> Reading:
    """Read the recipe of a document of ours; raises RecipeError for an unknown key, or a value that is not allowed."""
    recipe = TrainingRecipe.from_json(values)
    reading = Reading(file=file, framework=OWN)
    for name in values:
        if name in RECIPE_OPTIONS and name not in _DERIVED:
            value = getattr(recipe, name)
            if name in tuple(Setting):
                reading.set(name, {Setting(name): value}, words=str(value))
            else:
                reading.options[name] = value
                reading.read[name] = str(value)
    reading.set("model", {Setting.MODEL: recipe.model}, words=recipe.spec.name)
    reading.set("precision", _parts_of(recipe.precision), words=recipe.precision)
    rank, bits = recipe.lora or recipe.qlora, recipe.packed_bits
    reading.set("qlora" if recipe.qlora else "lora", {Setting.RANK: rank, Setting.BITS: bits}, words=f"rank {rank}")
    if recipe.engine is Engine.DEEPSPEED:
        reading.set("deepspeed_config", {Setting.DEEPSPEED: dict(recipe.deepspeed_config or {})})  # type: ignore[arg-type]
    return reading


def _parts_of(precision: Precision) -> dict[Setting, str | None]:
    for autocast, word in MIXED_PRECISIONS.items():
        if word == precision:
            return {Setting.WEIGHTS: None, Setting.AUTOCAST: autocast}
    weights, autocast = next(parts for parts, word in PRECISIONS.items() if word == precision)
    return {Setting.WEIGHTS: weights, Setting.AUTOCAST: autocast}


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
    ships a file of this name. Raises RecipeError if there is none, or it cannot be read.
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
        return _read_values(documents.get(rest) or read_document(Path(rest)), rest, BY_NAME[name])
    path = Path(source)
    if source == ENVIRONMENT and not path.exists():
        return _read_environment()
    if is_function(source):
        return TORCHTITAN.read(documents.get(source) or values_of_function(source), source)
    values = documents.get(source) or read_document(path / "recipe.json" if is_folder(path) else path)
    if (recipe := recipe_values(values)) is not None:
        return read_recipe(recipe, source)
    return _read_values(values, source)


def _read_values(values: Mapping[str, Any], file: str, named: Framework | None = None) -> Reading:
    """Read a file of a framework that is named or recognized; the file of a run by wandb, too."""
    run = unwrapped(values)
    is_of_trainer = run is not None and is_trainers(run)
    if run is not None:
        # the model's config has keys of its own, such as id2label
        values = arguments_of(run) if is_of_trainer else run
    framework = named or recognize(values, file)
    reading = read_run(run or {}, framework, file) if is_of_trainer else framework.read(values, file)
    return reading if named else settled(framework, reading, values)


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
        return len(values.keys() - framework.rows.keys()), -len(framework.signature & values.keys())

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
