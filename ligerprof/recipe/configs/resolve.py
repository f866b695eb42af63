"""Turn what configuration files set into the options of a recipe, or name what recipes cannot express."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from ligerprof.errors import RecipeError, UnknownModelError, UnsupportedError
from ligerprof.kernels.selection import inapplicable_reason
from ligerprof.models import DEFAULT_MODEL, ModelSpec, load_model
from ligerprof.recipe.categories import Attention, Engine, Offload, Optimizer, Precision, Quantization
from ligerprof.recipe.configs import settings
from ligerprof.recipe.configs.deepspeed import filled
from ligerprof.recipe.configs.report import ConfigReport, report_of
from ligerprof.recipe.configs.rows import UNUSED
from ligerprof.recipe.configs.settings import Found, Lacking, Packing, Reading, Setting
from ligerprof.recipe.configs.shared import FSDP1_REMEDY
from ligerprof.recipe.configs.sources import MIXED_PRECISIONS, OWN, PRECISIONS, Documents, read_sources
from ligerprof.recipe.configs.torchtitan import selective_policy
from ligerprof.recipe.configs.trainer import TRANSFORMERS
from ligerprof.recipe.configs.trl import TRL_SFT
from ligerprof.recipe.conflicts import LOSSES, takes
from ligerprof.recipe.training import RECIPE_OPTIONS, TrainingRecipe
from ligerprof.recipe.training_options import ALL_LINEAR
from ligerprof.text import printable
from ligerprof.words import Word


def model_of(found: Found | None, like: str | None, trains: str | None, assumed: list[str]) -> ModelSpec:
    """Describe the model that files name.

    Args:
        found: the name, or a spec.
        like: the model of `--like`, or None.
        trains: the file or command that describes a whole training, which must name its model; None without one.
        assumed: gets a sentence if no file names a model.

    Raises RecipeError for a training that names no model, UnknownModelError for one that is not known.
    """
    if found is None and like is None and trains is not None:
        raise RecipeError(f"{trains}: names no model that ligerprof reads. Give it with --model.")
    if found is None:
        option = "--model chooses another" if like is None else "of --like"
        assumed.append(f"no file names a model: {printable(like or DEFAULT_MODEL)} ({option})")
        return load_model(like or DEFAULT_MODEL)
    if isinstance(found.value, ModelSpec):
        return found.value
    try:
        return load_model(found.value, like)
    except UnknownModelError as error:
        raise UnknownModelError(f"{found.place}: {error}" if found.file else str(error)) from None


# share of a row that its last document leaves free
_PADDING = 0.01


def packed_rows(
    kind: Packing, attention: str | None, batch: int, *, slides: bool
) -> tuple[Mapping[str, Any], str] | Lacking:
    """The options for a way of packing, and what they assume in one sentence; or what recipes lack for it.

    Flash attention takes the sequences of a micro-batch as one row. Other kernels keep its rows apart, and a row
    that is alone is the same as one packed row.

    Args:
        attention: the word of `--attention`, None for its default.
        batch: rows of a micro-batch.
        slides: whether the model's attention has a sliding window.
    """
    if attention != Attention.FLASH:
        if kind is Packing.PADDED:
            share = f"padded by {_PADDING:.0%}"
            sentence = f"packed rows are {share}, and their documents see each other: the file sets no attention"
            return {"packing": False, "padding": _PADDING}, sentence
        if kind is Packing.VARLEN and not slides:
            return Lacking(what="packing with torch's varlen attention (sdpa_varlen)")
        if kind is Packing.MASK or (kind in (Packing.ROWS, Packing.VARLEN) and batch > 1):
            rows = " of several rows" if kind is not Packing.MASK else ""
            return Lacking(what=f"packing{rows} without flash attention")
    # the only sequence of a micro-batch stays one document
    alone = kind is Packing.PADDING_FREE and batch == 1
    return {"packing": kind is not Packing.PLAIN and not alone}, "packed micro-batches are full"


_VERSION_4 = {Precision.BF16_AMP: Precision.AMP, Precision.FP16_AMP: Precision.AMP_FP16}


def counted(
    options: Mapping[str, Any], found: Callable[[Setting], Found | None], typed: Collection[str]
) -> Iterator[str]:
    """One sentence each on how many GPUs are counted, in which dtype the weights are, and how long sequences are."""
    yield _gpus(options.get("gpus", 1), found(Setting.GPUS), found(Setting.ENGINE))
    precision = Precision(options.get("precision", RECIPE_OPTIONS["precision"].default))
    if "precision" in typed:
        yield f"weights in {_dtype(precision)}: --precision {precision}"
    else:
        yield f"weights in {_dtype(precision)}: {_origin(precision, options.get('engine') == Engine.DEEPSPEED, found)}"
    if options.get("lengths") is None:
        length, source = options.get("seq", RECIPE_OPTIONS["seq"].default), found(Setting.SEQ)
        place = "no file sets it" if source is None else source.place
        yield f"every sequence is taken as full: {length:,} tokens ({place}; --lengths counts those of a data set)"


def _gpus(count: int, found: Found | None, engine: Found | None) -> str:
    words = f"{count} GPU{'s' if count > 1 else ''} counted"
    if found is not None:
        return f"{words}: {found.place}"
    if engine is not None and engine.value == Engine.TORCH:
        return f"{words}: {engine.place}"
    return f"{words}: no file says how many train (--gpus sets it, or the launcher's file as another --config)"


def _dtype(precision: Precision) -> str:
    return f"{precision.weight_dtype}{' with fp32 master copies' if precision.is_mixed else ''}"


def _origin(precision: Precision, is_deepspeed: bool, found: Callable[[Setting], Found | None]) -> str:
    """Where the dtype of the weights comes from, with the version of transformers if it depends on that."""
    loaded, computed = found(Setting.WEIGHTS), found(Setting.AUTOCAST)
    if is_deepspeed or loaded is None:
        return "no file sets it" if computed is None else computed.place
    if loaded.value != "checkpoint":
        return loaded.place
    if loaded.key == settings.default_key(Setting.WEIGHTS, TRANSFORMERS.name):
        if precision.weight_dtype == "float32":
            return "no file sets it, and the checkpoint's are"
        earlier = _VERSION_4.get(precision, Precision.FP32)
        return (
            "no file sets it, and transformers 5 loads the checkpoint's; transformers 4 loads float32"
            f" (--precision {earlier})"
        )
    return f"the checkpoint's, as {loaded.place}"


S = Setting
# settings that a recipe takes as they are
_DIRECT = (
    *(S.SEQ, S.GRAD_ACCUM, S.CLIP, S.CHECKPOINTING, S.REENTRANT, S.ATTENTION, S.GALORE_RANK),
    S.CHECKPOINT_EVERY,
    S.EXPERTS,
    *(S.LENGTH_ORDER, S.PAD_TO_MULTIPLE_OF),
)
_DDP, _FSDP = "ddp", ("fsdp1", "fsdp2")
_TITLES = {"fsdp1": "FSDP version 1", "fsdp2": "FSDP version 2", _DDP: "DistributedDataParallel"}
_ADAPTER = (
    *(S.RANK, S.BITS, S.LORA_TARGETS, S.MODULES_TO_SAVE, S.DORA, S.LORA_DROPOUT, S.ADAPTER_DTYPE, S.NESTED_QUANT),
    S.FP32_SAVED_MODULES,
)
# settings whose meaning an option of the command line takes over
_REPLACED: Mapping[str, Sequence[Setting]] = {
    "precision": (S.WEIGHTS, S.AUTOCAST),
    **dict.fromkeys(("lora", "qlora"), _ADAPTER),
    "quantization": (S.BITS,),
    "liger": (S.PROVIDER,),
}


class Resolver:
    """One set of files on the way to a recipe: the later win, and `given` options of the command line over all.

    `assumed` is what the recipe assumes, one sentence each.
    """

    def __init__(self, readings: Sequence[Reading], given: Mapping[str, Any]) -> None:
        self.assumed: list[str] = []
        self._given = given
        self._options: dict[str, Any] = {}
        self._settings = settings.defaults_of(readings)
        self._is_own, self._is_trl = (
            any(reading.framework == name for reading in readings) for name in (OWN, TRL_SFT.name)
        )
        self._trains = next((reading.file for reading in readings if reading.is_complete), None)
        self._lacking = [found for reading in readings for found in reading.lacking]
        for reading in readings:
            self._settings.update(reading.settings)
            self._options.update(reading.options)
        self._count_gpus([setting for reading in readings for setting in reading.settings])
        for name, value in given.items():
            if name in tuple(S):
                self._settings[S(name)] = Found(value=value, key=RECIPE_OPTIONS[name].flag, file="")
        for option, replaced in _REPLACED.items():
            for setting in replaced if option in given else ():
                if setting.value not in given:
                    self._settings.pop(setting, None)

    def _count_gpus(self, named: Collection[Setting]) -> None:
        """Of how many GPUs the whole batch is, where the files also name its other two factors."""
        if {S.BATCH, S.GRAD_ACCUM, S.TRAIN_BATCH} <= set(named) and S.GPUS not in named:
            parts = self._value(S.BATCH) * self._value(S.GRAD_ACCUM)
            whole = self._settings[S.TRAIN_BATCH]
            self._settings[S.GPUS] = dataclasses.replace(whole, value=self._share(whole.value, parts))

    def options(self) -> dict[str, Any]:
        """Values of recipe options; raises UnsupportedError for what recipes lack, RecipeError for conflicts."""
        for found in self._lacking:
            raise settings.refusal(found, found.value)
        for found in self._settings.values():
            if isinstance(found.value, Lacking):
                raise settings.refusal(found, found.value)
        spec = model_of(self._settings.get(S.MODEL), self._given.get("like"), self._trains, self.assumed)
        engine, batch = self._engine(), self._batch()
        precision = self._precision(engine["engine"], spec)
        chosen = {
            **self._options,
            **batch,
            **engine,
            **precision,
            **self._sharding(engine["engine"], spec, precision),
            **self._adapter(engine["engine"], spec, precision),
            **self._kernels(spec),
            **self._evaluation(),
            **self._optimizer(engine["engine"]),
            **self._only_in_torch(engine["engine"]),
            "selective": selective_policy(self._value(S.SELECTIVE), spec),
            **{name: value for setting in _DIRECT for name, value in self._direct(setting).items()},
            **self._loss(engine["engine"]),
        }
        chosen.update(self._packing(chosen, spec))
        if self._is_trl and chosen.get("zero") == 3 and self._value(S.RANK) is not None:
            # trl/trainer/sft_trainer.py: adapters under ZeRO-3 are checkpointed the older way
            chosen["reentrant"] = True
        if chosen.get("reentrant") and engine["engine"] in _FSDP and chosen.get("checkpointing", True):
            # LLaMA-Factory does that itself
            chosen["reentrant"] = False
            self.assumed.append("checkpointing is non-reentrant, which is the kind that is covered under FSDP")
        if not chosen.get("checkpointing", True):
            chosen.update(reentrant=False, checkpoint_every=None, selective=None)
        return {
            **{name: value for name, value in chosen.items() if value is not None},
            **self._given,
            "model": spec,
            "like": spec.like,
        }

    def found(self, setting: Setting) -> Found | None:
        """A setting's value and where it comes from; None if nothing sets it."""
        return self._settings.get(setting)

    def _value(self, setting: Setting) -> Any:
        found = self._settings.get(setting)
        return None if found is None else found.value

    def _refuse(self, what: str, *asking: Setting, remedy: str = "") -> UnsupportedError:
        """The error about something that the first of these settings asks for."""
        for setting in asking:
            if (found := self._settings.get(setting)) is not None:
                return settings.refusal(found, Lacking(what=what, setting=setting, remedy=remedy))
        return UnsupportedError(f"{what}: not supported yet.")

    def _batch(self) -> dict[str, Any]:
        """Batch and accumulation, also from the size of the whole batch over all GPUs."""
        batch, total = self._value(S.BATCH), self._value(S.TRAIN_BATCH)
        if S.SEQ not in self._settings:
            default = RECIPE_OPTIONS["seq"].default
            self.assumed.append(f"no file sets the sequence length: {default} tokens (--seq chooses another)")
        if total is None:
            return {"batch": batch}
        gpus = self._value(S.GPUS) or 1
        if batch is None:
            accumulated = self._value(S.GRAD_ACCUM) or 1
            return {"batch": self._share(total, accumulated * gpus)}
        self._settings[S.GRAD_ACCUM] = dataclasses.replace(
            self._settings[S.TRAIN_BATCH], value=self._share(total, batch * gpus)
        )
        return {"batch": batch}

    def _share(self, total: int, parts: int) -> int:
        if total % parts:
            found = self._settings[S.TRAIN_BATCH]
            raise UnsupportedError(
                f"{found.place} of {total} is not a multiple of {parts}. Give --batch, --grad-accum or --gpus."
            )
        return total // parts

    def _evaluation(self) -> dict[str, Any]:
        if not self._value(S.EVALUATES) or "eval_batch" in self._given:
            return {}
        batch = self._value(S.EVALUATION_BATCH)
        return {"eval_follows_batch": True} if batch is None else {"eval_batch": batch}

    def _engine(self) -> dict[str, Any]:
        gpus = self._value(S.GPUS) or 1
        word = str(self._value(S.ENGINE) or "torch")
        if gpus == 1 and word == _DDP:
            word = "torch"
        if word == "torch" and gpus > 1:
            word = str(self._value(S.SEVERAL) or _DDP)
        if word not in RECIPE_OPTIONS["engine"].choices:
            several = f" on {gpus} GPUs" if gpus > 1 else ""
            raise self._refuse(f"{_TITLES.get(word, word)}{several}", S.ENGINE, S.GPUS)
        if word == "fsdp1" and gpus == 1:
            remedy = "torch shards nothing then. Give the number of GPUs with --gpus."
            raise self._refuse(f"{_TITLES[word]} on one GPU", S.ENGINE, remedy=remedy)
        return {"engine": word, "gpus": gpus}

    def _sharding(self, engine: str, spec: ModelSpec, precision: Mapping[str, Any]) -> dict[str, Any]:
        """Options of the engine; those of another engine, which a file may have too, are left out."""
        offload = {"offload": self._value(S.OFFLOAD)}
        if engine == _DDP:
            return {"grad_sync": self._value(S.GRAD_SYNC)}
        if engine == Engine.DEEPSPEED:
            own = {S.ZERO.value: self._value(S.ZERO), S.NVME_PATH.value: self._value(S.NVME_PATH)}
            own[S.SAVE_WHOLE.value] = self._gathers_under_deepspeed()
            config = filled(self._value(S.DEEPSPEED) or {}, spec)
            return {**offload, **own, "deepspeed_config": config or None}
        if engine in _FSDP:
            self._require_shardable(engine)
            names = (S.RESHARD, S.REPLICATE, S.WRAP, S.REDUCE_DTYPE, S.SAVE_WHOLE, S.GRAD_SYNC, S.BACKWARD_PREFETCH)
            own = {name.value: self._value(name) for name in names if takes(Engine(engine), name.value)}
            if not self._is_own and {**precision, **self._given}.get("precision") != "mixed":
                # frameworks give FSDP no policy then
                own["reduce_dtype"] = None
            return {**offload, **own}
        return {}

    def _require_shardable(self, engine: str) -> None:
        """Raise UnsupportedError if a file asks for what recipes do not have under a version of FSDP."""
        lacks = {"QLoRA": (S.BITS, "qlora"), "LoRA": (S.RANK, "lora")}
        for name, (setting, option) in lacks.items():
            if self._value(setting) is not None and not takes(Engine(engine), option):
                remedy = FSDP1_REMEDY if engine == "fsdp1" else ""
                raise self._refuse(f"{name} under {_TITLES[engine]}", setting, remedy=remedy)
        if engine == "fsdp1" and self._value(S.OFFLOAD) not in (None, Offload.NONE):
            raise self._refuse(f"offload to main memory under {_TITLES[engine]}", S.OFFLOAD, remedy=FSDP1_REMEDY)

    def _gathers_under_deepspeed(self) -> bool | None:
        """Whether saving gathers the model: off by default; adapters are gathered in any case (Trainer.save_model)."""
        if self._is_own:
            return bool(self._value(S.SAVE_WHOLE)) if S.SAVE_WHOLE in self._settings else None
        return self._value(S.RANK) is not None or bool(self._value(S.SAVE_WHOLE))

    def _precision(self, engine: str, spec: ModelSpec) -> dict[str, Any]:
        if "precision" in self._given:
            return {}
        autocast = self._value(S.AUTOCAST) or "no"
        if engine == Engine.DEEPSPEED:
            if autocast == "auto":
                self.assumed.append("no file sets the precision that DeepSpeed's file leaves open: mixed")
                return {"precision": "mixed"}
            return {"precision": MIXED_PRECISIONS.get(autocast) or self._fp32_under_deepspeed()}
        if S.WEIGHTS not in self._settings and S.AUTOCAST not in self._settings:
            return {}
        weights = self._value(S.WEIGHTS) or "float32"
        if weights == "checkpoint":
            weights = self._checkpoint_dtype(spec)
        if engine in _FSDP and self._is_mixed_under_fsdp(engine, weights, autocast):
            return {"precision": "mixed"}
        word = PRECISIONS.get((weights, autocast))
        if word not in RECIPE_OPTIONS["precision"].choices:
            raise self._refuse(f"weights in {weights} under autocast to {autocast}", S.WEIGHTS, S.AUTOCAST)
        return {"precision": word}

    def _fp32_under_deepspeed(self) -> str:
        """DeepSpeed checks then that all weights are in fp32 (engine.py, _configure_distributed_model)."""
        weights = self._value(S.WEIGHTS) or "float32"
        if weights not in ("float32", "checkpoint"):
            raise self._refuse(f"weights in {weights} under DeepSpeed without bf16 or fp16", S.WEIGHTS)
        if weights == "checkpoint":
            self.assumed.append("weights are loaded in fp32: DeepSpeed without bf16 and fp16 takes no others")
        return "fp32"

    def _is_mixed_under_fsdp(self, engine: str, weights: str, autocast: str) -> bool:
        """Whether FSDP gathers fp32 weights in bf16."""
        if self._is_own:
            # a recipe of ours names no weights if it is mixed
            return autocast == "bf16" and self._value(S.WEIGHTS) is None
        adapted = self._value(S.RANK) is not None
        if adapted and weights != "float32":
            raise self._refuse(f"LoRA over weights in {weights} under {_TITLES[engine]}", S.WEIGHTS, S.RANK)
        if autocast == "fp16":
            raise self._refuse(f"fp16 under {_TITLES[engine]}", S.AUTOCAST)
        # accelerate 1.15 turns weights that are trained into fp32 (fsdp2_prepare_model; prepare_model for version 1)
        return autocast == "bf16" and (weights == "float32" or self._value(S.WRAP) == "accelerate")

    def _checkpoint_dtype(self, spec: ModelSpec) -> str:
        found = spec.config.get("dtype") or spec.config.get("torch_dtype")
        if found in ("float32", "bfloat16", "float16"):
            return str(found)
        self.assumed.append(
            f"weights are loaded in the checkpoint's dtype, which {spec.name}'s config does not name: bfloat16"
            " (--precision sets another)"
        )
        return "bfloat16"

    def _kernels(self, spec: ModelSpec) -> dict[str, Any]:
        chosen, provider = self._value(S.LIGER), self._value(S.PROVIDER)
        if not isinstance(chosen, frozenset):
            return {"liger": chosen, "provider": provider}
        wanted = {"swiglu", "geglu"} | chosen if "glu" in chosen else chosen
        # liger-kernel skips what a model does not have
        names = sorted(name for name in wanted - {"glu"} if inapplicable_reason(name.partition(":")[0], spec) is None)
        return {"liger": "+".join(names) or "none", "provider": provider}

    def _adapter(self, engine: str, spec: ModelSpec, precision: Mapping[str, Any]) -> dict[str, Any]:
        rank, bits = self._value(S.RANK), self._value(S.BITS)
        if bits not in (None, 4, 8) or (bits and rank is None):
            raise self._refuse(f"{bits}-bit weights" + (" without LoRA" if rank is None else ""), S.BITS)
        if rank is None:
            return {}
        if bits and self._value(S.DORA):
            raise self._refuse(f"DoRA over {bits}-bit weights", S.DORA)
        dora = {"dora": True} if self._value(S.DORA) else {}
        packed = {4: {"nested_quant": self._value(S.NESTED_QUANT)}, 8: {"quantization": Quantization.EIGHT_BIT}}
        # DeepSpeed casts adapters itself, and bf16 gradients cannot be scaled as those of fp16 are
        scales = "fp16" in str({**precision, **self._given}.get("precision"))
        dtype = {"adapter_dtype": self._value(S.ADAPTER_DTYPE)} if engine in ("torch", _DDP) and not scales else {}
        names = {**self._targets(spec), **self._saved(spec), **self._direct(S.LORA_DROPOUT)}
        return {"qlora" if bits == 4 else "lora": rank, **dora, **packed.get(bits, {}), **dtype, **names}

    def _saved(self, spec: ModelSpec) -> dict[str, Any]:
        found = self._value(S.MODULES_TO_SAVE)
        if not found or "modules_to_save" in self._given:
            return {}
        if found == settings.EMBEDDING_AND_HEAD:
            found = (spec.architecture.embedding, spec.architecture.head)
        names = dict.fromkeys(name.rpartition(".")[2] for name in found)
        if not names.keys() <= set(spec.module_names) - set(spec.architecture.lora_targets):
            raise self._refuse(f"full training of {', '.join(found)[:80]} next to adapters", S.MODULES_TO_SAVE)
        return {"modules_to_save": "+".join(names), "fp32_saved_modules": self._value(S.FP32_SAVED_MODULES)}

    def _targets(self, spec: ModelSpec) -> dict[str, Any]:
        targets, known = self._value(S.LORA_TARGETS), spec.architecture.adaptable
        if targets == settings.PEFT_DEFAULT:
            targets = list(spec.architecture.peft_targets)
        elif isinstance(targets, str) and targets != ALL_LINEAR:
            targets = targets.split("+")
        if targets in (None, ALL_LINEAR):
            return {}
        names = dict.fromkeys(name.rpartition(".")[2] for name in targets)
        there = [name for name in names if name in known]
        if not there or not names.keys() & set(spec.module_names) <= set(known):
            raise self._refuse(f"LoRA on {', '.join(targets)[:80] or settings.PEFT_DEFAULT}", S.LORA_TARGETS)
        if len(there) < len(names):
            absent = ", ".join(name for name in names if name not in known)[:80]
            self.assumed.append(f"peft finds no layer of {spec.name} named {printable(absent)}, and skips the name")
        return {} if set(there) == set(spec.architecture.lora_targets) else {"lora_targets": "+".join(there)}

    def _optimizer(self, engine: str) -> dict[str, Any]:
        word = self._value(S.OPTIMIZER)
        if word is None:
            return {}
        offloaded = self._value(S.OFFLOAD) not in (None, Offload.NONE)
        # accelerate replaces AdamW by DeepSpeed's own where the optimizer is offloaded
        if word == "default" or (offloaded and str(word).startswith("adamw") and "optimizer" not in self._given):
            return {}
        if word not in RECIPE_OPTIONS["optimizer"].choices:
            raise self._refuse(f"optimizer {word}", S.OPTIMIZER)
        if engine in _FSDP and not Optimizer(word).row.on_shards:
            raise self._refuse(f"optimizer {word} under {_TITLES[engine]}", S.OPTIMIZER)
        fp32 = self._value(S.FP32_EMBEDDING_STATES) if Optimizer(word).row.is_eight_bit else None
        return {"optimizer": word, "fp32_embedding_states": fp32}

    def _only_in_torch(self, engine: str) -> dict[str, Any]:
        compiles, offloads = self._value(S.COMPILE), self._value(S.ACTIVATION_OFFLOAD)
        if compiles and not takes(Engine(engine), "compile"):
            raise self._refuse(f"torch.compile under {engine}", S.COMPILE)
        if offloads and not takes(Engine(engine), "activation_offload"):
            remedy = "Take the key out to count activations on the GPU."
            raise self._refuse(f"offloading of activations under {engine}", S.ACTIVATION_OFFLOAD, remedy=remedy)
        return {"compile": compiles, "activation_offload": offloads}

    def _loss(self, engine: str) -> dict[str, Any]:
        if LOSSES.get(self._value(S.LOSS), engine) != engine:
            remedy = "Count whole logits with --loss hf, or TRL's chunks of 256 tokens with --loss chunked-nll."
            raise self._refuse(f"torchtitan's chunked loss under {engine}", S.LOSS, remedy=remedy)
        return self._direct(S.LOSS)

    def _direct(self, setting: Setting) -> dict[str, Any]:
        value, name = self._value(setting), setting.value
        declared = RECIPE_OPTIONS[name]
        if isinstance(value, str) and issubclass(declared.kind, Word) and value not in declared.choices:
            raise self._refuse(f"{name.replace('_', ' ')} {value}", setting)
        return {name: value}

    def _packing(self, chosen: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
        kind = self._value(S.PACKING)
        if not isinstance(kind, Packing):
            return {"packing": kind}
        batch = chosen.get("batch") or RECIPE_OPTIONS["batch"].default
        rows = packed_rows(kind, chosen.get("attention"), batch, slides=bool(spec.config.get("sliding_window")))
        if isinstance(rows, Lacking):
            raise self._refuse(rows.what, S.PACKING)
        options, sentence = rows
        self.assumed.append(sentence)
        return dict(options)


def load_options(
    sources: Sequence[str],
    given: Mapping[str, Any],
    documents: Documents | None = None,
    command: Sequence[Reading] = (),
) -> tuple[dict[str, Any], ConfigReport]:
    """Read configuration files into values of recipe options.

    Args:
        sources: files in order, as `read_sources` takes them; later ones win.
        given: recipe options that win over all files.
        documents: the content of some of the files, as `read_sources` takes it.
        command: what a training command sets, which wins over the files.

    Raises RecipeError for what cannot be read, UnsupportedError for what recipes cannot express.
    """
    readings = read_sources(sources, documents, command)
    if "lora" in given or "qlora" in given:
        for reading in readings:
            reading.left_out = {key: what for key, what in reading.left_out.items() if what != UNUSED}
    resolver = Resolver(readings, given)
    options = resolver.options()
    return options, report_of(readings, (*counted(options, resolver.found, given), *resolver.assumed))


def load_recipe(sources: Sequence[str], given: Mapping[str, Any]) -> tuple[TrainingRecipe, ConfigReport]:
    """The recipe that configuration files describe; as `load_options`, which it calls."""
    options, report = load_options(sources, given)
    return TrainingRecipe(**options), report
