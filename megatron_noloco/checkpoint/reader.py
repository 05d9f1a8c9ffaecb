"""Single tensors out of a checkpoint: full, of one replica or averaged over several, whatever wrote them."""

import math
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.catalog import Manifest
from megatron_noloco.checkpoint.vector import FlatVector
from megatron_noloco.model.shards import global_name, is_stacked, merge_shards
from megatron_noloco.plans.topology import Position


class Scratch:
    """Memory that is used again and again: fresh pages cost more time than filling them."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def take(self, length: int) -> Tensor:
        """A flat tensor; it shares its memory with those taken before."""
        if len(self._memory) < length:
            self._memory = torch.empty(length)
        return self._memory[:length]


class CheckpointReader:
    """Reads slow weights by their name in the unsplit model; a few tensors in memory at a time.

    The flat vector of a stage and shard lies in equal parts in the files of its lanes; a parameter may lie
    across two of them. Use as a context manager.
    """

    def __init__(self, folder: Path, manifests: list[Manifest]) -> None:
        self.folder = folder
        self.topology = manifests[0].topology
        self.model = manifests[0].config["model"]
        self.vpp = manifests[0].config["parallel"]["virtual_pipeline_model_parallel_size"]
        self._stack = ExitStack()
        self._vectors: dict[Position, FlatVector] = {}
        self._parts, self._other, self._merged = Scratch(), Scratch(), Scratch()
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
        """The full tensor, fp32, averaged over `replicas` where there are several. The next call overwrites it."""
        stage, slices = self._places[name]
        lengths = [math.prod(shape) for _, shape in slices]
        flat_shards = self._parts.take(sum(lengths))
        flat_parts = flat_shards.split(lengths)
        for tp, (flat, (offset, _)) in enumerate(zip(flat_parts, slices, strict=True)):
            self._read_mean(flat, [Position(replica, stage, 0, tp) for replica in replicas], offset)
        if is_stacked(name):
            return flat_shards.view(self.shape(name))
        parts = [flat.view(shape) for flat, (_, shape) in zip(flat_parts, slices, strict=True)]
        return merge_shards(parts, name, self._merged.take)

    def _find_parameters(
        self, manifests: list[Manifest]
    ) -> dict[str, tuple[int, list[tuple[int, list[int]]]]]:
        """Name -> its stage, and for each shard its offset in the flat vector and its shape."""
        places: dict[str, tuple[int, list[tuple[int, list[int]]]]] = {}
        for stage in range(self.topology.pp):
            for tp in range(self.topology.tp):
                manifest = manifests[self.topology.rank(Position(0, stage, 0, tp))]
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
        chunks = self.topology.pp * self.vpp
        layers = self.model["num_layers"] // chunks
        return global_name(name, (int(chunk) * self.topology.pp + stage) * layers)

    def _read_mean(self, flat: Tensor, places: list[Position], offset: int) -> None:
        """One shard's part: the mean over the replicas, which differ in nothing else."""
        self._read_flat(flat, places[0], offset)
        for at in places[1:]:
            other = self._other.take(len(flat))
            self._read_flat(other, at, offset)
            flat += other
        if len(places) > 1:
            flat /= len(places)

    def _read_flat(self, flat: Tensor, at: Position, start: int) -> None:
        stop = start + len(flat)
        for dp in range(self.topology.dp):
            vector = self._vector(Position(at.replica, at.stage, dp, at.tp))
            begin = dp * vector.length  # the same in every lane
            first, last = max(start, begin), min(stop, begin + vector.length)
            if first < last:
                vector.read_into(flat[first - start : last - start], first - begin)

    def _vector(self, at: Position) -> FlatVector:
        if at not in self._vectors:
            path = catalog.replica_folder(self.folder, at.replica) / f"{catalog.rank_name(at)}.safetensors"
            self._vectors[at] = self._stack.enter_context(FlatVector(path, "slow_weights"))
        return self._vectors[at]
