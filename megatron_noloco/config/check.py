"""Whether a file is right, and what it would do."""

from megatron_noloco.config.load import load_config
from megatron_noloco.config.summary import describe
from megatron_noloco.config.wording import ConfigError


def check_file(path: str, world_size: int | None) -> list[str]:
    """The banner of a run; empty where the number of ranks is known neither from `world_size` nor from the file.

    Raises ConfigError, each problem with the file's name.
    """
    try:
        config = load_config(path)
        parallel = config.parallel
        if world_size is None and parallel.replicas != "auto":
            stage_ranks = parallel.data_parallel_size * parallel.tensor_model_parallel_size
            world_size = parallel.replicas * parallel.pipeline_model_parallel_size * stage_ranks
        return [] if world_size is None else describe(config, config.topology(world_size))
    except ConfigError as error:  # problems of the topology come without the file's name
        named = (p if p.startswith(f"{path}: ") else f"{path}: {p}" for p in error.problems)
        raise ConfigError(named) from None
