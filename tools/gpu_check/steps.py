"""The steps, in the order in which a GPU that is there for minutes answers most."""

from tools.runner import Step

_PYTEST = ("-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider")
_REPLICAS = ("-m", "tools.gpu_check.replicas")
_THROUGHPUT = ("-m", "tools.bench", "throughput")


def _tests(name: str, what: str, limit_seconds: float, gpus: int = 1) -> Step:
    return Step(name, what, (*_PYTEST, f"tests/gpu/test_{name}.py"), limit_seconds, gpus)


# What each settles is in docs/gpu.md. Two minutes each. After `about` come those that have never run on a GPU,
# then those that have not run since they changed.
STEPS = [
    Step("about", "device, driver, versions; compiles FusedAdam", ("-m", "tools.gpu_check.about"), 120),
    Step(
        "quickstart",
        "60 steps of 4 replicas on one GPU: the losses of a CPU",
        (*_REPLICAS, "quickstart", "--steps", "60"),
        120,
    ),
    Step("memory", "peak of 2 steps, 1.3B in bf16", (*_REPLICAS, "memory", "--size", "1.3B"), 120),
    _tests("resume", "checkpoint and resume, bit for bit", 120),
    Step("attached", "attach: torch, FSDP2, ZeRO 1 and 2, bf16", ("-m", "tools.gpu_check.attached"), 120),
    Step("overlap", "pause of a round, 2 replicas", (*_REPLICAS, "overlap", "--replicas", "2"), 120),
    Step("rounds-2", "k = 50, 2 replicas on one GPU", (*_REPLICAS, "rounds", "--replicas", "2"), 120),
    Step("throughput-125M", "local step, bf16", (*_THROUGHPUT, "--size", "125M"), 120),
    _tests("kernels", "Transformer Engine, DeepSpeed's FusedAdam, apex: against torch", 120),
    _tests("exchange", "rounds through pinned memory on a side stream equal those on a CPU", 120),
    Step("throughput-1.3B", "local step, bf16", (*_THROUGHPUT, "--size", "1.3B", "--repeats", "5"), 120),
    Step("rounds-4", "k = 50, 4 replicas on one GPU", (*_REPLICAS, "rounds", "--replicas", "4"), 120),
    Step("throughput-350M", "local step, bf16", (*_THROUGHPUT, "--size", "350M"), 120),
    _tests("pipeline", "two stages over NCCL, with routes, against one rank", 120, gpus=4),
    Step(
        "coding",
        "codes on the GPU: the bits of a CPU, weights per second",
        ("-m", "tools.gpu_check.coding"),
        60,
    ),
    _tests("engine", "engine against plain torch: fp32, bf16, fp16 with dynamic scaling; host reads", 120),
    _tests("export", "export of a bf16 model, its check on the GPU", 120),
    Step("facts", "memory of NCCL and CUDA, pinning, bus", ("-m", "tools.gpu_check.facts"), 60),
]
