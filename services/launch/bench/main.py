"""`k3mesh bench NAME`: measurements, one module each, most on meshes that they start themselves."""

from k3mesh.cli.commands import Command, call

BENCHES = {
    "control": Command("services.launch.bench.control", "scheduling and its streams, with workers that compute nothing"),
    "kernels": Command("services.launch.bench.kernels", "each op's time over its floor on a GPU, at the shapes of Kimi K3"),
    "rounds": Command("services.launch.bench.rounds", "decode rounds of one rank on a GPU beside what their kernels take"),
    "serve": Command("services.launch.bench.serve", "a mesh under load: TTFT, TPOT, tokens a second, acceptance, memory"),
    "simulator": Command("services.launch.bench.simulator", "the simulator against a mesh of this machine: counts and times"),
    "speculation": Command("services.launch.bench.speculation", "acceptance and tokens per second with a drafter, and without"),
    "transfer": Command("services.launch.bench.transfer", "the cache's way from prefill to decode, against raw UCXX"),
}


def main(argv: list[str]) -> int:
    """Run one of them -> its exit code."""
    return call("k3mesh bench", BENCHES, argv)
