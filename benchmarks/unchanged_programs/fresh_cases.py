"""Small programs of other shapes: frozen with the simulated GPU's code before they first ran on either."""

from cases import Case

PROGRAMS = [
    Case("entities", "fresh/entities.py", "--layers 1 --width 64 --longest 32 --batch 2"),
    Case("fill-masks", "fresh/fill_masks.py", "--layers 1 --width 64 --seq 32 --batch 2"),
    Case("headlines", "fresh/headlines.py", "--layers 1 --width 64 --source 32 --target 8 --batch 2"),
    Case("mixed-images", "fresh/mixed_images.py", "--layers 1 --width 64 --size 32 --batch 2"),
    Case("wide-cnn", "fresh/wide_cnn.py", "--width 8 --size 16 --batch 4"),
    Case("averaged", "fresh/averaged.py", "--layers 1 --width 64 --batch 2 --seq 16"),
    Case("own-lora", "fresh/own_lora.py", "--layers 1 --width 64 --batch 2 --seq 16"),
    Case("chunked-head", "fresh/chunked_head.py", "--width 32 --layers 1 --tokens 64 --vocabulary 100"),
    Case("private", "fresh/private.py", "--width 8 --size 8 --batch 4"),
    Case("hooked-offload", "fresh/hooked_offload.py", "--layers 3 --width 64 --batch 2 --seq 16"),
    Case("quantized-training", "fresh/quantized_training.py", "--width 32 --layers 2 --batch 8"),
    Case("towers", "fresh/towers.py", "--layers 1 --width 64 --batch 8 --chunk 4 --seq 8"),
    Case("actor-critic", "fresh/actor_critic.py", "--width 32 --worlds 16 --steps 4"),
    Case("frozen-teacher", "fresh/frozen_teacher.py", "--layers 2 --width 256 --batch 2 --seq 16"),
    Case("rate-finder", "fresh/rate_finder.py", "--width 32 --layers 2 --batch 8"),
    Case("energy", "fresh/energy.py", "--width 16 --layers 1 --batch 2 --atoms 6"),
    Case("adalora", "fresh/adalora.py {data}/qwen2", "--batch 2 --seq 16"),
    Case("on-policy", "fresh/on_policy.py {data}/smol {data}/chat", "--batch 1 --new 4"),
]
CASES = {case.name: case for case in PROGRAMS}
BORDERS: list[str] = []
