"""The whole method in one page: NoLoCo (arXiv 2506.10911) in torch.distributed, with nothing of this project.

    torchrun --nproc-per-node 4 examples/minimal_noloco.py

Every process is a replica of a small model. It takes K steps of AdamW on data of its own, then averages with one
random partner. For reading; `megatron_noloco.outer` is the same with deadlines, coded payloads, overlap and MPI.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

K = 10  # local steps between two rounds
ALPHA = 0.5  # outer momentum
BETA = 0.7  # outer learning rate
GAMMA = 0.7  # pull of the partners to each other
STEPS, SEED = 200, 0


def partner_of(replica: int, replicas: int, round_index: int) -> int:
    """Return the partner in the same random pairs on every replica; the last of an odd number has itself."""
    order = torch.randperm(replicas, generator=torch.Generator().manual_seed(SEED + round_index)).tolist()
    place = order.index(replica)
    return order[min(place ^ 1, replicas - 1)]  # places 0 and 1 are a pair, 2 and 3, ...


def swap(mine: Tensor, partner: int) -> Tensor:
    """Send this replica's vector and return the partner's: the only message of the method."""
    theirs = torch.empty_like(mine)
    messages = [dist.P2POp(dist.isend, mine, partner), dist.P2POp(dist.irecv, theirs, partner)]
    for request in dist.batch_isend_irecv(messages):
        request.wait()
    return theirs


class Replica:
    def __init__(self, replica: int, replicas: int) -> None:
        torch.manual_seed(SEED)  # equal weights to start from
        self.model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.replica, self.replicas = replica, replicas
        self.slow = self.fast()  # phi, the slow weights
        self.momentum = torch.zeros_like(self.slow)  # delta, the outer momentum buffer
        self.draw = torch.Generator().manual_seed(1 + replica)  # data of its own

    def fast(self) -> Tensor:
        """Return theta, the fast weights."""
        return parameters_to_vector(self.model.parameters()).detach().clone()

    def local_step(self) -> float:
        points = 4 * torch.rand(64, 2, generator=self.draw) - 2  # a surface to learn: sin(x) y
        loss = nn.functional.mse_loss(self.model(points).squeeze(1), points[:, 0].sin() * points[:, 1])
        self.inner.zero_grad()
        loss.backward()
        self.inner.step()
        return loss.item()

    def round(self, round_index: int) -> None:
        """delta <- alpha delta + beta mean(theta - phi) - gamma (phi - mean(phi)); phi, theta <- phi + delta.

        Both means are over the pair, and mean(c) = beta mean(theta - phi) + gamma mean(phi) contains them.
        """
        combined = BETA * (self.fast() - self.slow) + GAMMA * self.slow  # c, all that is sent
        partner = partner_of(self.replica, self.replicas, round_index)
        theirs = combined if partner == self.replica else swap(combined, partner)
        self.momentum = ALPHA * self.momentum + (combined + theirs) / 2 - GAMMA * self.slow
        self.slow = self.slow + self.momentum
        vector_to_parameters(self.slow.clone(), self.model.parameters())  # the state of AdamW is kept

    def train(self) -> Tensor:
        for step in range(STEPS):
            loss = self.local_step()
            if (step + 1) % K == 0:
                self.round(step // K)
                print(f"replica {self.replica}, step {step + 1}: loss {loss:.4f}")
        return self.slow


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Replica(dist.get_rank(), dist.get_world_size()).train()
    dist.barrier()  # a partner may still need this process
    dist.destroy_process_group()
