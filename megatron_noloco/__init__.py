"""Train large language models with NoLoCo (arXiv 2506.10911): replicas that gossip instead of all-reducing."""

__version__ = "0.5.0"
