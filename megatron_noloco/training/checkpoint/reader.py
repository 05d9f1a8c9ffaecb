"""Single tensors out of a checkpoint: full, of one replica or averaged over several, whatever wrote them."""

import math
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from megatron_noloco.model.shards import global_name, merge_shards
from megatron_noloco.plans.topology import Position
from megatron_noloco.training.checkpoint import catalog
from megatron_noloco.training.checkpoint.catalog import Manifest
from megatron_noloco.training.checkpoint.vector import FlatVector


class CheckpointReader:
    """Reads slow weights by their name in the unsplit model; a few tensors in memory at a time.

    The flat vector of a stage and shard lies in equal parts in the files of its lanes; a parameter may lie
    across two of them. Use as a context manager.
    """

    def __init__(self, folder: Path, manifests: list[Manifest]) -> None:
        self.folder = folder
        self.topology = manifests[0].topology
        self.model = manifests[0].config["model"]
        self.virtual_stages = manifests[0].config["parallel"]["virtual_stages"]
        self._stack = ExitStack()
        self._vectors: dict[Position, FlatVector] = {}
        self._places = self._find_parameters(manifests)

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def names(self) -> list[str]:
        """All parameters, in the order of the stages."""
        return list(self._places)

    def shape(self, name: str) -> torch.Size:
        """The full tensor's shape, without reading it."""
        parts = [torch.empty(shape, device="meta") for _, shape in self._places[name][1]]
        return merge_shards(parts, name).shape

    def read(self, name: str, replicas: list[int]) -> Tensor:
        """The full tensor, fp32, averaged over `replicas` where there are several."""
        stage, shards = self._places[name]
        parts = [
            self._mean([Position(replica, stage, 0, shard) for replica in replicas], offset, shape)
            for shard, (offset, shape) in enumerate(shards)
        ]
        return merge_shards(parts, name)

    def _find_parameters(
        self, manifests: list[Manifest]
    ) -> dict[str, tuple[int, list[tuple[int, list[int]]]]]:
        """Name -> its stage, and for each shard its offset in the flat vector and its shape."""
        places: dict[str, tuple[int, list[tuple[int, list[int]]]]] = {}
        for stage in range(self.topology.stages):
            for shard in range(self.topology.shards):
                manifest = manifests[self.topology.rank(Position(0, stage, 0, shard))]
                offset = 0
                for local_name, shape in manifest.layout:
                    name = self._global_name(local_name, stage)
                    tied_copy = name == "output_layer.weight" and not self._untied
                    if not tied_copy:
                        places.setdefault(name, (stage, []))[1].append((offset, shape))
                    offset += math.prod(shape)
        return places

    @property
    def _untied(self) -> bool:
        return self.model["untie_embeddings_and_output_weights"]

    def _global_name(self, local_name: str, stage: int) -> str:
        _, chunk, name = local_name.split(".", 2)  # "chunks.0.decoder..."
        chunks = self.topology.stages * self.virtual_stages
        layers = self.model["num_layers"] // chunks
        return global_name(name, (int(chunk) * self.topology.stages + stage) * layers)

    def _mean(self, places: list[Position], offset: int, shape: list[int]) -> Tensor:
        """One shard's part: the mean over the replicas, which differ in nothing else."""
        length = math.prod(shape)
        total = self._read_flat(places[0], offset, length)
        for at in places[1:]:
            total += self._read_flat(at, offset, length)
        return (total.div_(len(places)) if len(places) > 1 else total).view(shape)

    def _read_flat(self, at: Position, start: int, length: int) -> Tensor:
        pieces = []
        for lane in range(self.topology.lanes):
            vector = self._vector(Position(at.replica, at.stage, lane, at.shard))
            size = vector.length  # the same in every lane
            first, last = max(start - lane * size, 0), min(start + length - lane * size, size)
            if first < last:
                pieces.append(vector.read(first, last))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _vector(self, at: Position) -> FlatVector:
        if at not in self._vectors:
            path = catalog.replica_folder(self.folder, at.replica) / f"{catalog.rank_name(at)}.safetensors"
            self._vectors[at] = self._stack.enter_context(FlatVector(path, "slow_weights"))
        return self._vectors[at]
