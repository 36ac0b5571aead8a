"""Step 6: realistic load over levels of concurrency."""

import asyncio
from dataclasses import asdict

from services.launch.bench.serve import ServeArguments, measure
from services.launch.tokenizer_files import SPECIAL_IDS
from services.launch.validate.report import Found, check
from services.launch.validate.site import Site


def run(site: Site) -> Found:
    a = site.arguments
    words = ["--model", a.model, "--topology", site.topology, f"--prefill={a.prefill}", f"--decode={a.decode}"]
    words += ["--input-tokens", str(a.input_tokens), "--output-tokens", str(a.output_tokens)]
    arguments = ServeArguments.parse([*words, "--concurrency", ",".join(map(str, a.concurrency))])
    vocabulary = site.engines()[0].load_model_config().vocab_size - SPECIAL_IDS
    with site.mesh("load", site.drafter()) as state:
        served = asyncio.run(measure(arguments, state, vocabulary))
    checks = [
        check(
            f"{level.concurrency} requests at a time",
            f"{level.prompts_per_s:.2f} prompts/s, {level.input_tokens_per_s:.0f} input and "
            f"{level.output_tokens_per_s:.0f} output tokens/s, TTFT {1e3 * level.time_to_first_token.p50:.1f} ms, TPOT "
            f"{1e3 * level.time_per_token.p50:.2f} ms (medians), {level.acceptance_length:.2f} tokens a window",
            passed=True,
            limit="all answered in full",
        )
        for level in served.levels
    ]
    return checks, asdict(served)
