"""The named topologies and the ports of an engine."""

import socket
from pathlib import Path

import pytest

from k3mesh.errors import ConfigError
from services.contracts.mesh import MeshArguments
from services.contracts.topologies import TOPOLOGIES
from services.launch import make_checkpoint
from services.launch.engine import lay_out, ports_needed
from services.launch.fits import check_engines
from services.launch.mesh import LocalMesh, UpArguments
from services.launch.ports import FIRST, LAST, free_ports, require_free
from services.launch.state import StateDir
from tests.lib.k3 import K3_FOLDER
from tests.lib.mesh import short_folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    assert make_checkpoint.main([str(folder)]) == 0
    return folder


@pytest.mark.parametrize(
    ("name", "prefill", "decode"), [("laptop", (4, 1, 1, 1), (1, 2, 1, 2)), ("laptop-tp2", (2, 1, 2, 2), (1, 2, 2, 4))]
)
def test_named_topologies_have_their_documented_shape(name: str, prefill: object, decode: object, checkpoint: Path):
    engines = MeshArguments.parse(["--topology", name, "--model", str(checkpoint)]).engines()
    shapes = [engine.topology(engine.load_model_config()) for engine in engines]
    assert [(t.stages, t.dp_size, t.tp_size, t.ep_size) for t in shapes] == [prefill, decode]
    assert all(engine.compute_dtype == engine.cache_dtype == "float32" and engine.device == "cpu" for engine in engines)


def test_one_gpu_is_shared_by_a_rank_of_each_engine(checkpoint: Path):
    engines = MeshArguments.parse(["--topology", "one-gpu", "--model", str(checkpoint)]).engines()
    assert [engine.topology(engine.load_model_config()).world_size for engine in engines] == [1, 1]
    assert all(engine.device == "cuda" for engine in engines)
    assert sum(engine.gpu_memory_utilization for engine in engines) < 1


def test_every_named_topology_is_tested_above():
    assert set(TOPOLOGIES) == {"laptop", "laptop-tp2", "one-gpu", "k3"}


def test_more_flags_reach_one_engine_and_win(checkpoint: Path):
    words = ["--model", str(checkpoint), "--prefill", "--max-num-seqs 3 --num-blocks 9", "--decode=--max-num-seqs 2"]
    prefill, decode = MeshArguments.parse(words).engines()
    assert (prefill.max_num_seqs, prefill.num_blocks, decode.max_num_seqs, decode.num_blocks) == (3, 9, 2, 0)


@pytest.mark.parametrize(
    ("more", "refusal"),
    [
        (["--decode=--tp 2 --expert-parallel-size 4"], "--attn-tp-size 1: must be the same on both engines, decode has 2"),
        (["--prefill=--max-num-sequences 3"], "--max-num-sequences: unknown flag; did you mean --max-num-seqs"),
        (["--prefill=--pp-layer-partition 4,3,3,4"], "--pp-layer-partition 4,3,3,4: sums to 14, the model has 13"),
        (["--topology", "desktop"], "--topology desktop: no such choice; give one of laptop, laptop-tp2, one-gpu, k3"),
    ],
)
def test_a_mesh_that_could_not_work_is_refused(more: list[str], refusal: str, checkpoint: Path):
    with pytest.raises(ConfigError, match=refusal):
        check_engines(MeshArguments.parse(["--model", str(checkpoint), *more]).engines())


def test_a_checkpoint_that_is_not_there_or_not_whole_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=rf"--model {tmp_path}/no: no such directory; "):
        check_engines(MeshArguments.parse(["--model", f"{tmp_path}/no"]).engines())
    with pytest.raises(ConfigError, match=rf"--model {tmp_path}: has no safetensors file; "):
        check_engines(MeshArguments.parse(["--model", str(tmp_path)]).engines())


def test_a_mesh_that_needs_more_than_this_machine_is_refused_before_anything_starts(checkpoint: Path):
    with pytest.raises(ConfigError, match=r"--num-blocks 900000000: the ranks of this node need .* GiB, the host has .* GiB"):
        LocalMesh(UpArguments.parse(["--model", str(checkpoint), "--decode=--num-blocks 900000000"]))
    with pytest.raises(ConfigError, match=r"--topology k3: prefill-0 spans 4 nodes, .*`k3mesh serve` on each node"):
        LocalMesh(UpArguments.parse(["--model", str(K3_FOLDER), "--topology", "k3"]))


def test_nodes_of_an_engine_use_the_same_ports_and_the_first_has_the_scheduler():
    addresses = lay_out(["a", "b"], 2, range(21000, 21000 + ports_needed(2)))
    assert addresses.scheduler == "a:21000"
    assert addresses.workers == ("a:21001", "a:21002", "b:21001", "b:21002")
    assert addresses.agents == ("a:21003", "a:21004", "b:21003", "b:21004")


def test_free_ports_are_different_and_below_the_kernels_own():
    ports = free_ports(20)
    assert len(set(ports)) == 20 and all(FIRST <= port < LAST for port in ports)


def test_a_port_in_use_is_refused_by_flag_and_value():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port {port}: 127\.0\.0\.1:{port} is in use"):
            require_free("127.0.0.1", port)


def test_an_api_key_reaches_the_gateway_by_its_environment_alone(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("K3MESH_API_KEY", "secret-1")
    with short_folder() as folder:
        words = ["--model", str(checkpoint), "--state-dir", str(folder), "--port", str(free_ports(1)[0])]
        state = StateDir(folder)
        state.create()
        specs = [s for stage in LocalMesh(UpArguments.parse(words)).groups(state) for group in stage for s in group.specs]
    assert {spec.name: dict(spec.environment) for spec in specs if spec.environment} == {
        "gateway": {"K3MESH_API_KEY": "secret-1"}
    }
    assert not [spec.name for spec in specs if "secret-1" in " ".join(spec.command)]


def test_flags_within_a_flag_survive_the_way_to_the_supervisor():
    words = ["--model", "/m", "--decode=--enforce-eager", "--gateway", "--max-body-bytes 9"]
    arguments = UpArguments.parse(words)
    assert UpArguments.parse(arguments.argv()) == arguments and arguments.decode == "--enforce-eager"
