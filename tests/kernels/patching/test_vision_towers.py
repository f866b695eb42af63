"""Kernels in the text model of models with a vision tower: a training goes on as without them."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from ligerprof.errors import KernelUnavailableError, UnknownModelError
from ligerprof.kernels.patching.apply import apply
from ligerprof.models import spec_from_config
from ligerprof.models.architectures import COMPOSITES
from tests.kernels.models import FAMILIES, VOCAB
from tests.kernels.patching.test_every_architecture import LOSS_BOUND, losses
from tests.sampling import sampled

TEXT: dict[str, Any] = {**FAMILIES["mistral"], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CLIP = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
CLIP |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
SIGLIP = {**CLIP, "model_type": "siglip_vision_model"}
PIXTRAL = {**CLIP, "model_type": "pixtral", "head_dim": 16}
_MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
QWEN2_VISION = {"depth": 1, "embed_dim": 32, "hidden_size": 48, "num_heads": 2, "patch_size": 4}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "out_hidden_size": 48, "num_heads": 2, "intermediate_size": 48}
# what each composite's config needs; text_config has TEXT as well
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": {"model_type": "gemma3_text"}, "vision_config": SIGLIP, "mm_tokens_per_image": 1},
    "llava": {"text_config": {"model_type": "llama"}, "vision_config": CLIP, "image_token_index": 5},
    "llava_next": {"text_config": {"model_type": "mistral"}, "vision_config": CLIP, "image_token_index": 5},
    "mistral3": {"text_config": {"model_type": "mistral"}, "vision_config": PIXTRAL},
    "mllama": {
        "text_config": {"model_type": "mllama_text_model", "num_hidden_layers": 3, "cross_attention_layers": [1]},
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2},
    },
    "paligemma": {"text_config": {"model_type": "gemma2"}, "vision_config": SIGLIP, "projection_dim": 48},
    "qwen2_5_vl": {
        "text_config": {"model_type": "qwen2_5_vl_text", "rope_parameters": _MROPE},
        "vision_config": QWEN_VISION,
    },
    "qwen2_vl": {
        "text_config": {"model_type": "qwen2_vl_text", "rope_parameters": _MROPE},
        "vision_config": QWEN2_VISION,
    },
    "qwen3_vl": {
        "text_config": {"model_type": "qwen3_vl_text", "rope_parameters": _MROPE},
        "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]},
    },
}


def tiny_composite(model_type: str) -> Any:
    torch.manual_seed(0)
    values = CONFIGS[model_type]
    config = AutoConfig.for_model(model_type, **{**values, "text_config": {**TEXT, **values["text_config"]}})
    config.get_text_config().use_cache = False
    return AutoModelForImageTextToText.from_config(config, attn_implementation="eager").train()


def test_every_composite_has_a_config_here() -> None:
    assert set(CONFIGS) == COMPOSITES


@sampled("model_type", sorted(CONFIGS), every=3)
def test_twenty_steps_on_text_have_the_losses_of_the_model_without_kernels(model_type: str) -> None:
    plain, patched = tiny_composite(model_type), tiny_composite(model_type)
    expected = losses(plain)
    with apply(patched, "all", provider="torch") as patch:
        assert {"rms", "flce"} <= set(patch.kernels)
        assert losses(patched) == pytest.approx(expected, rel=LOSS_BOUND)
    assert expected[-1] < expected[0]


def test_images_go_through_the_tower() -> None:
    torch.manual_seed(1)
    tokens = torch.randint(6, VOCAB, (2, 12))
    tokens[:, 2:6] = 5
    inputs = {"input_ids": tokens, "labels": tokens, "pixel_values": torch.randn(2, 3, 8, 8)}
    plain, patched = tiny_composite("llava"), tiny_composite("llava")
    expected = plain(**inputs)
    with apply(patched, "all", provider="torch"):
        output = patched(**inputs)
    assert type(output) is type(expected)
    assert output.logits is None
    assert output.loss.item() == pytest.approx(expected.loss.item(), rel=LOSS_BOUND)
    assert torch.equal(output.image_hidden_states, expected.image_hidden_states)
    output.loss.backward()
    expected.loss.backward()
    name = "model.multi_modal_projector.linear_1.weight"
    ours, theirs = (model.get_parameter(name).grad for model in (patched, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


def test_liger_kernels_are_refused_where_the_text_model_is_part_of_another() -> None:
    with pytest.raises(KernelUnavailableError, match="vision tower"):
        apply(tiny_composite("llava"), "rms", provider="liger", device_kind="simulated")


def test_a_vision_tower_is_refused_by_name_and_not_left_out_of_a_description() -> None:
    with pytest.raises(UnknownModelError, match=r"'llava' joins a text model of type 'llama' with others"):
        spec_from_config({"model_type": "llava", "text_config": {**TEXT, "model_type": "llama"}}, name="llava")
