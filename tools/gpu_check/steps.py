"""The steps, the most important first."""

from tools.gpu_check.runner import Step

_PYTEST = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider")
_REPLICAS = ("-m", "tools.gpu_check.replicas")
_THROUGHPUT = ("-m", "tools.bench_throughput")


def _tests(name: str, what: str, limit_seconds: float, gpus: int = 1) -> Step:
    return Step(name, what, (*_PYTEST, f"tests/gpu/test_{name}.py"), limit_seconds, gpus)


STEPS = [
    Step("about", "device, driver, versions; compiles FusedAdam", ("-m", "tools.gpu_check.about"), 180),
    _tests("engine", "engine against plain torch: fp32, bf16, fp16 with dynamic scaling; host reads", 300),
    Step("quickstart", "4 replicas on one GPU: the quickstart's loss", (*_REPLICAS, "quickstart"), 240),
    _tests("exchange", "rounds through pinned memory on a side stream equal those on a CPU", 120),
    _tests("resume", "checkpoint and resume, bit for bit", 240),
    Step("throughput-125M", "local step, bf16", (*_THROUGHPUT, "--size", "125M"), 240),
    Step("rounds-2", "k = 50, 2 replicas on one GPU", (*_REPLICAS, "rounds", "--replicas", "2"), 240),
    Step("throughput-1.3B", "local step, bf16", (*_THROUGHPUT, "--size", "1.3B", "--repeats", "5"), 300),
    Step("rounds-4", "k = 50, 4 replicas on one GPU", (*_REPLICAS, "rounds", "--replicas", "4"), 300),
    _tests("export", "export of a bf16 model", 180),
    _tests("kernels", "Transformer Engine, DeepSpeed's FusedAdam, apex: against torch", 240),
    Step("overlap", "pause of a round, 2 replicas", (*_REPLICAS, "overlap", "--replicas", "2"), 240),
    Step("throughput-350M", "local step, bf16", (*_THROUGHPUT, "--size", "350M"), 240),
    _tests("pipeline", "two stages over NCCL, with routes, against one rank", 240, gpus=4),
]
