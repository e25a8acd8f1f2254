"""The three ways to attach a manager in docs/training.md run as they stand in a training, and resume."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from cnr_store import Store
from tests.support.launcher import Launcher, Program

ROOT = Path(__file__).resolve().parents[2]
SECTION = re.search(
    r"^## Attach.*?(?=^## )", (ROOT / "docs" / "training.md").read_text(), flags=re.DOTALL | re.MULTILINE
)
PLAIN, TORCHREC, RANKS = re.findall(r"```python\n(.*?)```", SECTION.group(0) if SECTION else "", flags=re.DOTALL)

NUM_ROWS = 60

IMPORTS = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
from torch.nn.parallel import DistributedDataParallel
from cnr_store.training import CheckpointManager
torch.set_num_threads(1)
torch.manual_seed(0)
"""

MODEL = """
model = torch.nn.EmbeddingBag(60, 4, sparse=True)
dataset = torch.arange(1000)
loader = StatefulDataLoader(dataset, batch_size=4)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
trained = []


def train_step(batch):
    optimizer.zero_grad()
    model(batch[:, None] % 60).square().mean().backward()
    optimizer.step()
    trained.extend(batch.tolist())
"""

DISTRIBUTED = """
rank, world = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=rank, world_size=world)
"""

SHARDED_MODEL = """
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from fbgemm_gpu.split_embedding_configs import EmbOptimType


class Bags(torch.nn.Module):
    def __init__(self):
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=60, feature_names=["f", name])
            for name in ("a", "b")
        ]
        self.bags = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
        self.top = torch.nn.Linear(16, 1)

    def forward(self, batch):
        return self.top(self.bags(batch).values())


device, model = torch.device("cpu"), Bags()
sharders = [EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD})]
ways = [row_wise(compute_kernel="fused"), table_wise(rank=0, compute_kernel="fused")]
placed = construct_module_sharding_plan(
    model.bags, dict(zip(["a", "b"], ways)), local_size=world, world_size=world, device_type="cpu", sharder=sharders[0]
)
plan = ShardingPlan({"bags": placed})
dataset = torch.arange(1000) % 60
loader = StatefulDataLoader(dataset, batch_size=4, sampler=StatefulDistributedSampler(dataset, world, rank))
"""

TRAIN_SHARDED = """
manager.restore()
for ids in loader:
    lengths = torch.ones(3 * len(ids), dtype=torch.int32)
    features = KeyedJaggedTensor.from_lengths_sync(["f", "a", "b"], ids.repeat(3), lengths)
    optimizer.zero_grad()
    sharded(features).square().mean().backward()
    optimizer.step()
    manager.step()
manager.close()
print("TRAINED", [manager.current_step])
"""

TRAIN_COPIES = """
state = manager.restore()
for batch in loader:
    train_step(batch)
    manager.step()
    if state is None and manager.current_step == 120:  # what came behind the save at 100 is lost
        break
manager.close()
print("TRAINED", trained)
"""


def run(launcher: Launcher, script: str, folder: Path, world: int = 1) -> list[list[list[int]]]:
    """Run a script in ``world`` processes; returns the lists of numbers that each printed."""
    path = folder / "train.py"
    path.write_text(script)
    meeting = folder / f"meeting{len(list(folder.iterdir()))}"
    ranks = [
        Program(
            [str(path), str(rank), str(world), str(meeting)],
            {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world), "WORLD_SIZE": str(world),
            },
        )
        for rank in range(world)
    ]  # fmt: skip
    outputs = []
    for ended in launcher.run(*ranks, folder=folder):
        assert ended.returncode == 0, ended.stderr
        outputs.append(ended.stdout)
    lines = [[line for line in output.splitlines() if line.startswith("TRAINED")] for output in outputs]
    return [[json.loads(line.removeprefix("TRAINED")) for line in of_rank] for of_rank in lines]


def saved_steps(folder: Path, name: str) -> list[int]:
    records = Store.open(str(folder / name)).log()
    return sorted(record.step for record in records if record.kind in ("baseline", "delta"))


def test_a_plain_model_goes_on_where_it_was_saved(launcher: Launcher, tmp_path: Path) -> None:
    once = MODEL + PLAIN + 'print("TRAINED", trained)'

    ((first, second),) = run(launcher, IMPORTS + once + once, tmp_path)

    assert saved_steps(tmp_path, "run-1") == [100, 200]
    assert first == list(range(1000))
    assert second == list(range(800, 1000)), "the last save was at step 200"


def test_several_ranks_train_every_sample_once(launcher: Launcher, tmp_path: Path) -> None:
    once = MODEL + RANKS.replace("batch_size=256", "batch_size=4") + TRAIN_COPIES

    ranks = run(launcher, IMPORTS + DISTRIBUTED + once + once, tmp_path, 2)

    assert saved_steps(tmp_path, "run-3") == [100]
    assert [(len(stopped), len(resumed)) for stopped, resumed in ranks] == [(480, 100), (480, 100)]
    assert sorted(s for stopped, resumed in ranks for s in stopped[:400] + resumed) == list(range(1000))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchrec") is None, reason="torchrec and fbgemm-gpu are not installed")
def test_a_torchrec_model_on_two_ranks(launcher: Launcher, tmp_path: Path) -> None:
    script = IMPORTS + DISTRIBUTED + SHARDED_MODEL + TORCHREC + TRAIN_SHARDED

    assert run(launcher, script, tmp_path, 2) == [[[125]], [[125]]]
    assert saved_steps(tmp_path, "run-2") == [100]
    tables = Store.open(str(tmp_path / "run-2")).snapshot().tables
    assert {name: schema.num_rows for name, schema in tables.items()} == {
        "bags.embedding_bags.a.weight": NUM_ROWS, "bags.embedding_bags.b.weight": NUM_ROWS,
    }  # fmt: skip
