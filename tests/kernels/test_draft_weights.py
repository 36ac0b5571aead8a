"""Which rank reads which tensors of a drafter, and that nothing wrong is read silently."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from k3mesh.errors import ConfigError
from services.contracts.draft import DraftConfig
from services.contracts.draft_sharding import DraftPart, dspark_targets
from services.contracts.model import ModelConfig
from services.contracts.sharding import Share
from services.worker.model.backends import choose_ops
from services.worker.speculative.build import build_drafter
from services.worker.speculative.weights import check_embedding, load_dspark, load_nextn
from tests.lib.drafted import Checkpoints, DraftedEngine, read_draft
from tests.lib.golden import ThreadGroup, ThreadTensorParallel, golden_model, topology_of

FILE = "model.safetensors"
ONE = Share(0, 1)
WHOLE = DraftPart((0, 1, 2), network=True, embedding=True)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("weights"))


@pytest.fixture
def model(checkpoints: Checkpoints) -> ModelConfig:
    return golden_model(str(checkpoints.target))


def dspark(folder: Path, model: ModelConfig) -> DraftConfig:
    draft = read_draft(folder, model, "DSPARK")
    assert isinstance(draft, DraftConfig)
    return draft


def copy_of(folder: Path, new: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """The checkpoint with its tensors changed."""
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, new / FILE)
    (new / "config.json").write_text((folder / "config.json").read_text())
    return new


def refuses(call: Callable[[], object], code: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        call()
    assert refused.value.detail == code
    assert words in refused.value.message and FILE in refused.value.message


def test_each_stage_reads_its_taps_alone_and_the_last_all_the_rest(checkpoints: Checkpoints, model: ModelConfig):
    draft = dspark(checkpoints.dspark("0,2,4", "attn_res", True), model)
    topology = topology_of(model, partition=(1, 2, 1, 2))
    names: list[set[str]] = []
    for rank in range(4):
        part = DraftPart.of(draft, topology, topology.place_of(rank))
        names.append({target.name for target in dspark_targets(draft, part, ONE)})
    assert names[0] == set()
    assert names[1] == {"context_proj.0", "fc_norm.0.weight"}  # layer 1 reads what tap 0 takes
    assert names[2] == {"context_proj.1", "fc_norm.1.weight"}
    assert {"context_proj.2", "fc_norm.2.weight", "embed_tokens.weight", "context_norm.weight"} <= names[3]
    alone = DraftPart.of(draft, topology_of(model), topology_of(model).place_of(0))
    assert "embed_tokens.weight" not in {target.name for target in dspark_targets(draft, alone, ONE)}


@pytest.mark.parametrize(
    "name", ["context_proj.weight", "fc_norm.1.weight", "layers.1.mlp.up_proj.weight", "final_norm.weight"]
)
def test_a_missing_tensor_is_named(checkpoints: Checkpoints, model: ModelConfig, tmp_path: Path, name: str):
    folder = copy_of(checkpoints.dspark(fc_norm=True), tmp_path, lambda tensors: tensors.pop(name))
    nothing = DraftPart((), network=False, embedding=False)  # not even a stage that reads nothing lets it pass
    for part in (WHOLE, nothing):
        refuses(lambda part=part: load_dspark(folder, dspark(folder, model), part, ONE, torch.float32), "DRAFT_WEIGHTS", name)


@pytest.mark.parametrize(
    ("name", "of"), [("fc_norm.0.weight", False), ("fc_norm.3.weight", True), ("fc.weight", False), ("lm_head.weight", False)]
)
def test_an_unexpected_tensor_is_named(checkpoints: Checkpoints, model: ModelConfig, tmp_path: Path, name: str, of: bool):
    folder = copy_of(checkpoints.dspark(fc_norm=of), tmp_path, lambda tensors: tensors.update({name: torch.ones(64)}))
    refuses(lambda: load_dspark(folder, dspark(folder, model), WHOLE, ONE, torch.float32), "DRAFT_WEIGHTS", name)


def test_a_tensor_of_another_shape_is_named(checkpoints: Checkpoints, model: ModelConfig, tmp_path: Path):
    def narrow(tensors: dict[str, Tensor]) -> None:
        tensors["context_proj.weight"] = tensors["context_proj.weight"][:, :128].clone()

    folder = copy_of(checkpoints.dspark(), tmp_path, narrow)
    words = "context_proj.weight has shape [64, 128], expected [64, 192]"
    refuses(lambda: load_dspark(folder, dspark(folder, model), WHOLE, ONE, torch.float32), "DRAFT_WEIGHTS", words)


def test_names_may_begin_with_model(checkpoints: Checkpoints, model: ModelConfig, tmp_path: Path):
    def prefixed(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    folder = checkpoints.dspark()
    plain = load_dspark(folder, dspark(folder, model), WHOLE, ONE, torch.float32)
    other = load_dspark(copy_of(folder, tmp_path, prefixed), dspark(folder, model), WHOLE, ONE, torch.float32)
    assert plain.keys() == other.keys()
    assert all(torch.equal(plain[name], other[name]) for name in plain)


def test_a_last_stage_behind_others_needs_the_drafters_embedding_and_one_stage_does_not(
    checkpoints: Checkpoints, model: ModelConfig, tmp_path: Path
):
    (tmp_path / "dspark").mkdir(), (tmp_path / "nextn").mkdir()
    block = copy_of(checkpoints.dspark(), tmp_path / "dspark", lambda tensors: tensors.pop("embed_tokens.weight"))
    name = "language_model.model.layers.6.embed_tokens.weight"
    layer = copy_of(checkpoints.target, tmp_path / "nextn", lambda tensors: tensors.pop(name))
    staged, alone = topology_of(model, stages=2), topology_of(model)
    nextn = read_draft(layer, model, "MTP")

    def both(topology, rank: int) -> tuple[Callable[[], object], Callable[[], object]]:
        place, draft = topology.place_of(rank), dspark(block, model)
        return (
            lambda: load_dspark(block, draft, DraftPart.of(draft, topology, place), ONE, torch.float32),
            lambda: load_nextn(layer, nextn, model, topology, place, torch.float32),  # type: ignore[arg-type]
        )

    for call, missing in zip(both(staged, 1), ("embed_tokens.weight", name), strict=True):
        refuses(call, "DRAFT_EMBED_MISSING", missing)
    for call in both(alone, 0):
        call()


@pytest.mark.parametrize("algorithm", ["DSPARK", "MTP"])
def test_an_embedding_of_another_target_is_refused_by_the_rank_that_has_the_row(
    checkpoints: Checkpoints, model: ModelConfig, tmp_path: Path, algorithm: str
):
    name = "embed_tokens.weight" if algorithm == "DSPARK" else "language_model.model.layers.6.embed_tokens.weight"
    right = checkpoints.dspark() if algorithm == "DSPARK" else checkpoints.target
    wrong = copy_of(right, tmp_path, lambda tensors: tensors[name][300].neg_())
    draft, staged = read_draft(right, model, algorithm), topology_of(model, stages=2, tp=2)
    for rank in range(4):
        check_embedding(checkpoints.target, right, draft, staged, staged.place_of(rank))
        if rank < 3:  # row 300 of 512 is in the second half, of the last stage
            check_embedding(checkpoints.target, wrong, draft, staged, staged.place_of(rank))
    alone = topology_of(model)
    check_embedding(checkpoints.target, wrong, draft, alone, alone.place_of(0))  # which borrows the target's
    words = f"tensor {name} is another embedding than language_model.model.embed_tokens.weight of {checkpoints.target}"
    last = staged.place_of(3)
    refuses(lambda: check_embedding(checkpoints.target, wrong, draft, staged, last), "DRAFT_TARGET_MISMATCH", words)


@pytest.mark.parametrize(("rank", "layers"), [(0, 2), (1, 0), (1, 1)], ids=["first with", "last without", "last with a part"])
def test_a_stage_that_holds_parts_it_must_not_is_refused(checkpoints: Checkpoints, model: ModelConfig, rank: int, layers: int):
    folder, topology = checkpoints.dspark(), topology_of(model, stages=2)
    engine = DraftedEngine(checkpoints.target, folder, topology)
    pool = next(iter(engine.caches[1].draft.values()))
    caches = replace(engine.caches[rank], draft={6 + n: pool for n in range(layers)})
    ops, _ = choose_ops(model, topology, "cpu", torch.float32, torch.float32)
    with pytest.raises(ConfigError, match=f"stage {rank} of 2 has {layers} draft cache layers") as refused:
        build_drafter(
            folder, engine.draft, model, topology, topology.place_of(rank), engine.stages[rank], caches,
            ThreadTensorParallel(0, 1, ThreadGroup(1)), engine.dispatchers[rank], ops, torch.float32,
        )  # fmt: skip
    assert refused.value.detail == "DRAFT_OWNERSHIP"


def test_a_drafter_that_does_not_divide_over_the_group_is_refused(checkpoints: Checkpoints, model: ModelConfig):
    draft = dspark(checkpoints.dspark(), model)
    with pytest.raises(ConfigError, match="num_attention_heads = 8") as refused:
        dspark_targets(draft, WHOLE, Share(0, 3))
    assert refused.value.detail == "DRAFT_UNSUPPORTED"
