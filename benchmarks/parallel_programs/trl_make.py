"""Write what TRL's ranks read: a Qwen3-0.6B of random weights, data, and configurations of TRL and accelerate.

python trl_make.py FOLDER [--empty]
"""

import argparse
import sys
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "unchanged_programs"))
from make import COMMON, write_data, write_model

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
OPTIONS = {
    "sft": {"per_device_train_batch_size": 2, "max_length": 1024, "loss_type": "nll"},
    "dpo": {"per_device_train_batch_size": 1, "max_length": 1024},
}
LAUNCHES = {
    "fsdp2": {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "Qwen3DecoderLayer",
            "fsdp_reshard_after_forward": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
    },
    "zero3": {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"zero_stage": 3, "zero3_init_flag": False, "zero3_save_16bit_model": False},
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--empty", action="store_true", help="weights of zeros that take no space on the disk")
    options = parser.parse_args()
    root = options.folder.resolve()
    write_model(root / "qwen3-0.6b", QWEN3, options.empty)
    write_data(root, tiny=False)
    for name, own in OPTIONS.items():
        data = "long" if name == "sft" else "long-pairs"
        config = {**COMMON, "gradient_checkpointing": True, **own, "output_dir": str(root / "output")}
        config |= {"model_name_or_path": str(root / "qwen3-0.6b"), "dataset_name": str(root / data)}
        (root / f"{name}.yaml").write_text(yaml.safe_dump(config))
    for name, own in LAUNCHES.items():
        launch = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "bf16", "num_machines": 1}
        launch |= {"num_processes": 2, "machine_rank": 0, "main_training_function": "main", **own}
        (root / f"{name}.yaml").write_text(yaml.safe_dump(launch))


if __name__ == "__main__":
    main()
