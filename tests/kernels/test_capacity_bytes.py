"""The capacity model against the real loader and the real pools, byte for byte."""

from pathlib import Path

import pytest
import torch

from services.contracts.arguments import EngineArguments
from services.contracts.capacity import capacity_of, draft_weight_bytes, weight_bytes
from services.contracts.draft import DraftConfig
from services.contracts.draft_sharding import DraftPart
from services.contracts.mesh import MeshArguments
from services.contracts.placement import place as place_fields
from services.contracts.sharding import Share
from services.launch import make_checkpoint
from services.worker.cache.pools import DTYPES, allocate
from services.worker.model.loader import load_stage_weights
from services.worker.speculative.weights import load_dspark, load_nextn

DEMO = Path(__file__).parents[2] / "models" / "demo"
DSPARK = f"--speculative-algorithm DSPARK --speculative-draft-model-path {DEMO}/dspark"
NEXTN = "--speculative-algorithm MTP --speculative-num-draft-tokens 4"
BF16 = "--dtype bfloat16 --kv-cache-dtype bfloat16"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    assert make_checkpoint.main([str(folder)]) == 0
    return folder


def engines(model: Path, topology: str, flags: str = "") -> tuple[EngineArguments, EngineArguments]:
    words = ["--topology", topology, "--model", str(model), f"--prefill={flags}", f"--decode={flags}"]
    return MeshArguments.parse(words).engines()


def size(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("topology", ["laptop", "laptop-tp2"])
@pytest.mark.parametrize("checkpoint", ["tiny", "demo"])
def test_planned_weights_are_the_bytes_that_the_loader_reads(topology: str, checkpoint: str, tiny: Path):
    model_folder, flags = (tiny, BF16) if checkpoint == "tiny" else (DEMO, "")
    for engine in engines(model_folder, topology, flags):
        model = engine.load_model_config()
        shape = engine.topology(model)
        for rank in range(shape.world_size):
            place = shape.place_of(rank)
            loaded = load_stage_weights(engine.model, model, shape, place, DTYPES[engine.compute_dtype])
            assert weight_bytes(engine, model, shape, place) == size(loaded), f"{engine.engine_id} rank {rank}"


@pytest.mark.parametrize("flags", [DSPARK, NEXTN])
def test_planned_drafter_weights_are_the_bytes_that_its_loader_reads(flags: str):
    for engine in engines(DEMO, "laptop-tp2", flags):
        model = engine.load_model_config()
        shape, draft, dtype = engine.topology(model), engine.load_draft_config(model), DTYPES[engine.compute_dtype]
        assert draft is not None
        for rank in range(shape.world_size):
            place, folder = shape.place_of(rank), Path(engine.draft_path)
            if isinstance(draft, DraftConfig):
                part = DraftPart.of(draft, shape, place)
                loaded = load_dspark(folder, draft, part, Share(place.tp, shape.tp_size), dtype)
            else:
                last = place.stage == shape.last_stage
                loaded = load_nextn(folder, draft, model, shape, place, dtype) if last else {}
            assert draft_weight_bytes(engine, model, shape, place, draft) == size(loaded), f"{engine.engine_id} rank {rank}"


@pytest.mark.parametrize("flags", ["", DSPARK, BF16 + " --num-blocks 7 --num-slots 5"])
def test_planned_cache_is_the_bytes_of_the_pools(flags: str):
    for engine in engines(DEMO, "laptop-tp2", flags):
        it = capacity_of(engine, None)
        for rank in it.ranks:
            record = place_fields(
                it.geometry, rank.place, engine_id="e", engine_epoch=1, model_fingerprint="m",
                num_blocks=it.blocks, num_slots=it.slots, verify_width=engine.verify_width,
            )  # fmt: skip
            pools = allocate(record)
            mapped = sum(Path(f"/proc/self/fd/{fd}").stat().st_size for fd in pools.fds)
            pools.close()
            assert rank.cache(it.blocks, it.slots) == mapped
