"""`ligerprof run --device simulated --world`: ranks of a larger world."""

import json
import re
from pathlib import Path

import pytest

from ligerprof.errors import RecipeError
from ligerprof.simulated_gpu.ranks.world import World, parse_ranks
from tests.simulated_gpu.test_machine import simulate

CHECKS = Path(__file__).with_name("rank_checks.py")


@pytest.mark.slow
def test_ranks_that_others_wait_for_run_too(tmp_path: Path) -> None:
    done = simulate(tmp_path, str(CHECKS), options=("--world", "4", "--ranks", "3"))
    assert done.returncode == 0, done.stderr
    # 3 asked for; 2 and 0 send what it needs, and 1 is the stage in front of it
    # several processes write, and a line may end after another's
    assert sorted(re.findall(r"rank \d passed", done.stderr)) == [f"rank {rank} passed" for rank in range(4)]
    ranks = json.loads(done.stdout)["ranks"]
    assert {rank["rank"] for rank in ranks} == {0, 1, 2, 3}
    made_up = {row["what"] for row in ranks[0]["simulated"]["made_up"]}
    assert "all_reduce of int64, as if ranks that do not run had what one has that does" in made_up


NODES = ("--num_machines=8", "--machine_rank=1", "--main_process_ip=10.1.2.3", "--main_process_port=29500")
LAUNCHERS = {
    "torch": ("-m", "torch.distributed.run", "--nproc-per-node", "8", "--nnodes", "8", "--rdzv-endpoint", "head:29400"),
    "accelerate": ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=64", *NODES),
    "deepspeed": ("-c", "from deepspeed.launcher.runner import main; main()", "--hostfile", "hosts"),
}


@pytest.mark.parametrize(
    "package", [name if name == "torch" else pytest.param(name, marks=pytest.mark.slow) for name in LAUNCHERS]
)
def test_launchers_start_the_chosen_ranks_of_all_nodes(tmp_path: Path, package: str) -> None:
    pytest.importorskip(package)
    (tmp_path / "hosts").write_text("".join(f"node-{number} slots=8\n" for number in range(8)))
    program = tmp_path / "alone.py"
    program.write_text(
        "import os, torch\n"
        "assert (os.environ['WORLD_SIZE'], os.environ['LOCAL_WORLD_SIZE']) == ('64', '8')\n"
        "torch.empty(int(os.environ['RANK']) + 1 << 20, device='cuda')\n"
    )
    done = simulate(tmp_path, *LAUNCHERS[package], str(program), options=("--ranks", "0,63"))
    assert done.returncode == 0, done.stderr
    assert [(rank["rank"], rank["peak_bytes"]) for rank in json.loads(done.stdout)["ranks"]] == [
        (63, 64 << 22),
        (0, 1 << 22),
    ]


@pytest.mark.slow
def test_a_rank_runs_its_own_of_the_functions_that_a_program_spawns(tmp_path: Path) -> None:
    program = tmp_path / "spawns.py"
    program.write_text(
        "import torch, torch.multiprocessing as mp\n"
        "def work(rank, count):\n"
        "    torch.cuda.set_device(rank)\n"
        "    assert torch.empty(rank + 1 << 20, device='cuda').device.index == rank\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(work, (torch.cuda.device_count(),), nprocs=torch.cuda.device_count())\n"
    )
    done = simulate(tmp_path, str(program), options=("--world", "4", "--ranks", "2"))
    assert done.returncode == 0, done.stderr
    assert [(rank["rank"], rank["peak_bytes"]) for rank in json.loads(done.stdout)["ranks"]] == [(2, 3 << 22)]


@pytest.mark.slow
def test_a_rank_that_ends_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "assert dist.get_rank()\n"
        "dist.broadcast(torch.zeros(1, dtype=torch.long, device='cuda'), src=0)\n"
    )
    done = simulate(tmp_path, str(program), options=("--world", "2"))
    assert done.returncode == 1
    assert f"ligerprof: {program}:4: rank 1 waits for rank 0, which has ended." in done.stderr


@pytest.mark.parametrize(("text", "ranks"), [("0", (0,)), ("3,1-2", (1, 2, 3)), ("7,0", (0, 7))])
def test_ranks_are_read(text: str, ranks: tuple[int, ...]) -> None:
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "-1", "1-", "a", "0,,1"])
def test_what_is_not_ranks_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="not ranks"):
        parse_ranks(text)


def test_the_first_and_the_last_rank_run_by_default() -> None:
    assert (World().chosen(64), World().chosen(1), World(ranks=(5,)).chosen(64)) == ((0, 63), (0,), (5,))
    with pytest.raises(RecipeError, match="has the ranks 0 to 3"):
        World(ranks=(4,)).chosen(4)
