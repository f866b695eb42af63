"""Which framework's arguments a program takes, and which method it trains with: known by its name or its arguments."""

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from ligerprof.errors import RecipeError, UnsupportedError
from ligerprof.recipe.commands.launch import Launch
from ligerprof.recipe.configs.axolotl import AXOLOTL
from ligerprof.recipe.configs.framework import Framework
from ligerprof.recipe.configs.llama_factory import LLAMA_FACTORY, LLAMA_FACTORY_1
from ligerprof.recipe.configs.open_instruct import OPEN_INSTRUCT
from ligerprof.recipe.configs.settings import SIMULATED_RANKS
from ligerprof.recipe.configs.sources import foreign_framework, recognize
from ligerprof.recipe.configs.trainer import TRANSFORMERS
from ligerprof.recipe.configs.trl import TRL_SFT
from ligerprof.text import printable

_PREFERENCES = "DPO or another preference method, with pairs of sequences"
_REINFORCEMENT = "reinforcement learning"
# words in the names of programs, each with the method that it means
_METHODS: Mapping[str, str] = {
    **dict.fromkeys(("dpo", "kto", "orpo", "cpo", "simpo", "ipo", "bco", "preference"), _PREFERENCES),
    **dict.fromkeys(("grpo", "ppo", "rloo", "gkd", "xpo", "nash", "dapo", "gspo", "rlhf", "rl"), _REINFORCEMENT),
    **dict.fromkeys(("reinforce", "rlvr", "papo"), _REINFORCEMENT),
    **dict.fromkeys(("reward", "prm", "rm"), "reward modeling, with a classification head"),
    # transformers' example scripts for other models
    **dict.fromkeys(("mlm", "glue", "qa", "ner", "swag", "classification", "cls"), "a model that is not causal"),
    **dict.fromkeys(("plm", "fim", "seq2seq", "translation", "summarization"), "a model that is not causal"),
    **dict.fromkeys(("embedding", "contrastive", "mntp", "retriever", "reranker"), "training of embeddings"),
    **dict.fromkeys(("distill", "distillation", "gkd"), "distillation"),
}
_SFT = "sft"
# words in the names of programs for causal language models
_SUPERVISED = frozenset({_SFT, "clm", "pretrain", "pretraining", "cpt"})
# command lines of frameworks, each with the subcommands that train
SUBCOMMANDS: Mapping[str, tuple[str, ...]] = {
    "trl": ("sft", *_METHODS),
    "llamafactory-cli": ("train",),
    "lmf": ("train",),
    "axolotl": ("train",),
}
# the package of a module, a part of a script's path, or a command
_FRAMEWORKS: Mapping[str, Framework] = {
    "axolotl": AXOLOTL,
    "trl": TRL_SFT,
    "open_instruct": OPEN_INSTRUCT,
    "run_clm.py": TRANSFORMERS,
}
# programs of frameworks whose configurations are not read: commands, and the first parts of modules and of scripts
_FOREIGN: Mapping[str, str] = {
    "swift": "ms-swift",
    "megatron": "ms-swift",
    "tune": "torchtune",
    "litgpt": "LitGPT",
    "composer": "LLM Foundry",
    "oumi": "Oumi",
    "autotrain": "AutoTrain",
    "ludwig": "Ludwig",
    "xtuner": "XTuner",
    "colossalai": "ColossalAI",
    "nemo": "NeMo",
}
_FOREIGN_MODULES: Mapping[str, str] = {
    **{name: title for name, title in _FOREIGN.items() if name not in ("megatron", "tune", "composer", "nemo")},
    "verl": "verl",
    "openrlhf": "OpenRLHF",
    "torchtune": "torchtune",
    "llmfoundry": "LLM Foundry",
    "nanotron": "nanotron",
    "nemo_rl": "NeMo RL",
}
_FOREIGN_SCRIPTS: Mapping[str, str] = {
    "deepy.py": "GPT-NeoX",
    "pretrain_gpt.py": "Megatron-LM",
    "swift/cli/sft.py": "ms-swift",
    "verl/trainer/main_ppo.py": "verl",
    "verl/trainer/fsdp_sft_trainer.py": "verl",
}


def is_known_command(word: str) -> bool:
    """Whether a word is the command of a framework."""
    name = PurePath(word).name
    return name in SUBCOMMANDS or name in _FOREIGN


def refuse_other_programs(launch: Launch) -> None:
    """Raise if a program is known to be of a framework that is not read, or to train with another method.

    Raises:
        RecipeError: a framework whose command lines are not read, or a subcommand that does not train.
        UnsupportedError: a method that recipes do not cover.
    """
    program, name = launch.program, launch.name
    script = next((title for end, title in _FOREIGN_SCRIPTS.items() if f"/{program}".endswith(f"/{end}")), None)
    module = _FOREIGN_MODULES.get(program.partition(".")[0]) if launch.is_module else None
    if title := script or module or (None if launch.is_module else _FOREIGN.get(name)):
        raise _foreign(program, title)
    if name in SUBCOMMANDS and not launch.is_module:
        _require_training(launch, name)
    words = _name_words(launch)
    method = next((_METHODS[word] for word in words if word in _METHODS), None)
    if method is not None and _SFT not in words:
        raise UnsupportedError(
            f"{_shown(launch)}: {method} is not supported yet. Only supervised fine-tuning is covered."
        )


def _foreign(program: str, title: str) -> RecipeError:
    return RecipeError(
        f"{printable(program)}: a command of {title}, whose settings ligerprof does not read. Give its values as"
        f" options, such as --model, --batch, --seq and --precision. {SIMULATED_RANKS}"
    )


def _require_training(launch: Launch, name: str) -> None:
    subcommand = next(iter(launch.words), "")
    if subcommand not in SUBCOMMANDS[name]:
        raise RecipeError(
            f"{name} {printable(subcommand)[:40]}: not a command that trains. Give one such as `{name}"
            f" {SUBCOMMANDS[name][0]}`."
        )


def _name_words(launch: Launch) -> list[str]:
    """The words of a program's name that may say which method it is: `train_dpo.py` is train and dpo."""
    name = launch.name.removesuffix(".py")
    if launch.is_module:
        name = launch.program.rpartition(".")[2]
    elif name == "trl":
        name = next(iter(launch.words), "")
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]


def _shown(launch: Launch) -> str:
    subcommand = f" {launch.words[0]}" if launch.name in SUBCOMMANDS and launch.words else ""
    return printable(f"{launch.program}{subcommand}")[:80]


def label_of(launch: Launch) -> str:
    """What messages call the program."""
    return _shown(launch)


def framework_of(launch: Launch, values: Mapping[str, Any], source: str) -> tuple[Framework, str | None]:
    """The framework that reads a program's arguments, and what choosing it assumes.

    Args:
        values: the arguments, with those of the file that they name.
        source: what messages call them.

    Raises:
        RecipeError: the arguments are of no framework that is read.
    """
    name, words = launch.name, _name_words(launch)
    parts = launch.program.split(".")[:1] if launch.is_module else PurePath(launch.program).parts
    known = next((framework for part, framework in _FRAMEWORKS.items() if part in parts), None)
    if name in ("llamafactory-cli", "lmf"):
        known = LLAMA_FACTORY_1 if LLAMA_FACTORY_1.signature & values.keys() else LLAMA_FACTORY
    if known is not None:
        if not known.knows_most(values):
            raise RecipeError(
                f"{source}: most of its keys are not those of {known.title}. Is it a file of another one?"
            )
        return known, None
    found = _recognized(values, source)
    if found is TRL_SFT and "model_max_length" in values:
        # scripts that descend from Alpaca's have the keys of adapters, too
        return TRANSFORMERS, None
    if found is TRANSFORMERS and _SFT in words:
        return TRL_SFT, f"{source} takes the arguments of TRL's script of supervised fine-tuning"
    return found, None


def names_method(launch: Launch, framework: Framework) -> bool:
    """Whether a program, or the framework whose program it is, trains with supervised fine-tuning alone."""
    return not framework.family or framework is OPEN_INSTRUCT or not _SUPERVISED.isdisjoint(_name_words(launch))


def _recognized(values: Mapping[str, Any], source: str) -> Framework:
    if (title := foreign_framework(values)) is not None:
        raise _foreign(source, title)
    try:
        return recognize(values, source)
    except RecipeError:
        shown = ", ".join(f"--{printable(key)[:40]}" for key in list(values)[:5]) or "none"
        raise RecipeError(
            f"{source}: not a training command that ligerprof knows (its first arguments: {shown}). Give its values as"
            " options, such as --model, --batch, --seq and --precision."
        ) from None
