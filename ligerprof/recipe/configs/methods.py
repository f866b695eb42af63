"""Decide which training method a file is for, where its framework has several that share their keys."""

import csv
import json
import os
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from ligerprof.files import is_file, is_folder, opened
from ligerprof.recipe.configs.settings import OTHER_METHOD, Lacking, Reading
from ligerprof.text import printable, short_repr

_MOST_BYTES = 2**20
_MOST_FILES, _MOST_FOLDERS = 1000, 100
_SUFFIXES = (".parquet", ".arrow", ".jsonl", ".json", ".csv")
_NAMES_DATA = re.compile(
    r"(train(ing)?_)?(data|dataset)s?(_(name|name_or_path|id_or_path|path|dir|files?|file_path|mixer|mixer_list|mixture))?"
    r"|train_(files?|path)"
)
# in an entry of a list of data sets
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
    for parent, folders, names in islice(os.walk(folder), _MOST_FOLDERS):
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
_KEYS: Mapping[str, str] = {
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
_COLUMNS: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"chosen", "rejected"}), _PAIRS),
    (frozenset({"prompt", "completion", "label"}), _UNPAIRED),
    (frozenset({"prompt", "completions", "labels"}), _STEPS),
    (frozenset({"anchor", "positive"}), _EMBEDDING),
    (frozenset({"query", "pos", "neg"}), _EMBEDDING),
)
_SUPERVISED_COLUMNS = (frozenset({"messages"}), frozenset({"text"}), frozenset({"prompt", "completion"}))
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
        reading.lack(found[0], Lacking(what=found[1], remedy=OTHER_METHOD))
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
        if key in _KEYS and value is not None and value is not False:
            return key, _KEYS[key]
    if _SUPERVISED_KEYS & values.keys() or str(values.get("loss_type")).lower() in _SUPERVISED_LOSSES:
        return "", None
    return None


def _of_data(values: Mapping[str, Any], file: str) -> tuple[str, str | None] | None:
    """What the data sets on this machine are for; None for those that several methods train on."""
    found = None
    for key, columns in columns_named_in(values, file):
        others = [(names, method) for names, method in _COLUMNS if names <= columns]
        is_text = any(names <= columns for names in _SUPERVISED_COLUMNS)
        if others and not columns & {"messages", "text"}:
            names, method = others[0]
            return f"{printable(key)[:60]} has the columns {', '.join(sorted(names))}", method
        if columns == {"prompt"}:
            return f"{printable(key)[:60]} has the column prompt alone", _RL
        if is_text and not others and not columns & _LABELS:
            found = key, None
    return found
