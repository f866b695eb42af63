"""Decide which training method a file is for, where its framework has several that share their keys."""

import re
from collections.abc import Mapping
from typing import Any

from ligerprof.recipe.configs.columns import columns_named_in
from ligerprof.recipe.configs.refusals import OTHER_METHOD
from ligerprof.recipe.configs.settings import Lacking, Reading
from ligerprof.text import printable, short_repr

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
