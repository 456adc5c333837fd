# SPDX-License-Identifier: Apache-2.0
"""vLLM on the requests of `benchmarks.workers.card`: `FOLDER SIZE ... [--out FILE]`. Runs in an environment with vLLM.

`logprobs=0`, lengths by `max_tokens` alone; the first of four turns is not counted.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from statistics import median

from benchmarks.workers.card_models import PROMPTS, add, folder_of, workload

TURNS = 3


def main(sizes: list[str], folder: Path, out: Path | None) -> None:
    """Measures each size; a turn that ended is kept."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]  # of another environment

    for size in sizes:
        requests = workload(size, PROMPTS.get(size, 64))
        start = time.perf_counter()
        engine = LLM(
            model=str(folder_of(size, folder)),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=512,
            gpu_memory_utilization=0.8,
            seed=0,
        )
        started, rates = time.perf_counter() - start, list[float]()
        inputs = [{"prompt_token_ids": list(prompt)} for prompt, _ in requests]
        params = [
            SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=0)
            for _, length in requests
        ]
        for turn in range(1 + TURNS):
            engine.reset_prefix_cache()
            start = time.perf_counter()
            done = engine.generate(inputs, params, use_tqdm=False)
            seconds = time.perf_counter() - start
            counts = [len(each.outputs[0].token_ids) for each in done]
            if counts != [length for _, length in requests]:
                raise RuntimeError("vLLM gave other lengths than those that were asked for")
            if turn:
                rates.append(sum(counts) / seconds)
                figure = round(median(rates))
                add(out, f"vllm:{size}", tokens_per_second=figure, turns=turn, start_seconds=round(started, 1))
        del engine
        gc.collect()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("sizes", nargs="+")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    main(options.sizes, options.folder.resolve(), options.out)
