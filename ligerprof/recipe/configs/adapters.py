"""Say which keys of adapters have no effect in a file that switches no adapter on."""

import re
from collections.abc import Mapping
from typing import Any

from ligerprof.recipe.configs.rows import is_off
from ligerprof.recipe.configs.settings import Reading, Reason, Setting
from ligerprof.text import printable

# why such keys are left out, where nothing says that this is meant
UNUSED = "adapters, which no key of the file switches on: every weight is counted as trained (--lora RANK counts them)"
_OF_ADAPTERS = re.compile(r"(^|_)(q?lora|rs_?lora|ada_?lora|dora|ia3|peft|adapters?)(_|$)")
# what becomes of adapters, and weights that are merged before training
_OF_FILES = re.compile(r"merge|hub|push|export|create_new|(lora_model_dir|lora_out_dir|adapter_name_or_path|_folder)$")
_SWITCHES = ("use_peft", "use_lora", "adapter", "finetuning_type")


def leave_out_adapters(reading: Reading, values: Mapping[str, Any]) -> None:
    """Take the keys of adapters from those that were read, if the file trains none, and say so."""
    if Setting.RANK in reading.settings or any(found.key.startswith(_SWITCHES) for found in reading.lacking):
        return
    names = [
        name
        for name, value in values.items()
        if _OF_ADAPTERS.search(name) and not _OF_FILES.search(name) and not is_off(value)
    ]
    switch = next((name for name in _SWITCHES if name in values), None)
    for name in names:
        reading.read.pop(name, None)
        reading.ignored.pop(name, None)
        if switch is None or switch in names:
            reading.left_out[name] = UNUSED
        else:
            reading.left_out.pop(name, None)
            reading.ignored[name] = Reason.OTHER_METHOD
    if switch is not None and switch not in names and names:
        reading.assumed.append(f"{switch} switches adapters off: {printable(', '.join(names))} without effect")
